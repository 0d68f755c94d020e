//! Counts and durations of probes for `/metrics/probes`, with the kubelet's names.
//!
//! A container's counts exist from its first probe task until its pod ends; a restart of the container keeps them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_values::metric_label::escaped;
use k8s_openapi::api::core::v1::{Container, Pod};

use super::Kind;
use super::outcome::Outcome;

/// Upper bounds in seconds of the histogram of durations, as in the kubelet.
const BOUNDS: [f64; 11] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
/// Values of the label `result`.
const RESULTS: [&str; 3] = ["successful", "failed", "unknown"];
/// All kinds, in the order of their counts.
const KINDS: [Kind; 3] = [Kind::Startup, Kind::Readiness, Kind::Liveness];

/// The counts of this node's containers with probes. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProbeMetrics {
    registry: Arc<Mutex<Registry>>,
}

/// Containers in the order of their registration.
#[derive(Debug, Default)]
struct Registry {
    next: u64,
    containers: BTreeMap<u64, Arc<ContainerCounts>>,
}

/// A container whose probes are counted. The counts are removed when this value is dropped.
#[derive(Debug)]
pub(crate) struct CountedContainer {
    metrics: ProbeMetrics,
    number: u64,
    counts: Arc<ContainerCounts>,
}

/// The counts of one container, by kind of probe. None if the container has no such probe.
#[derive(Debug)]
pub(crate) struct ContainerCounts {
    namespace: String,
    pod: String,
    uid: String,
    container: String,
    probes: [Option<Box<Counts>>; KINDS.len()],
}

/// The counts of one probe.
#[derive(Debug, Default)]
struct Counts {
    results: [AtomicU64; RESULTS.len()],
    /// Number of durations in each bucket. A duration belongs to the bucket of the lowest bound that is at least as
    /// long. As in the kubelet, failures are not counted here.
    durations: [AtomicU64; BOUNDS.len() + 1],
    micros: AtomicU64,
}

// === impl ProbeMetrics ===

impl ProbeMetrics {
    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts the probes of a container from now on.
    pub(crate) fn register(&self, pod: &Pod, container: &Container) -> CountedContainer {
        let text = |text: &Option<String>| text.clone().unwrap_or_default();
        let exists = [&container.startup_probe, &container.readiness_probe, &container.liveness_probe];
        let counts = Arc::new(ContainerCounts {
            namespace: text(&pod.metadata.namespace),
            pod: text(&pod.metadata.name),
            uid: text(&pod.metadata.uid),
            container: container.name.clone(),
            probes: exists.map(|probe| probe.as_ref().map(|_| Box::default())),
        });
        let mut registry = self.registry();
        let number = registry.next;
        registry.next += 1;
        registry.containers.insert(number, Arc::clone(&counts));
        drop(registry);
        CountedContainer { metrics: self.clone(), number, counts }
    }

    /// All counts in Prometheus' text format.
    pub(crate) fn render(&self) -> String {
        let containers: Vec<_> = self.registry().containers.values().cloned().collect();
        let mut out = String::new();
        out.push_str(
            "# HELP prober_probe_duration_seconds Duration in seconds of probes that did not fail.\n\
             # TYPE prober_probe_duration_seconds histogram\n",
        );
        probes(&containers).for_each(|ProbeCounts { container, kind, counts }| {
            counts.render_durations(&mut out, &container.labels(kind));
        });
        out.push_str(
            "# HELP prober_probe_total Number of liveness, readiness and startup probes of a container by result.\n\
             # TYPE prober_probe_total counter\n",
        );
        probes(&containers).for_each(|ProbeCounts { container, kind, counts }| {
            let uid = escaped(&container.uid);
            counts.render_results(&mut out, &format!("{},pod_uid=\"{uid}\"", container.labels(kind)));
        });
        out
    }
}

/// The counts of one probe.
struct ProbeCounts<'a> {
    container: &'a ContainerCounts,
    kind: Kind,
    counts: &'a Counts,
}

/// The probes of the containers.
fn probes(containers: &[Arc<ContainerCounts>]) -> impl Iterator<Item = ProbeCounts<'_>> {
    containers.iter().flat_map(|container| {
        let counted = KINDS.into_iter().zip(&container.probes);
        counted.filter_map(|(kind, counts)| Some(ProbeCounts { container, kind, counts: counts.as_deref()? }))
    })
}

// === impl CountedContainer ===

impl CountedContainer {
    pub(crate) fn counts(&self) -> Arc<ContainerCounts> {
        Arc::clone(&self.counts)
    }
}

impl Drop for CountedContainer {
    fn drop(&mut self) {
        self.metrics.registry().containers.remove(&self.number);
    }
}

// === impl ContainerCounts ===

impl ContainerCounts {
    /// Counts one attempt that took this long.
    pub(super) fn add(&self, kind: Kind, outcome: &Outcome, took: Duration) {
        if let Some(counts) = self.probes.get(kind as usize).and_then(Option::as_deref) {
            counts.add(outcome, took);
        }
    }

    /// Labels of both metrics.
    fn labels(&self, kind: Kind) -> String {
        let [container, namespace, pod] =
            [&self.container, &self.namespace, &self.pod].map(|name| escaped(name));
        format!(
            "container=\"{container}\",namespace=\"{namespace}\",pod=\"{pod}\",probe_type=\"{}\"",
            kind.name()
        )
    }
}

