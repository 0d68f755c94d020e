//! Fixtures for tests that run the built binary as a user would: a machine of its own (a network
//! namespace, directories, a cgroup), a registry, a cluster, a runtime alone, the real kubectl and crictl.
//!
//! Links nothing of what it tests. Whatever a test starts ends with it, also when it fails.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::disallowed_methods,
    clippy::print_stderr,
    reason = "fixtures of tests panic and wait like tests"
)]

mod cgroup;
mod cluster;
mod cri;
mod flannel;
mod host;
mod kubectl;
mod machine;
mod nodes;
mod stock;
mod trace;

pub use cgroup::end_cgroup;
pub use cluster::Cluster;
pub use cri::Cri;
pub use flannel::Flannel;
pub use host::{Host, inside};
pub use kubectl::Kubectl;
pub use machine::{Machine, on_a_machine};
pub use nodes::{Agent, Nodes};
pub use stock::Stock;
pub use trace::Trace;

use std::time::{Duration, Instant};

/// How many times slower a machine may be than one on which what is waited for comes in time.
const SLOWEST: u64 = 6;

/// Waits until `done` gives a value, looking twenty times a second; panics with `what` when it takes more than
/// `seconds` on a machine that is not slow, and six times as long on any.
pub fn eventually<T>(what: &str, seconds: u64, mut done: impl FnMut() -> Option<T>) -> T {
    let seconds = seconds * SLOWEST;
    let end = Instant::now() + Duration::from_secs(seconds);
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(Instant::now() < end, "waited {seconds} s in vain for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}
