//! Generates load and prints the measurements as JSON. The load is TCP connections, DNS queries, API requests, watches,
//! or nodes with pods. scripts/bench-services, scripts/bench-api, scripts/bench-scheduler and scripts/bench-controllers
//! run it.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a measurement that fails has no result"
)]

#[path = "load/api.rs"]
mod api;
#[path = "load/nodes.rs"]
mod nodes;
#[path = "load/sockets.rs"]
mod sockets;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::{Args, Parser, Subcommand};
use serde_json::json;

/// Generates load and prints the rate and the latency.
#[derive(Parser)]
struct Arguments {
    #[command(subcommand)]
    work: Work,
    /// `cargo bench` passes this flag.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Subcommand)]
enum Work {
    /// Accepts TCP connections and closes them, until it is killed.
    Listen(sockets::Listen),
    /// Opens and closes TCP connections.
    Connect(sockets::Connect),
    /// Queries the addresses of `s{n}.NAMESPACE.svc.cluster.local`.
    Dns(sockets::Dns),
    /// Sends HTTP requests on kept connections.
    Requests(api::Requests),
    /// Holds watches, and measures how long their events take.
    Watches(api::Watches),
    /// Acts as nodes whose pods run without containers, until standard input closes.
    Nodes(nodes::Nodes),
}

/// Number and duration of concurrent operations.
#[derive(Args, Clone, Copy)]
struct Limits {
    /// Threads, each with one operation at a time.
    #[arg(long, default_value_t = 4)]
    clients: usize,
    /// Operations in total. The default is as many as the time allows.
    #[arg(long, default_value_t = usize::MAX)]
    count: usize,
    /// Seconds after which no operation begins.
    #[arg(long, default_value_t = 3600.0)]
    seconds: f64,
}

/// Runs numbered operations on `limits.clients` threads and reports them. `client` makes the operation of one thread,
/// which returns whether it succeeded.
fn run<F: FnMut(usize) -> bool>(limits: Limits, client: impl Fn(usize) -> F + Sync) -> serde_json::Value {
    let (next, failed) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let ready = std::sync::Barrier::new(limits.clients + 1);
    let (samples, elapsed) = std::thread::scope(|scope| {
        let thread = |number| {
            let (client, next, failed, ready) = (&client, &next, &failed, &ready);
            scope.spawn(move || {
                let mut act = client(number);
                ready.wait();
                let (mut samples, start) = (Vec::new(), Instant::now());
                while start.elapsed().as_secs_f64() < limits.seconds {
                    let operation = next.fetch_add(1, Ordering::Relaxed);
                    if operation >= limits.count {
                        break;
                    }
                    let begin = Instant::now();
                    if !act(operation) {
                        failed.fetch_add(1, Ordering::Relaxed);
                    }
                    samples.push(begin.elapsed());
                }
                samples
            })
        };
        let threads: Vec<_> = (0..limits.clients).map(thread).collect();
        ready.wait();
        let begin = Instant::now();
        let samples: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect();
        (samples, begin.elapsed())
    });
    report(samples, elapsed, failed.into_inner())
}

/// Rate per second and quantiles in microseconds.
fn report(mut samples: Vec<Duration>, elapsed: Duration, failed: usize) -> serde_json::Value {
    samples.sort_unstable();
    let quantile = |percent: usize| {
        let at = (samples.len() * percent / 100).min(samples.len().saturating_sub(1));
        samples.get(at).map_or(0.0, |sample| sample.as_secs_f64() * 1e6)
    };
    #[expect(clippy::cast_precision_loss, reason = "a rate")]
    let rate = samples.len() as f64 / elapsed.as_secs_f64();
    json!({"count": samples.len(), "failed": failed, "per_second": rate, "p50": quantile(50), "p99": quantile(99),
        "max": quantile(100)})
}

fn main() {
    match Arguments::parse().work {
        Work::Listen(listen) => sockets::listen(&listen),
        Work::Connect(connect) => println!("{}", sockets::connect(&connect)),
        Work::Dns(dns) => println!("{}", sockets::dns(&dns)),
        Work::Requests(requests) => println!("{}", api::requests(&requests)),
        Work::Watches(watches) => api::watches(&watches),
        Work::Nodes(nodes) => nodes::run(nodes),
    }
}
