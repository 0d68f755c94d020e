//! The annotation with the time of the change that caused a write of endpoints. With this time, programs measure how
//! long a change takes to reach the nodes. Source: `TriggerTimeTracker` of `k8s.io/endpointslice`. Upstream stores the
//! last times of all pods. Here a comparison of the written endpoints with the existing endpoints shows the changed
//! pods. No I/O.

use std::collections::HashMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{EndpointAddress, EndpointSubset, ObjectReference};
use k8s_openapi::api::discovery::v1::Endpoint;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::object::{EndpointSlice, Endpoints, ObjectExt, Pod, Service};

/// Annotation of Endpoints and EndpointSlices: the time of the change, as the API writes times.
pub(crate) const ANNOTATION: &str = "endpoints.kubernetes.io/last-change-trigger-time";

/// The readiness of the pods that have endpoints, by their uids.
pub(crate) type Readiness<'a> = HashMap<&'a str, bool>;

/// Whether an object has the annotation.
pub(crate) fn is_set(metadata: &ObjectMeta) -> bool {
    metadata.annotations.as_ref().is_some_and(|all| all.contains_key(ANNOTATION))
}

/// The pods of slices. `None` if the service has no slice yet.
pub(crate) fn of_slices(slices: &[Arc<EndpointSlice>]) -> Option<Readiness<'_>> {
    let endpoints = slices.iter().flat_map(|slice| slice.endpoints.iter().map(|endpoint| &**endpoint));
    (!slices.is_empty()).then(|| of_endpoints(endpoints))
}

/// The pods of the endpoints of slices.
pub(crate) fn of_endpoints<'a>(endpoints: impl Iterator<Item = &'a Endpoint>) -> Readiness<'a> {
    let pods = endpoints.filter_map(|endpoint| {
        let is_ready = endpoint.conditions.as_ref().is_some_and(|all| all.serving == Some(true));
        Some((uid(endpoint.target_ref.as_ref())?, is_ready))
    });
    pods.collect()
}

/// The pods of Endpoints.
pub(crate) fn of_subsets(subsets: &[EndpointSubset]) -> Readiness<'_> {
    let known = subsets.iter().flat_map(|subset| {
        let ready = subset.addresses.iter().flatten().map(|address| (address, true));
        ready.chain(subset.not_ready_addresses.iter().flatten().map(|address| (address, false)))
    });
    of_addresses(known)
}

/// The pods of Endpoints in the cache.
pub(crate) fn of_known(endpoints: &Endpoints) -> Readiness<'_> {
    let known = endpoints.subsets.iter().flatten().flat_map(|subset| {
        let ready = subset.addresses.iter().map(|address| (&**address, true));
        ready.chain(subset.not_ready_addresses.iter().map(|address| (&**address, false)))
    });
    of_addresses(known)
}

fn of_addresses<'a>(addresses: impl Iterator<Item = (&'a EndpointAddress, bool)>) -> Readiness<'a> {
    addresses.filter_map(|(one, is_ready)| Some((uid(one.target_ref.as_ref())?, is_ready))).collect()
}

fn uid(target: Option<&ObjectReference>) -> Option<&str> {
    target?.uid.as_deref()
}

/// The time of the earliest change that the written endpoints contain and the existing endpoints do not. Such a
/// change is a new readiness of a pod, or the creation of the service.
///
/// `known` has the existing endpoints. `None` if the service has no endpoints yet. A pod that gets no endpoint, for
/// example because it has no address, does not count. The result is `None` without a change, for example if only a pod
/// was deleted.
pub(crate) fn time(
    service: &Service,
    pods: &[Arc<Pod>],
    known: Option<&Readiness<'_>>,
    written: &Readiness<'_>,
) -> Option<String> {
    let has_changed = |pod: &Arc<Pod>| {
        let before = known.and_then(|known| known.get(pod.uid()));
        written.get(pod.uid()).is_some_and(|now| before != Some(now))
    };
    let changes = pods.iter().filter(|pod| has_changed(pod)).filter_map(|pod| pod.readiness_changed_at());
    let created = service.metadata.creation_timestamp.as_ref().filter(|_| known.is_none());
    let first = changes.chain(created.map(|time| time.0)).min()?;
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
    fn the_time_is_the_time_of_the_first_change() {
        let pods = [pod("a", true, 5), pod("b", true, 7), pod("c", false, 9)];
        let written = HashMap::from([("a", true), ("b", true), ("c", false)]);
        let of = |endpoints: Value| time(&service(), &pods, of_slices(&slices(endpoints)).as_ref(), &written);
        let at = |second: &str| Some(format!("2026-01-02T00:00:{second}Z"));
        assert_eq!(of(json!([])), at("05"));
        assert_eq!(of(json!([endpoint("a", true), endpoint("b", false), endpoint("c", true)])), at("07"));
        assert_eq!(of(json!([endpoint("a", true), endpoint("b", true), endpoint("c", true)])), at("09"));
        let same =
            json!([endpoint("a", true), endpoint("b", true), endpoint("c", false), endpoint("d", true)]);
        assert_eq!(of(same), None, "only a pod is gone");
        let created = Some("2026-01-01T00:00:00Z".to_owned());
        assert_eq!(time(&service(), &pods, None, &written), created, "a new service");
    }

    #[test]
    fn a_pod_without_an_endpoint_does_not_count() {
        let pods = [pod("without-address", false, 1), pod("a", true, 5)];
        let written = HashMap::from([("a", true)]);
        let time = time(&service(), &pods, Some(&HashMap::new()), &written);
        assert_eq!(time.as_deref(), Some("2026-01-02T00:00:05Z"));
    }

    #[test]
    fn published_endpoints_of_an_unready_pod_do_not_change() {
        let subsets = json!([{"addresses": [{"ip": "10.0.0.1", "targetRef": {"uid": "a"}}]}]);
        let subsets: Vec<EndpointSubset> = serde_json::from_value(subsets).unwrap();
        let known = of_subsets(&subsets);
        assert_eq!(time(&service(), &[pod("a", false, 5)], Some(&known), &known), None);
    }

    #[test]
    fn endpoints_know_their_pods_too() {
        let subsets = json!([{"addresses": [{"ip": "10.0.0.1", "targetRef": {"uid": "a"}}, {"ip": "10.0.0.9"}],
            "notReadyAddresses": [{"ip": "10.0.0.2", "targetRef": {"uid": "b"}}]}]);
        let subsets: Vec<EndpointSubset> = serde_json::from_value(subsets).unwrap();
        let expected = HashMap::from([("a", true), ("b", false)]);
        assert_eq!(of_subsets(&subsets), expected);
        let known: Endpoints = serde_json::from_value(json!({"metadata": {}, "subsets": subsets})).unwrap();
        assert_eq!(of_known(&known), expected);
    }
}
