//! ADD and DEL of pods with one host port. Our plugins in process and as executables, and the reference plugins
//! (Debian's containernetworking-plugins) alternate in one run. As root:
//! `cargo bench -p coracle-cni --bench reference`. The path of a built `coracle` follows `--` if it is not
//! `target/coracle`.
//!
//! There are two measurements. The first has one pod at a time with complete DELs. The second has many pods at once,
//! and removes them as a node does: their namespaces end before one sweep. This measurement ends when no address
//! is allocated.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stdout,
    reason = "a bench prints, and panics like a test"
)]

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use coracle_cni::{Attachment, Network, NetworkConfig, PluginKind};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use serde_json::{Value, json};

/// First measurement: number of pods. Second measurement: number of concurrent pods, and number of repetitions.
const ROUNDS: u16 = 40;
const PODS: u16 = 100;
const BATCHES: u16 = 3;

/// A process in its own network namespace, which represents a sandbox.
struct Sandbox(Child);

impl Sandbox {
    fn new() -> Self {
        let child =
            Command::new("unshare").args(["--net", "sleep", "1000"]).stdin(Stdio::null()).spawn().unwrap();
        let own = std::fs::read_link("/proc/thread-self/ns/net").unwrap();
        let path = format!("/proc/{}/ns/net", child.id());
        while std::fs::read_link(&path).is_ok_and(|netns| netns == own) {
            std::thread::sleep(Duration::from_millis(2));
        }
        Self(child)
    }

