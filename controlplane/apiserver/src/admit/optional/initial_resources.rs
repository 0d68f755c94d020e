//! Requests of containers that have none: estimates from the usage of the same image.
//!
//! Source: `plugin/pkg/admission/initialresources`, v1.9. The usage comes from the nodes of this cluster.

use async_trait::async_trait;
use serde_json::{Value, json};

use crate::{
    admit::{Admission, Admit, Attributes, Operation},
    error::Result,
    object_meta::metadata_mut,
    usage_history::{Estimated, UsageHistory},
};

/// The annotation that names the estimated requests.
const ANNOTATION: &str = "kubernetes.io/initial-resources";
/// Start of the annotation's value.
const SET: &str = "Initial Resources plugin set: ";

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

/// Sets the missing requests of a pod's containers, and the annotation.
fn estimate(history: &UsageHistory, namespace: &str, pod: &mut Value, now: u64) {
    let mut notes = Vec::new();
    let containers = pod.pointer_mut("/spec/containers").and_then(Value::as_array_mut);
    for container in containers.into_iter().flatten() {
        let name = container["name"].as_str().unwrap_or_default().to_owned();
        let set = estimate_container(history, namespace, container, now);
        if !set.is_empty() {
            notes.push(format!("{} request for container {name}", set.join(", ")));
        }
    }
    let Some(metadata) = metadata_mut(pod).filter(|_| !notes.is_empty()) else { return };
    let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
    if !annotations.is_object() {
        return;
    }
    // A second run, after a webhook has added a container, continues the text of the first one.
    let before = annotations[ANNOTATION].as_str().filter(|text| text.starts_with(SET));
    let text = before.map_or_else(|| SET.to_owned(), |text| format!("{text}; ")) + &notes.join("; ");
    annotations[ANNOTATION] = text.into();
}

/// Sets the missing requests of a container. Returns the names of the resources.
fn estimate_container(
    history: &UsageHistory,
    namespace: &str,
    container: &mut Value,
    now: u64,
) -> Vec<&'static str> {
    let image = container["image"].as_str().unwrap_or_default().to_owned();
    let mut set = Vec::new();
    for (resource, name) in [(Estimated::Cpu, "cpu"), (Estimated::Memory, "memory")] {
        let resources = &container["resources"];
        if ["requests", "limits"].iter().any(|list| !resources[list][name].is_null()) {
            continue;
        }
        let Some(value) = history.estimate(resource, (namespace, &image), now) else { continue };
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
    fn only_missing_requests_are_estimated() {
        let history = UsageHistory::new(InitialResourcesOptions::default());
        let usage = ContainerUsage { cpu_millis: 7, memory_bytes: 3 << 20 };
        history.record(("ns", "web"), usage, 1000);
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
