//! The endpoints of a user's Endpoints, grouped by address family and ports. No I/O.

use coracle_events::Event;
use k8s_openapi::api::core::v1::EndpointAddress;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointConditions, EndpointPort};

use crate::endpoint_slice::pack::{Group, SliceKey};
use crate::endpoints::trigger_time;
use crate::object::{Endpoints, Service, Subset};

/// Label of Endpoints that are not mirrored.
const SKIP: &str = "endpointslice.kubernetes.io/skip-mirror";
/// Annotation of Endpoints that are used as a lock for leader election.
const LEADER: &str = "control-plane.alpha.kubernetes.io/leader";
/// Annotation of objects that `kubectl apply` writes, with their whole content.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// Maximum number of mirrored addresses of a subset, as upstream's default.
const ADDRESSES_MAX: usize = 1000;

/// Whether the Endpoints of this service are mirrored.
pub(crate) fn is_mirrored(endpoints: &Endpoints, service: &Service) -> bool {
    let meta = &endpoints.metadata;
    let skips = meta.labels.as_ref().and_then(|labels| labels.get(SKIP)).is_some_and(|value| value == "true");
    let is_lock = meta.annotations.as_ref().is_some_and(|annotations| annotations.contains_key(LEADER));
    !skips && !is_lock && service.spec.selector.as_ref().is_none_or(|selector| selector.is_empty())
}

/// The annotations that slices copy. As upstream, the time of the last change and the content that `kubectl apply`
/// stores are excluded.
pub(crate) fn annotations(endpoints: &Endpoints) -> impl Iterator<Item = (&String, &String)> {
    let all = endpoints.metadata.annotations.iter().flatten();
    all.filter(|(name, _)| ![trigger_time::ANNOTATION, LAST_APPLIED].contains(&name.as_str()))
}

/// The event about the addresses of Endpoints beyond the maximum. `None` if all addresses are mirrored.
pub(crate) fn too_many(endpoints: &Endpoints) -> Option<Event> {
    let subsets = endpoints.subsets.iter().flatten();
    let skipped: usize = subsets
        .map(|subset| subset.addresses.len() + subset.not_ready_addresses.len())
        .map(|addresses| addresses.saturating_sub(ADDRESSES_MAX))
        .sum();
    let message = format!(
        "A max of {ADDRESSES_MAX} addresses can be mirrored to EndpointSlices per Endpoints subset. {skipped} addresses were \
         skipped"
    );
    (skipped > 0).then(|| Event::warning("TooManyAddressesToMirror", message))
}

/// The desired groups.
pub(crate) fn groups(endpoints: &Endpoints) -> Vec<Group> {
    let mut all: Vec<Group> = Vec::new();
    for subset in endpoints.subsets.iter().flatten() {
        let ports = ports(subset);
        let ready = subset.addresses.iter().map(|address| (address, true));
        let unready = subset.not_ready_addresses.iter().map(|address| (address, false));
        for (address, is_ready) in ready.chain(unready).take(ADDRESSES_MAX) {
            let address_type = if address.ip.contains(':') { "IPv6" } else { "IPv4" };
            let slice_key = SliceKey { address_type, ports: ports.clone() };
            let endpoint = endpoint(address, is_ready);
            match all.iter_mut().find(|group| group.slice_key == slice_key) {
                Some(group) => group.endpoints.push(endpoint),
                None => all.push(Group { slice_key, endpoints: vec![endpoint] }),
            }
        }
    }
    all
}

fn ports(subset: &Subset) -> Vec<EndpointPort> {
    let one = |port: &k8s_openapi::api::core::v1::EndpointPort| EndpointPort {
        name: Some(port.name.clone().unwrap_or_default()),
        port: Some(port.port),
        protocol: Some(port.protocol.clone().unwrap_or_else(|| "TCP".to_owned())),
        app_protocol: port.app_protocol.clone(),
    };
    subset.ports.iter().flatten().map(one).collect()
}

fn endpoint(address: &EndpointAddress, is_ready: bool) -> Endpoint {
    Endpoint {
        addresses: vec![address.ip.clone()],
        conditions: Some(EndpointConditions { ready: Some(is_ready), ..EndpointConditions::default() }),
        hostname: address.hostname.clone().filter(|name| !name.is_empty()),
        node_name: address.node_name.clone(),
        target_ref: address.target_ref.clone(),
        ..Endpoint::default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn subsets_become_groups_of_one_family() {
        let endpoints: Endpoints = serde_json::from_value(json!({"metadata": {}, "subsets": [
            {"addresses": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}], "notReadyAddresses": [{"ip": "10.0.0.2"}],
                "ports": [{"port": 80}]}]}))
        .unwrap();
        let all = groups(&endpoints);
        let shown: Vec<_> =
            all.iter().map(|group| (group.slice_key.address_type, group.endpoints.len())).collect();
        assert_eq!(shown, [("IPv4", 2), ("IPv6", 1)]);
        assert_eq!(all[0].endpoints[1].conditions.as_ref().unwrap().ready, Some(false));
        assert_eq!(all[0].slice_key.ports[0].protocol.as_deref(), Some("TCP"));
    }

    #[test]
    fn addresses_beyond_the_maximum_are_reported() {
        let of = |count: usize| -> Endpoints {
            let addresses = vec![json!({"ip": "10.0.0.1"}); count];
            let subsets = json!([{"addresses": addresses, "notReadyAddresses": [{"ip": "10.0.0.2"}]}]);
            serde_json::from_value(json!({"metadata": {}, "subsets": subsets})).unwrap()
        };
        assert!(too_many(&of(ADDRESSES_MAX - 1)).is_none());
        let event = too_many(&of(ADDRESSES_MAX + 4)).unwrap();
        assert_eq!(event.reason, "TooManyAddressesToMirror");
        assert!(
            event.message.ends_with("per Endpoints subset. 5 addresses were skipped"),
            "{}",
            event.message
        );
    }

    #[test]
    fn slices_copy_the_annotations_that_users_write() {
        let annotations = json!({"a": "1", "endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z",
            "kubectl.kubernetes.io/last-applied-configuration": "{}", "z": "2"});
        let of = |annotations| -> Vec<String> {
            let endpoints: Endpoints =
                serde_json::from_value(json!({"metadata": {"annotations": annotations}})).unwrap();
            super::annotations(&endpoints).map(|(name, value)| format!("{name}={value}")).collect()
        };
        assert_eq!(of(annotations), ["a=1", "z=2"]);
        assert!(of(json!(null)).is_empty());
    }

    #[test]
    fn only_endpoints_of_services_without_a_selector_are_mirrored() {
        let service =
            |spec| serde_json::from_value::<Service>(json!({"metadata": {}, "spec": spec})).unwrap();
        let of = |meta| serde_json::from_value::<Endpoints>(json!({"metadata": meta})).unwrap();
        let (bare, selecting) = (service(json!({})), service(json!({"selector": {"a": "b"}})));
        assert!(is_mirrored(&of(json!({})), &bare) && !is_mirrored(&of(json!({})), &selecting));
        assert!(!is_mirrored(
            &of(json!({"labels": {"endpointslice.kubernetes.io/skip-mirror": "true"}})),
            &bare
        ));
    }
}
