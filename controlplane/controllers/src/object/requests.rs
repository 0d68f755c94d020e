//! The requests of a pod and its containers. Autoscalers compare the usage with them. Pods of the same template share
//! them in memory.

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use coracle_values::quantity::millis_of;
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use super::PodSpec;
use super::shared::SharedValues;

static REQUESTS: LazyLock<SharedValues<PodRequests>> = LazyLock::new(SharedValues::new);

/// Amounts in thousandths, by the name of the resource.
type Amounts = BTreeMap<String, i64>;

/// The requests of a pod.
#[derive(Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct PodRequests {
    /// The requests of the pod as a whole. Empty if it has none.
    pod: Amounts,
    /// The name and the requests of each container and each sidecar.
    containers: Vec<(String, Amounts)>,
}

/// The requests in the field `resources`.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Resources {
    requests: Option<BTreeMap<String, Value>>,
}

impl Resources {
    fn amounts(self) -> Amounts {
        let amount = |value: Value| match value {
            Value::String(text) => millis_of(&Quantity(text)),
            number => millis_of(&Quantity(number.to_string())),
        };
        self.requests.into_iter().flatten().map(|(name, value)| (name, amount(value))).collect()
    }
}

/// Reads a number. Returns whether it is present.
pub(super) fn is_present<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(Option::<i64>::deserialize(deserializer)?.is_some())
}

/// Moves the requests out of a decoded pod and its containers.
pub(super) fn take(spec: &mut PodSpec) -> Arc<PodRequests> {
    let pod = spec.resources.take().unwrap_or_default().amounts();
    let containers = spec.containers.iter_mut().chain(&mut spec.sidecars).map(|container| {
        let name = container.name.take().unwrap_or_default();
        (name, container.resources.take().unwrap_or_default().amounts())
    });
    let requests = PodRequests { pod, containers: containers.collect() };
    REQUESTS.share(requests, |requests| REQUESTS.hash(requests))
}

// === impl PodRequests ===

impl PodRequests {
    /// The request of a resource in thousandths: of one container, or of the pod with its sidecars. `pod` is the name
    /// of the pod for the error message.
    pub(crate) fn get(&self, pod: &str, resource: &str, container: Option<&str>) -> Result<i64, String> {
        if let (None, Some(request)) = (container, self.pod.get(resource)) {
            return Ok(*request);
        }
        let mut sum = 0_i64;
        for (name, requests) in &self.containers {
            if container.is_some_and(|wanted| wanted != name) {
                continue;
            }
            let request = requests
                .get(resource)
                .ok_or_else(|| format!("missing request for {resource} in container {name} of Pod {pod}"))?;
            if container.is_some() {
                return Ok(*request);
            }
            sum = sum.saturating_add(*request);
        }
        match container {
            Some(container) => Err(format!("container {container} not found in Pod {pod}")),
            None => Ok(sum),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Object, Pod};
    use super::*;

    fn pod(name: &str, spec: Value) -> Pod {
        let mut pod: Pod = serde_json::from_value(json!({"metadata": {"name": name}, "spec": spec})).unwrap();
        pod.slim();
        pod
    }

    fn container(name: &str, requests: Value) -> Value {
        json!({"name": name, "resources": {"requests": requests}, "ports": [{"containerPort": 80}]})
    }

    #[test]
    fn requests_are_those_of_the_containers_and_sidecars_or_of_the_pod() {
        let mut sidecar = container("s", json!({"cpu": "250m"}));
        sidecar["restartPolicy"] = "Always".into();
        let containers =
            json!([container("a", json!({"cpu": 1, "memory": "1Ki"})), container("b", json!({"cpu": "2"}))]);
        let spec = json!({"containers": containers,
            "initContainers": [sidecar, container("i", json!({"cpu": "8"}))]});
        let mut whole = spec.clone();
        whole["resources"] = json!({"requests": {"cpu": "5"}});
        let get = |spec: &Value, resource: &str, container: Option<&str>| {
            let pod = pod("p", spec.clone());
            pod.spec.requests.unwrap().get("p", resource, container)
        };
        assert_eq!(get(&spec, "cpu", None), Ok(3250));
        assert_eq!(get(&spec, "cpu", Some("s")), Ok(250));
        assert_eq!(get(&spec, "memory", Some("a")), Ok(1_024_000));
        assert_eq!(
            get(&spec, "memory", None).unwrap_err(),
            "missing request for memory in container b of Pod p"
        );
        assert_eq!(get(&spec, "cpu", Some("i")).unwrap_err(), "container i not found in Pod p");
        assert_eq!((get(&whole, "cpu", None), get(&whole, "cpu", Some("b"))), (Ok(5000), Ok(2000)));
        assert_eq!(get(&json!({}), "cpu", None), Ok(0));
    }

    #[test]
    fn equal_pods_share_their_requests_and_keep_only_named_ports() {
        let spec = json!({"containers": [container("a", json!({"cpu": "1"}))]});
        let (mut one, other) = (pod("one", spec.clone()), pod("other", spec));
        // The cache reduces the objects of a list twice.
        one.slim();
        let (one, other) = (one.spec, other.spec);
        assert!(Arc::ptr_eq(&one.requests.unwrap(), &other.requests.unwrap()));
        assert!(one.containers.is_empty());
    }
}