    fn netns(&self) -> PathBuf {
        format!("/proc/{}/ns/net", self.0.id()).into()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

fn list(bridge: &str, subnet: &str, dir: &Path) -> Value {
    let places = json!({"table": bridge, "stateDir": dir.join("plugins")});
    json!({"cniVersion": "1.0.0", "name": bridge, "plugins": [
        {"type": "bridge", "bridge": bridge, "isGateway": true, "ipMasq": true, "hairpinMode": true,
         "coracle": places, "ipam": {"type": "host-local", "dataDir": dir.join("addresses"),
         "ranges": [[{"subnet": subnet}]], "routes": [{"dst": "0.0.0.0/0"}]}},
        {"type": "portmap", "capabilities": {"portMappings": true}, "coracle": places}]})
}

fn call(dir: &Path, command: &str, id: &str, netns: &Path, conf: &Value) -> Value {
    let mut child = Command::new(dir.join(conf["type"].as_str().unwrap()))
        .envs([("CNI_COMMAND", command), ("CNI_CONTAINERID", id), ("CNI_IFNAME", "eth0")])
        .env("CNI_NETNS", netns)
        .env("CNI_PATH", dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(conf.to_string().as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// Wall time, and processor time of this process and its children. Work of the kernel that belongs to no process is
/// not included, such as the end of a namespace.
#[derive(Clone, Copy, Default)]
struct Cost {
    wall: Duration,
    cpu: Duration,
}

impl Cost {
    fn of<T>(work: impl FnOnce() -> T) -> (T, Self) {
        let (start, before) = (Instant::now(), cpu());
        let result = work();
        (result, Self { wall: start.elapsed(), cpu: cpu() - before })
    }
}

fn cpu() -> Duration {
    let of = |who| {
        let usage = getrusage(who).unwrap();
        usage.user_time().num_microseconds() + usage.system_time().num_microseconds()
    };
    Duration::from_micros((of(UsageWho::RUSAGE_SELF) + of(UsageWho::RUSAGE_CHILDREN)).unsigned_abs())
}

/// One of the compared implementations.
enum Side {
    /// The plugins in this process, with the directory of the allocated addresses.
    Inside(tokio::runtime::Runtime, Network, PathBuf),
    /// The plugins as executables in a directory, with their configuration list.
    Outside(PathBuf, Value),
}

impl Side {
    fn add(&self, id: &str, netns: &Path, port: u16) -> Value {
        let ports = json!([{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]);
        match self {
            Self::Inside(runtime, network, _) => {
                let at = Attachment {
                    id: id.to_owned(),
                    netns: netns.to_owned(),
                    ifname: "eth0".to_owned(),
                    ports: serde_json::from_value(ports).unwrap(),
                    ..Attachment::default()
                };
                runtime.block_on(network.add(&at)).unwrap();
                Value::Null
            }
            Self::Outside(dir, list) => {
                let result = call(dir, "ADD", id, netns, &conf(list, 0, &ports, None));
                call(dir, "ADD", id, netns, &conf(list, 1, &ports, Some(&result)))
            }
        }
    }

    /// A complete DEL.
    fn del(&self, id: &str, netns: &Path, port: u16, result: &Value) {
        match self {
            Self::Inside(runtime, network, _) => runtime.block_on(network.del(id)).unwrap(),
            Self::Outside(dir, list) => {
                let ports = json!([{"hostPort": port, "containerPort": 80, "protocol": "tcp"}]);
                for index in [1, 0] {
                    call(dir, "DEL", id, netns, &conf(list, index, &ports, Some(result)));
                }
            }
        }
    }

    /// ADD and DEL of one pod.
    fn one(&self, id: &str, port: u16) -> [Cost; 2] {
        let sandbox = Sandbox::new();
        let netns = sandbox.netns();
        let (result, added) = Cost::of(|| self.add(id, &netns, port));
        let ((), deleted) = Cost::of(|| self.del(id, &netns, port, &result));
        [added, deleted]
    }

    /// Adds all pods, removes them with their namespaces, and waits for the end. Returns the costs per pod.
    fn many(&self, batch: u16) -> [Cost; 2] {
        let sandboxes: Vec<Sandbox> = (0..PODS).map(|_| Sandbox::new()).collect();
        let pods =
            sandboxes.iter().zip(10_000..).map(|(s, port)| (format!("many{batch}-{port}"), s.netns(), port));
        let pods: Vec<_> = pods.collect();
        let (results, added) = Cost::of(|| {
            let add = |(id, netns, port): &(String, PathBuf, u16)| self.add(id, netns, *port);
            pods.iter().map(add).collect::<Vec<_>>()
        });
        let ((), deleted) = Cost::of(|| {
            for ((result, sandbox), (id, netns, port)) in results.iter().zip(sandboxes).zip(&pods) {
                match self {
                    Self::Inside(runtime, network, _) => runtime.block_on(network.release(id)).unwrap(),
                    Self::Outside(..) => self.del(id, netns, *port, result),
                }
                drop(sandbox);
            }
            if let Self::Inside(_, _, addresses) = self {
                // The long-running pod, the lock, and the last allocated address remain.
                while std::fs::read_dir(addresses).unwrap().count() > 3 {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
        });
        [added, deleted].map(|cost| Cost { wall: cost.wall / PODS.into(), cpu: cost.cpu / PODS.into() })
    }
}

/// The configuration of one plugin of the list.
fn conf(list: &Value, index: usize, ports: &Value, previous: Option<&Value>) -> Value {
    let mut conf = list["plugins"][index].clone();
    for key in ["cniVersion", "name"] {
        conf[key] = list[key].clone();
    }
    if index == 1 {
        conf["runtimeConfig"] = json!({"portMappings": ports});
    }
    if let Some(previous) = previous {
        conf["prevResult"] = previous.clone();
    }
    conf
}

/// Median of the wall time and mean of the processor time, in milliseconds.
fn summary(samples: &[[Cost; 2]], of: impl Fn(&[Cost; 2]) -> Cost) -> [f64; 2] {
    let mut wall: Vec<_> = samples.iter().map(|sample| of(sample).wall).collect();
    wall.sort();
    let cpu: Duration = samples.iter().map(|sample| of(sample).cpu).sum();
    [wall[wall.len() / 2].as_secs_f64() * 1e3, cpu.as_secs_f64() * 1e3 / samples.len() as f64]
}

fn print(what: &str, samples: &[Vec<[Cost; 2]>; 3]) {
    println!("| {what}, ms | in process | executables | reference | ratios |\n|---|---|---|---|---|");
    let both = |[a, b]: &[Cost; 2]| Cost { wall: a.wall + b.wall, cpu: a.cpu + b.cpu };
    for (what, of) in [
        ("ADD", (|costs| costs[0]) as fn(&[Cost; 2]) -> Cost),
        ("DEL", |costs| costs[1]),
        ("ADD + DEL", both),
    ] {
        let all = samples.each_ref().map(|samples| summary(samples, of));
        for (index, unit) in ["", ", CPU"].into_iter().enumerate() {
            let [inside, outside, theirs] = all.map(|side| side[index]);
            let ratios = [theirs / inside, theirs / outside].map(|ratio| format!("{ratio:.1}")).join(" / ");
            println!("| {what}{unit} | {inside:.2} | {outside:.2} | {theirs:.2} | {ratios} |");
        }
    }
}

fn main() {
    let built = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/coracle").to_owned();
    let coracle = std::env::args().skip(1).find(|argument| !argument.starts_with('-')).unwrap_or(built);
    let coracle = std::fs::canonicalize(&coracle).unwrap_or_else(|error| panic!("{coracle}: {error}"));
    unshare(CloneFlags::CLONE_NEWNET).expect("this needs root");
    let dir = tempfile::tempdir_in("/run").unwrap();
    let (ours, reference) = (dir.path().join("bin"), PathBuf::from("/usr/lib/cni"));
    std::fs::create_dir_all(&ours).unwrap();
    for kind in PluginKind::ALL {
        std::os::unix::fs::symlink(&coracle, ours.join(kind.name())).unwrap();
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let places = dir.path().join("conf");
    std::fs::create_dir_all(&places).unwrap();
    std::fs::write(places.join("10.conflist"), list("bench0", "10.91.0.0/16", dir.path()).to_string())
        .unwrap();
    let config = NetworkConfig {
        conf_dir: Some(places),
        ..NetworkConfig::of_default_network(
            dir.path().join("state"),
            dir.path().join("root"),
            "bench9",
            "bench",
        )
    };
    let network = runtime.block_on(Network::open(config)).unwrap();
    let sides = [
        Side::Inside(runtime, network, dir.path().join("addresses/bench0")),
        Side::Outside(ours, list("bench1", "10.92.0.0/16", dir.path())),
        Side::Outside(reference, list("bench2", "10.93.0.0/16", dir.path())),
    ];
    // A long-running pod, as on a real node: the costs of a first pod are not measured.
    let long_running = [Sandbox::new(), Sandbox::new(), Sandbox::new()];
    for ((side, sandbox), port) in sides.iter().zip(&long_running).zip(7000..) {
        side.add("long_running", &sandbox.netns(), port);
    }
    let mut samples: [Vec<[Cost; 2]>; 3] = Default::default();
    for round in 0..ROUNDS {
        for (side, samples) in sides.iter().zip(&mut samples) {
            samples.push(side.one(&format!("pod{round}"), 8000 + round));
        }
    }
    print(&format!("a pod at a time, p50 of {ROUNDS}"), &samples);
    let mut samples: [Vec<[Cost; 2]>; 3] = Default::default();
    for batch in 0..BATCHES {
        for (side, samples) in sides.iter().zip(&mut samples) {
            samples.push(side.many(batch));
        }
    }
    print(&format!("{PODS} pods together, p50 of {BATCHES}"), &samples);
}
