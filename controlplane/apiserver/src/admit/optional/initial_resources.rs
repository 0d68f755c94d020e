//! Sets missing requests of containers to estimates from the usage of the same image.
//!
//! Source: `plugin/pkg/admission/initialresources`, v1.9. The usage comes from the nodes of this cluster.

use std::collections::HashMap;

use async_trait::async_trait;
use serde_json::{Value, json};

use crate::{
    admit::{Admission, Admit, Attributes, Operation},
    error::Result,
    object_meta::metadata_mut,
    usage_history::{Estimated, UsageHistory},
};

/// Annotation with the estimated requests.
const ANNOTATION: &str = "kubernetes.io/initial-resources";
/// Prefix of the annotation's value.
const SET: &str = "Initial Resources plugin set: ";

/// Maximum containers of a pod. Pods with more get no estimates.
const MAX_CONTAINERS: usize = 500;
/// Maximum images of a pod that get estimates, in the order of its containers. Each estimate reads all samples.
const MAX_IMAGES: usize = 64;

/// The estimates of CPU and memory of each image of a pod.
type Estimates = HashMap<String, [Option<u64>; 2]>;

pub(in crate::admit) struct InitialResources;

#[async_trait]
impl Admit for InitialResources {
    async fn mutate(
        &self,
        admission: &Admission,
        attributes: &Attributes<'_>,
        object: &mut Value,
    ) -> Result<()> {
        if let Some(history) = &admission.usage_history
            && attributes.is(Operation::Create, "Pod")
        {
            let now = u64::try_from(jiff::Timestamp::now().as_second()).unwrap_or(0);
            estimate(history, attributes.namespace, object, now);
        }
        Ok(())
    }
}

/// Sets the missing requests of a pod's containers and the annotation.
fn estimate(history: &UsageHistory, namespace: &str, pod: &mut Value, now: u64) {
    let mut descriptions = Vec::new();
    let containers = pod.pointer_mut("/spec/containers").and_then(Value::as_array_mut);
    let Some(containers) = containers.filter(|containers| containers.len() <= MAX_CONTAINERS) else { return };
    let estimates = estimates(history, namespace, containers, now);
    for container in containers {
        let name = container["name"].as_str().unwrap_or_default().to_owned();
        let set = set_requests(&estimates, container);
        if !set.is_empty() {
            descriptions.push(format!("{} request for container {name}", set.join(", ")));
        }
    }
    let Some(metadata) = metadata_mut(pod).filter(|_| !descriptions.is_empty()) else { return };
    let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
    if !annotations.is_object() {
        return;
    }
    // A second run, after a webhook has added a container, appends to the text of the first run.
    let before = annotations[ANNOTATION].as_str().filter(|text| text.starts_with(SET));
    let text = before.map_or_else(|| SET.to_owned(), |text| format!("{text}; ")) + &descriptions.join("; ");
    annotations[ANNOTATION] = text.into();
}

/// Estimates the usage of each image once.
fn estimates(history: &UsageHistory, namespace: &str, containers: &[Value], now: u64) -> Estimates {
    let mut estimates = Estimates::new();
    for image in containers.iter().filter_map(|container| container["image"].as_str()) {
        if estimates.len() < MAX_IMAGES && !estimates.contains_key(image) {
            let of = |resource| history.estimate(resource, namespace, image, now);
            estimates.insert(image.to_owned(), [of(Estimated::Cpu), of(Estimated::Memory)]);
        }
    }
    estimates
}

/// Sets the missing requests of a container. Returns the names of their resources.
fn set_requests(estimates: &Estimates, container: &mut Value) -> Vec<&'static str> {
    let image = container["image"].as_str().unwrap_or_default();
    let [cpu, memory] = estimates.get(image).copied().unwrap_or_default();
    let mut set = Vec::new();
    for (resource, name, estimate) in [(Estimated::Cpu, "cpu", cpu), (Estimated::Memory, "memory", memory)] {
        let resources = &container["resources"];
        if ["requests", "limits"].iter().any(|list| !resources[list][name].is_null()) {
            continue;
        }
        let Some(value) = estimate else { continue };
        let quantity = match resource {
            Estimated::Cpu if value % 1000 == 0 => (value / 1000).to_string(),
            Estimated::Cpu => format!("{value}m"),
            Estimated::Memory => value.to_string(),
        };
        let Some(container) = container.as_object_mut() else { continue };
        let resources = container.entry("resources").or_insert_with(|| json!({}));
        let Some(resources) = resources.as_object_mut() else { continue };
        let requests = resources.entry("requests").or_insert_with(|| json!({}));
        let Some(requests) = requests.as_object_mut() else { continue };
        requests.insert(name.to_owned(), quantity.into());
        set.push(name);
    }
    set
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::usage_history::{ContainerUsage, InitialResourcesOptions};

    #[test]
    fn a_pod_with_very_many_containers_or_images_costs_no_more_than_another() {
        let history = UsageHistory::new(InitialResourcesOptions::default());
        history.record("ns", "web", ContainerUsage { cpu_millis: 7, memory_bytes: 3 << 20 }, 1000);
        let container = |image: &str| json!({"name": "c", "image": image});
        let mut pod =
            json!({"metadata": {}, "spec": {"containers": vec![container("web"); MAX_CONTAINERS + 1]}});
        estimate(&history, "ns", &mut pod, 1000);
        assert!(pod["spec"]["containers"][0]["resources"].is_null());
        pod["spec"]["containers"].as_array_mut().unwrap().pop();
        estimate(&history, "ns", &mut pod, 1000);
        assert_eq!(pod["spec"]["containers"][MAX_CONTAINERS - 1]["resources"]["requests"]["cpu"], "7m");
        let containers: Vec<Value> =
            (0..MAX_CONTAINERS).map(|tag| container(&format!("web:{tag}"))).collect();
        assert_eq!(estimates(&history, "ns", &containers, 1000).len(), MAX_IMAGES);
    }

    #[test]
    fn only_missing_requests_are_estimated() {
        let history = UsageHistory::new(InitialResourcesOptions::default());
        let usage = ContainerUsage { cpu_millis: 7, memory_bytes: 3 << 20 };
        history.record("ns", "web", usage, 1000);
        let container = |name: &str, image: &str, resources: Value| json!({"name": name, "image": image, "resources": resources});
        let mut pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [
            container("a", "web", json!({})),
            container("b", "web", json!({"requests": {"cpu": "1"}})),
            container("c", "web", json!({"limits": {"cpu": "1", "memory": "1Gi"}})),
            container("d", "other", json!({})),
            {"name": "e", "image": "web"},
        ]}});
        estimate(&history, "ns", &mut pod, 1000);
        let requests = |index: usize| &pod["spec"]["containers"][index]["resources"]["requests"];
        let memory = requests(0)["memory"].as_str().unwrap().parse::<u64>().unwrap();
        assert!((3 << 20..=(3 << 20) * 9 / 8).contains(&memory), "{memory}");
        assert_eq!(requests(0)["cpu"], "7m");
        assert_eq!(*requests(1), json!({"cpu": "1", "memory": memory.to_string()}));
        assert!(requests(2).is_null() && requests(3).is_null());
        assert_eq!(requests(4)["cpu"], "7m");
        let text = "Initial Resources plugin set: cpu, memory request for container a; memory request for container b; \
                    cpu, memory request for container e";
        assert_eq!(pod["metadata"]["annotations"][ANNOTATION], text);
        let before = pod.clone();
        estimate(&history, "ns", &mut pod, 1000);
        assert_eq!(pod, before, "a second run changes nothing");
    }
}
