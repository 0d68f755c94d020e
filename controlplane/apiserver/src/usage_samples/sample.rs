//! Usage of one node at one time from its kubelet's `/stats/summary`, and the rates between two samples.
//!
//! A node is not trusted: the caller reads only the pods that are bound to it.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use coracle_values::CollectMap;
use jiff::Timestamp;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::usage_history::ContainerUsage;

/// Usage of a node and its containers.
#[derive(Debug)]
pub(crate) struct Sample {
    /// Time of the API server's request.
    pub(crate) taken: tokio::time::Instant,
    node: Usage,
    /// Containers by pod uid and container name. Maps keep look-ups fast if a hostile node reports a large number.
    pods: HashMap<String, BTreeMap<String, Usage>>,
}

/// Cumulative CPU time and current memory.
#[derive(Clone, Copy, Debug)]
struct Usage {
    time: Timestamp,
    cpu_nanos: u64,
    memory: u64,
}

/// The CPU usage between two samples, and the memory of the later sample.
#[derive(Debug, PartialEq)]
pub(crate) struct Rate {
    pub(crate) time: Timestamp,
    window: Duration,
    cpu_nanos: u64,
    memory: u64,
}

/// The fields of a summary that the API server reads.
#[derive(Deserialize)]
struct Summary {
    node: Stats,
    #[serde(default)]
    pods: Vec<PodStats>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct PodStats {
    pod_ref: PodReference,
    #[serde(default)]
    containers: Vec<Stats>,
}

#[derive(Deserialize)]
struct PodReference {
    uid: String,
}

#[derive(Deserialize)]
struct Stats {
    #[serde(default)]
    name: String,
    cpu: Option<Cpu>,
    memory: Option<Memory>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Cpu {
    time: Timestamp,
    usage_core_nano_seconds: Option<u64>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Memory {
    working_set_bytes: Option<u64>,
}

// === impl Sample ===

impl Sample {
    /// Parses a summary. Containers without CPU or memory usage are left out.
    pub(crate) fn parse(taken: tokio::time::Instant, body: &[u8]) -> Result<Self, String> {
        let summary: Summary = serde_json::from_slice(body).map_err(|error| error.to_string())?;
        let node = Usage::of(&summary.node).ok_or("the node has no CPU or memory usage")?;
        let pods = summary.pods.into_iter().map(|pod| {
            let containers = pod.containers.into_iter();
            let used = containers.filter_map(|one| Some((one.name.clone(), Usage::of(&one)?)));
            (pod.pod_ref.uid, used.collect_map())
        });
        Ok(Self { taken, node, pods: pods.collect() })
    }

    /// Usage of the node since an earlier sample.
    pub(crate) fn node_since(&self, earlier: &Self) -> Option<Rate> {
        self.node.since(earlier.node)
    }

    /// Usage of a pod's containers since an earlier sample, by name.
    pub(crate) fn pod_since(&self, earlier: &Self, uid: &str) -> Vec<(&str, Rate)> {
        let (Some(before), Some(containers)) = (earlier.pods.get(uid), self.pods.get(uid)) else {
            return Vec::new();
        };
        let rates = containers
            .iter()
            .filter_map(|(name, usage)| Some((name.as_str(), usage.since(*before.get(name)?)?)));
        rates.collect()
    }
}

// === impl Usage ===

impl Usage {
    fn of(stats: &Stats) -> Option<Self> {
        let cpu = stats.cpu.as_ref()?;
        let memory = stats.memory.as_ref()?.working_set_bytes?;
        Some(Self { time: cpu.time, cpu_nanos: cpu.usage_core_nano_seconds?, memory })
    }

    /// The rate since an earlier sample. None if no time passed, or if the counter restarted with the container.
    fn since(self, earlier: Self) -> Option<Rate> {
        let window = Duration::try_from(self.time.duration_since(earlier.time)).ok()?;
        let used = u128::from(self.cpu_nanos.checked_sub(earlier.cpu_nanos)?);
        let cpu_nanos = (used * 1_000_000_000).checked_div(window.as_nanos())?;
        let cpu_nanos = u64::try_from(cpu_nanos).ok()?;
        Some(Rate { time: self.time, window, cpu_nanos, memory: self.memory })
    }
}

// === impl Rate ===

impl Rate {
    /// The usage as quantities, in the units of metrics-server.
    pub(crate) fn usage(&self) -> Value {
        json!({"cpu": format!("{}n", self.cpu_nanos), "memory": format!("{}Ki", self.memory / 1024)})
    }

    /// The usage in the units of the history, rounded up.
    pub(crate) fn container_usage(&self) -> ContainerUsage {
        ContainerUsage { cpu_millis: self.cpu_nanos.div_ceil(1_000_000), memory_bytes: self.memory }
    }

    /// The window in the format of Go durations.
    pub(crate) fn window(&self) -> String {
        format!("{}s", (self.window.as_secs_f64() * 1000.0).round() / 1000.0)
    }
}

/// Two summaries of one node, with a line end between them, and the rates between them.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let end = data.iter().position(|byte| *byte == b'\n').unwrap_or(data.len());
    let (earlier, later) = (data.get(..end), data.get(end + 1..));
    let parse =
        |part: Option<&[u8]>| Sample::parse(tokio::time::Instant::now(), part.unwrap_or_default()).ok();
    let (Some(earlier), Some(later)) = (parse(earlier), parse(later)) else { return };
    let pods = later.pods.keys().flat_map(|uid| later.pod_since(&earlier, uid));
    for rate in later.node_since(&earlier).into_iter().chain(pods.map(|(_, rate)| rate)) {
        let _shown = (rate.usage(), rate.window(), rate.container_usage());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(time: &str, cpu: u64) -> Sample {
        let used = json!({"name": "c", "cpu": {"time": time, "usageCoreNanoSeconds": cpu},
            "memory": {"workingSetBytes": 4096}});
        let idle = json!({"name": "new", "cpu": {"time": time}});
        let pod = json!({"podRef": {"name": "p", "namespace": "n", "uid": "1"}, "containers": [used, idle]});
        let summary = json!({"node": used, "pods": [pod]});
        Sample::parse(tokio::time::Instant::now(), summary.to_string().as_bytes()).unwrap()
    }

    #[test]
    fn the_rate_is_the_difference_over_the_window() {
        let (old, new) = (sample("2024-01-01T00:00:00Z", 100), sample("2024-01-01T00:00:10Z", 2_000_000_100));
        let rate = new.node_since(&old).unwrap();
        assert_eq!(rate.usage(), json!({"cpu": "200000000n", "memory": "4Ki"}));
        assert_eq!(rate.window(), "10s");
        let pod = new.pod_since(&old, "1");
        assert_eq!(pod.iter().map(|(name, _)| *name).collect::<Vec<_>>(), ["c"]);
        assert!(new.pod_since(&old, "2").is_empty());
    }

    #[test]
    fn many_containers_of_a_hostile_node_take_linear_time() {
        let summary = |time: &str, cpu: u64| {
            let used = |name: String| {
                json!({"name": name, "cpu": {"time": time, "usageCoreNanoSeconds": cpu},
                    "memory": {"workingSetBytes": 1}})
            };
            let containers: Vec<Value> = (0..50_000).map(|number| used(format!("c{number}"))).collect();
            let pod = json!({"podRef": {"uid": "1"}, "containers": containers});
            let text = json!({"node": used(String::new()), "pods": [pod]}).to_string();
            Sample::parse(tokio::time::Instant::now(), text.as_bytes()).unwrap()
        };
        let (old, new) = (summary("2024-01-01T00:00:00Z", 1), summary("2024-01-01T00:00:10Z", 2));
        assert_eq!(new.pod_since(&old, "1").len(), 50_000);
    }

    #[test]
    fn a_counter_that_restarted_and_samples_of_the_same_time_have_no_rate() {
        let (old, new) = (sample("2024-01-01T00:00:00Z", 100), sample("2024-01-01T00:00:10Z", 50));
        assert_eq!(new.node_since(&old), None);
        assert_eq!(old.node_since(&old), None);
        assert!(Sample::parse(tokio::time::Instant::now(), b"{\"node\": {}}").is_err());
    }
}
