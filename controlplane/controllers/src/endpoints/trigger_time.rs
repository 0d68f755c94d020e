//! The time of the change that endpoints follow, as an annotation. Programs measure with it how long a change takes to
//! reach the nodes. Source: `TriggerTimeTracker` of `k8s.io/endpointslice`. Upstream remembers the times of all pods; here
//! the endpoints that exist say which pods have changed. No I/O.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{EndpointSubset, ObjectReference};

use super::plan::selects;
use crate::object::{EndpointSlice, ObjectExt, Pod, Service};

/// Annotation of Endpoints and EndpointSlices: the time of the change, as the API writes times.
pub(crate) const ANNOTATION: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// The readiness of the pods that have endpoints, by their uids. `None`: the service has no endpoints object yet.
pub(crate) type Known<'a> = Option<HashMap<&'a str, bool>>;

/// The pods of slices.
pub(crate) fn of_slices(slices: &[Arc<EndpointSlice>]) -> Known<'_> {
    if slices.is_empty() {
        return None;
    }
    let endpoints = slices.iter().flat_map(|slice| slice.endpoints.iter().flatten());
    let known = endpoints.filter_map(|endpoint| {
        let is_ready = endpoint.conditions.as_ref().is_some_and(|all| all.serving == Some(true));
        Some((uid(endpoint.target_ref.as_ref())?, is_ready))
    });
    Some(known.collect())
}

/// The pods of Endpoints.
pub(crate) fn of_subsets(subsets: &[EndpointSubset]) -> HashMap<&str, bool> {
    let known = subsets.iter().flat_map(|subset| {
        let lists = [(&subset.addresses, true), (&subset.not_ready_addresses, false)];
        lists.into_iter().flat_map(|(list, is_ready)| {
            list.iter().flatten().filter_map(move |one| Some((uid(one.target_ref.as_ref())?, is_ready)))
        })
    });
    known.collect()
}

fn uid(target: Option<&ObjectReference>) -> Option<&str> {
    target?.uid.as_deref()
}

/// The earliest change that the endpoints do not have yet: of the readiness of a pod, or the creation of the service. `None`
/// if there is none, for example if only a pod was deleted.
pub(crate) fn time(service: &Service, pods: &[Arc<Pod>], known: &Known<'_>) -> Option<String> {
    let has_changed = |pod: &Arc<Pod>| {
        let before = known.as_ref().and_then(|known| known.get(pod.uid()));
        before != Some(&pod.ready_since().is_some())
    };
    let pods = pods.iter().filter(|pod| selects(service, pod) && !pod.finished() && has_changed(pod));
    let created = service.metadata.creation_timestamp.as_ref().filter(|_| known.is_none());
    let first = pods.filter_map(|pod| pod.readiness_changed_at()).chain(created.map(|time| time.0)).min()?;
    Some(first.strftime("%Y-%m-%dT%H:%M:%SZ").to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service() -> Service {
        let metadata = json!({"name": "s", "namespace": "d", "creationTimestamp": "2026-01-01T00:00:00Z"});
        serde_json::from_value(json!({"metadata": metadata, "spec": {"selector": {"app": "a"}}})).unwrap()
    }

    fn pod(uid: &str, is_ready: bool, second: u8) -> Arc<Pod> {
        let since = format!("2026-01-02T00:00:{second:02}Z");
        let status = if is_ready { "True" } else { "False" };
        let ready = json!({"type": "Ready", "status": status, "lastTransitionTime": since});
        let pod = json!({"metadata": {"name": uid, "uid": uid, "namespace": "d", "labels": {"app": "a"}},
            "status": {"conditions": [ready]}});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn slices(endpoints: Value) -> [Arc<EndpointSlice>; 1] {
        let slice = json!({"metadata": {"name": "s-1"}, "addressType": "IPv4", "endpoints": endpoints});
        [Arc::new(serde_json::from_value(slice).unwrap())]
    }

    fn endpoint(uid: &str, serving: bool) -> Value {
        json!({"addresses": ["10.0.0.1"], "conditions": {"serving": serving}, "targetRef": {"uid": uid}})
    }

    #[test]
    fn the_time_is_that_of_the_first_change() {
        let pods = [pod("a", true, 5), pod("b", true, 7), pod("c", false, 9)];
        let of = |endpoints: Value| time(&service(), &pods, &of_slices(&slices(endpoints)));
        let at = |second: &str| Some(format!("2026-01-02T00:00:{second}Z"));
        assert_eq!(of(json!([])), at("05"));
        assert_eq!(of(json!([endpoint("a", true), endpoint("b", false), endpoint("c", true)])), at("07"));
        assert_eq!(of(json!([endpoint("a", true), endpoint("b", true), endpoint("c", true)])), at("09"));
        let same =
            json!([endpoint("a", true), endpoint("b", true), endpoint("c", false), endpoint("d", true)]);
        assert_eq!(of(same), None, "only a pod is gone");
        assert_eq!(time(&service(), &pods, &None), Some("2026-01-01T00:00:00Z".to_owned()), "a new service");
    }

    #[test]
    fn endpoints_know_their_pods_too() {
        let subsets = json!([{"addresses": [{"ip": "10.0.0.1", "targetRef": {"uid": "a"}}, {"ip": "10.0.0.9"}],
            "notReadyAddresses": [{"ip": "10.0.0.2", "targetRef": {"uid": "b"}}]}]);
        let subsets: Vec<EndpointSubset> = serde_json::from_value(subsets).unwrap();
        assert_eq!(of_subsets(&subsets), HashMap::from([("a", true), ("b", false)]));
    }
}