// === impl Counts ===

impl Counts {
    fn add(&self, outcome: &Outcome, took: Duration) {
        let result = match outcome.passed() {
            Some(true) => 0,
            Some(false) => 1,
            None => 2,
        };
        self.results[result].fetch_add(1, Relaxed);
        if outcome.passed() == Some(false) {
            return;
        }
        let seconds = took.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| seconds <= *bound).unwrap_or(BOUNDS.len());
        self.durations[bucket].fetch_add(1, Relaxed);
        self.micros.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    /// The results that occurred.
    fn render_results(&self, out: &mut String, labels: &str) {
        for (result, count) in RESULTS.iter().zip(&self.results) {
            let count = count.load(Relaxed);
            if count > 0 {
                // Writing to a string cannot fail.
                let _ = writeln!(out, "prober_probe_total{{{labels},result=\"{result}\"}} {count}");
            }
        }
    }

    /// The histogram, if it has a duration.
    fn render_durations(&self, out: &mut String, labels: &str) {
        let counts = self.durations.each_ref().map(|count| count.load(Relaxed));
        if counts.iter().all(|count| *count == 0) {
            return;
        }
        let name = "prober_probe_duration_seconds";
        let mut total = 0;
        for (bucket, count) in counts.iter().enumerate() {
            total += count;
            let bound = BOUNDS.get(bucket).map_or_else(|| "+Inf".to_owned(), f64::to_string);
            let _ = writeln!(out, "{name}_bucket{{{labels},le=\"{bound}\"}} {total}");
        }
        let sum = Duration::from_micros(self.micros.load(Relaxed)).as_secs_f64();
        let _ = writeln!(out, "{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {total}");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn registered(metrics: &ProbeMetrics, name: &str) -> CountedContainer {
        let pod = json!({"metadata": {"namespace": "n", "name": "p", "uid": "u"}});
        let container = json!({"name": name, "readinessProbe": {}, "livenessProbe": {}});
        metrics.register(&serde_json::from_value(pod).unwrap(), &serde_json::from_value(container).unwrap())
    }

    fn samples(metrics: &ProbeMetrics, prefix: &str) -> Vec<String> {
        let text = metrics.render();
        text.lines().filter(|line| line.starts_with(prefix)).map(str::to_owned).collect()
    }

    #[test]
    fn results_are_counted_by_probe_and_durations_without_failures() {
        let metrics = ProbeMetrics::default();
        let container = registered(&metrics, "c");
        let counts = container.counts();
        counts.add(Kind::Readiness, &Outcome::Success, Duration::from_millis(250));
        counts.add(Kind::Readiness, &Outcome::Warning("x".to_owned()), Duration::from_secs(60));
        counts.add(Kind::Readiness, &Outcome::Failure("x".to_owned()), Duration::from_secs(1));
        counts.add(Kind::Liveness, &Outcome::Unknown("x".to_owned()), Duration::from_millis(1));
        counts.add(Kind::Startup, &Outcome::Success, Duration::ZERO);
        let of = |kind: &str| format!("container=\"c\",namespace=\"n\",pod=\"p\",probe_type=\"{kind}\"");
        let [readiness, liveness] = ["Readiness", "Liveness"].map(of);
        assert_eq!(
            samples(&metrics, "prober_probe_total"),
            [
                format!("prober_probe_total{{{readiness},pod_uid=\"u\",result=\"successful\"}} 2"),
                format!("prober_probe_total{{{readiness},pod_uid=\"u\",result=\"failed\"}} 1"),
                format!("prober_probe_total{{{liveness},pod_uid=\"u\",result=\"unknown\"}} 1"),
            ]
        );
        let name = "prober_probe_duration_seconds";
        let durations = samples(&metrics, &format!("{name}_bucket{{{readiness}"));
        let counts: Vec<&str> = durations.iter().filter_map(|line| line.split(' ').nth(1)).collect();
        assert_eq!(counts, ["0", "0", "0", "0", "0", "1", "1", "1", "1", "1", "1", "2"]);
        assert!(durations[5].contains("le=\"0.25\"") && durations[11].contains("le=\"+Inf\""));
        assert_eq!(
            samples(&metrics, &format!("{name}_sum{{{readiness}")),
            [format!("{name}_sum{{{readiness}}} 60.25")]
        );
        assert_eq!(samples(&metrics, &format!("{name}_count")).len(), 2, "one histogram for each probe");
    }

    #[test]
    fn counts_end_with_their_pod() {
        let metrics = ProbeMetrics::default();
        let [first, second] = ["a", "b"].map(|name| registered(&metrics, name));
        for container in [&first, &second] {
            container.counts().add(Kind::Liveness, &Outcome::Success, Duration::ZERO);
        }
        drop(first);
        let left = samples(&metrics, "prober_probe_total");
        assert_eq!(left.len(), 1);
        assert!(left[0].contains("container=\"b\""), "{left:?}");
    }

    #[test]
    fn a_name_cannot_forge_a_sample() {
        let metrics = ProbeMetrics::default();
        let container = registered(&metrics, "c\"} 9\nforged 1 \\");
        container.counts().add(Kind::Liveness, &Outcome::Success, Duration::ZERO);
        assert!(metrics.render().lines().all(|line| !line.starts_with("forged")));
        assert!(metrics.render().contains(r#"container="c\"} 9\nforged 1 \\","#));
    }
}
