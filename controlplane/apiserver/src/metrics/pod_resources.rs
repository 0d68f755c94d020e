//! `/metrics/resources`: requests and limits of each pod. Source: `pkg/scheduler/metrics/resources`.
//!
//! Upstream's scheduler serves this path separately from `/metrics`, because the number of samples grows with the pods.

use std::fmt::Write as _;

use coracle_kinds::kind::by_kind;
use coracle_values::metric_label::escaped;
use coracle_values::pod_resources::{self, Resources};
use serde_json::Value;

use crate::{
    cache::{Cache, Object},
    offload::{self, MIN_OFFLOADED_BYTES},
};

/// Path of the requests and limits.
pub(super) const PATH: &str = "/metrics/resources";

/// The requests and limits of all pods that have not ended, in the text format of Prometheus.
pub(super) fn text(cache: &Cache) -> Vec<u8> {
    let pods = by_kind("v1", "Pod").map(|kind| cache.list(kind, "")).unwrap_or_default();
    let size: usize = pods.iter().map(|pod| pod.stored_bytes()).sum();
    offload::run(size > MIN_OFFLOADED_BYTES, || {
        let (mut requests, mut limits) = (String::new(), String::new());
        head(
            &mut requests,
            "kube_pod_resource_request",
            "Requests of a pod by resource, in the unit of the resource.",
        );
        head(
            &mut limits,
            "kube_pod_resource_limit",
            "Limits of a pod by resource, in the unit of the resource.",
        );
        for pod in &pods {
            add(&mut requests, &mut limits, &fields(pod));
        }
        requests.push_str(&limits);
        requests.into_bytes()
    })
}

fn fields(pod: &Object) -> Value {
    pod.part(&[&["metadata", "namespace"], &["metadata", "name"], &["spec"], &["status", "phase"]])
}

/// Adds the samples of a pod, unless it has ended on a node.
fn add(requests: &mut String, limits: &mut String, pod: &Value) {
    let (metadata, spec) = (&pod["metadata"], &pod["spec"]);
    let node = spec["nodeName"].as_str().unwrap_or_default();
    let has_ended = matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
    if has_ended && !node.is_empty() {
        return;
    }
    let Some(resources) = pod_resources::of_json(spec) else { return };
    let priority = spec["priority"].as_i64().map(|priority| priority.to_string()).unwrap_or_default();
    let values = [
        ("namespace", metadata["namespace"].as_str().unwrap_or_default()),
        ("pod", metadata["name"].as_str().unwrap_or_default()),
        ("node", node),
        ("scheduler", spec["schedulerName"].as_str().unwrap_or_default()),
        ("priority", priority.as_str()),
    ];
    let labels = values.map(|(label, value)| format!("{label}=\"{}\"", escaped(value))).join(",");
    write(requests, "kube_pod_resource_request", &labels, &resources.requests);
    write(limits, "kube_pod_resource_limit", &labels, &resources.limits);
}

/// Writes a sample for each resource. As upstream, an amount of 0 has no sample.
fn write(text: &mut String, name: &str, labels: &str, resources: &Resources) {
    let Resources { cpu_millis, memory, ephemeral_storage, others, .. } = resources;
    let bytes = [("memory", *memory), ("ephemeral-storage", *ephemeral_storage)];
    let others = others.iter().map(|(name, amount)| (name.as_str(), *amount));
    let units = bytes.into_iter().chain(others).map(|(resource, amount)| (resource, number(amount)));
    for (resource, amount) in [("cpu", number(*cpu_millis) / 1000.0)].into_iter().chain(units) {
        if amount > 0.0 {
            let (resource, unit) = (escaped(resource), unit(resource));
            // Writing to memory cannot fail.
            let _ = writeln!(text, "{name}{{{labels},resource=\"{resource}\",unit=\"{unit}\"}} {amount}");
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "samples are floating-point numbers")]
fn number(amount: i128) -> f64 {
    amount as f64
}

/// The unit of a resource. Resources of devices have no unit.
fn unit(resource: &str) -> &'static str {
    match resource {
        "cpu" => "cores",
        "memory" | "storage" | "ephemeral-storage" => "bytes",
        huge if huge.starts_with("hugepages-") => "bytes",
        volumes if volumes.starts_with("attachable-volumes-") => "integer",
        _ => "",
    }
}

fn head(text: &mut String, name: &str, help: &str) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge");
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn samples(pod: &Value) -> Vec<String> {
        let (mut requests, mut limits) = (String::new(), String::new());
        add(&mut requests, &mut limits, pod);
        requests.lines().chain(limits.lines()).map(str::to_owned).collect()
    }

    #[test]
    fn a_pod_has_the_labels_and_units_of_upstream() {
        let resources = json!({
            "requests": {"cpu": "250m", "memory": "64Mi", "example.com/gpu": "2", "hugepages-2Mi": "4Mi"},
            "limits": {"memory": "128Mi"},
        });
        let mut pod = json!({
            "metadata": {"namespace": "ns", "name": "p"},
            "spec": {"nodeName": "n", "schedulerName": "a\"b", "priority": 7,
                "containers": [{"name": "c", "resources": resources}]},
            "status": {"phase": "Running"},
        });
        let labels = "namespace=\"ns\",pod=\"p\",node=\"n\",scheduler=\"a\\\"b\",priority=\"7\"";
        let sample = |side: &str, rest: &str| format!("kube_pod_resource_{side}{{{labels},resource={rest}");
        assert_eq!(
            samples(&pod),
            [
                sample("request", "\"cpu\",unit=\"cores\"} 0.25"),
                sample("request", "\"memory\",unit=\"bytes\"} 67108864"),
                sample("request", "\"example.com/gpu\",unit=\"\"} 2"),
                sample("request", "\"hugepages-2Mi\",unit=\"bytes\"} 4194304"),
                sample("limit", "\"memory\",unit=\"bytes\"} 134217728"),
            ]
        );
        pod["status"]["phase"] = json!("Succeeded");
        assert!(samples(&pod).is_empty(), "a pod that has ended uses nothing");
    }
}
