//! Metrics of the startup of a new node. Source: `pkg/kubelet/util/node_startup_latency_tracker.go`.
//!
//! ```text
//!   boot ──► start of the agent ──► first attempt to register ──► Node object created ──► Ready
//! ```
//! If the Node object exists already, no duration is recorded, as upstream.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use prometheus::{Gauge, core::Collector};

use crate::metric::valid;

/// Names and descriptions of the metrics, in the order of the phases. The last metric has the total.
const METRICS: [(&str, &str); 5] = [
    (
        "kubelet_node_startup_pre_kubelet_duration_seconds",
        "Duration in seconds of node startup before kubelet starts.",
    ),
    (
        "kubelet_node_startup_pre_registration_duration_seconds",
        "Duration in seconds of node startup before registration.",
    ),
    (
        "kubelet_node_startup_registration_duration_seconds",
        "Duration in seconds of node startup during registration.",
    ),
    (
        "kubelet_node_startup_post_registration_duration_seconds",
        "Duration in seconds of node startup after registration.",
    ),
    ("kubelet_node_startup_duration_seconds", "Duration in seconds of node startup in total."),
];

/// The startup of a node. The metrics are 0 until their phases have ended.
pub(super) struct Startup {
    gauges: [Gauge; METRICS.len()],
    /// Time from the boot of the machine to the start of the agent. None if it is unknown.
    since_boot: Option<Duration>,
    begun: Instant,
    progress: Mutex<Progress>,
}

/// Progress of the startup.
#[derive(Debug, Default)]
struct Progress {
    attempted: Option<Instant>,
    registered: Option<Instant>,
    is_ready: bool,
}

// === impl Startup ===

impl Startup {
    /// The startup of a node whose agent starts now.
    pub(super) fn begin() -> Self {
        Self::new(Instant::now(), uptime())
    }

    fn new(begun: Instant, since_boot: Option<Duration>) -> Self {
        let gauges = METRICS.map(|(name, help)| valid(Gauge::new(name, help)));
        Self { gauges, since_boot, begun, progress: Mutex::default() }
    }

    /// The metrics, for a registry.
    pub(super) fn collectors(&self) -> Vec<Box<dyn Collector>> {
        self.gauges.iter().map(|gauge| Box::new(gauge.clone()) as Box<dyn Collector>).collect()
    }

    /// Records the first attempt to register the node.
    pub(super) fn attempted(&self, now: Instant) {
        self.progress().attempted.get_or_insert(now);
    }

    /// Records that the agent has created the Node object.
    pub(super) fn registered(&self, now: Instant) {
        let mut progress = self.progress();
        let (Some(attempted), None) = (progress.attempted, progress.registered) else { return };
        progress.registered = Some(now);
        let [before_agent, before_attempt, registration, ..] = &self.gauges;
        if let Some(since_boot) = self.since_boot {
            before_agent.set(since_boot.as_secs_f64());
        }
        before_attempt.set(attempted.saturating_duration_since(self.begun).as_secs_f64());
        registration.set(now.saturating_duration_since(attempted).as_secs_f64());
    }

    /// Records that the node is Ready.
    pub(super) fn ready(&self, now: Instant) {
        let mut progress = self.progress();
        let Some(registered) = progress.registered.filter(|_| !progress.is_ready) else { return };
        progress.is_ready = true;
        let [.., after_registration, total] = &self.gauges;
        after_registration.set(now.saturating_duration_since(registered).as_secs_f64());
        if let Some(since_boot) = self.since_boot {
            total.set((since_boot + now.saturating_duration_since(self.begun)).as_secs_f64());
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Time since the boot of the machine.
fn uptime() -> Option<Duration> {
    parse_uptime(&std::fs::read_to_string("/proc/uptime").ok()?)
}

/// The first number of `/proc/uptime` (proc_uptime(5)).
fn parse_uptime(text: &str) -> Option<Duration> {
    Duration::try_from_secs_f64(text.split_whitespace().next()?.parse().ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(startup: &Startup) -> [f64; 5] {
        startup.gauges.each_ref().map(Gauge::get)
    }

    #[test]
    fn the_phases_of_the_startup_are_recorded_once() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let startup = Startup::new(begun, Some(Duration::from_secs(20)));
        startup.registered(at(1));
        startup.attempted(at(2));
        startup.attempted(at(3));
        startup.ready(at(4));
        assert_eq!(seconds(&startup), [0.0; 5], "the node is not registered");
        startup.registered(at(6));
        startup.registered(at(7));
        assert_eq!(seconds(&startup), [20.0, 2.0, 4.0, 0.0, 0.0]);
        startup.ready(at(14));
        startup.ready(at(50));
        assert_eq!(seconds(&startup), [20.0, 2.0, 4.0, 8.0, 34.0]);
        assert_eq!(startup.collectors().len(), 5);
    }

    #[test]
    fn the_uptime_is_the_first_number() {
        assert_eq!(parse_uptime("350735.47 234388.90\n"), Some(Duration::from_secs_f64(350_735.47)));
        assert_eq!([parse_uptime(""), parse_uptime("-1 2"), parse_uptime("x")], [None; 3]);
    }
}
