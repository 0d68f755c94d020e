//! The desired endpoints of a service, grouped by address family and ports. No I/O.

use std::sync::Arc;

use k8s_openapi::api::discovery::v1::{
    Endpoint, EndpointConditions, EndpointHints, EndpointPort, ForNode, ForZone,
};

use super::pack::{Group, SliceKey};
use super::topology::is_automatic;
use crate::endpoints::omitted_pods::OmittedPods;
use crate::endpoints::plan::{has_room, is_reachable, ports, reference_to, selects};
use crate::endpoints::port_lists::PortLists;
use crate::object::{ObjectExt, Pod, Service};

/// The desired slices of a service.
pub(crate) struct DesiredSlices {
    pub(crate) groups: Vec<Group>,
    pub(crate) omitted: OmittedPods,
}

/// Plans the groups. `zone_of` returns the zone of a node. An address family of the service without endpoints has an
/// empty group. Pods for whose ports there is no room are left out.
pub(crate) fn desired(
    service: &Service,
    pods: &[Arc<Pod>],
    zone_of: impl Fn(&str) -> Option<String>,
) -> DesiredSlices {
    let mut all: Vec<Group> = Vec::new();
    let mut omitted = OmittedPods::default();
    for address_type in families(service) {
        let before = all.len();
        let (mut port_count, mut lists) = (0, PortLists::default());
        for pod in pods.iter().filter(|pod| selects(service, pod) && !pod.finished()) {
            let Some(ip) = address(pod, address_type) else { continue };
            let slice_key = SliceKey { address_type, ports: slice_ports(service, pod) };
            let endpoint = endpoint(service, pod, ip, &zone_of);
            let list = lists.of_slice(&slice_key.ports);
            match lists.find(&list, |place| all[place].slice_key == slice_key) {
                Some(place) => all[place].endpoints.push(endpoint),
                None if !has_room(port_count, slice_key.ports.len()) => omitted.add(pod),
                None => {
                    port_count += slice_key.ports.len();
                    lists.add(list, all.len());
                    all.push(Group { slice_key, endpoints: vec![endpoint] });
                }
            }
        }
        if all.len() == before {
            let slice_key = SliceKey { address_type, ports: Vec::new() };
            all.push(Group { slice_key, endpoints: Vec::new() });
        }
    }
    DesiredSlices { groups: all, omitted }
}

/// The IP families of a service. A service of an earlier version has no `ipFamilies`. It has the family of its cluster
/// IP.
fn families(service: &Service) -> Vec<&'static str> {
    let spec = &service.spec;
    let known = |family: &String| match family.as_str() {
        "IPv4" => Some("IPv4"),
        "IPv6" => Some("IPv6"),
        _ => None,
    };
    let all: Vec<_> = spec.ip_families.iter().flatten().filter_map(known).collect();
    match spec.cluster_ip.as_deref() {
        _ if !all.is_empty() => all,
        Some(address) if address.contains(':') => vec!["IPv6"],
        _ => vec!["IPv4"],
    }
}

fn address<'a>(pod: &'a Pod, address_type: &str) -> Option<&'a str> {
    let all = pod.status.pod_ips.iter().flatten().map(|ip| ip.ip.as_str());
    let mut all = all.chain(pod.status.pod_ip.as_deref()).filter(|ip| is_reachable(ip));
    all.find(|ip| ip.contains(':') == (address_type == "IPv6"))
}

fn slice_ports(service: &Service, pod: &Pod) -> Vec<EndpointPort> {
    let one = |port: k8s_openapi::api::core::v1::EndpointPort| EndpointPort {
        name: Some(port.name.unwrap_or_default()),
        port: Some(port.port),
        protocol: port.protocol,
        app_protocol: port.app_protocol,
    };
    ports(service, pod).into_iter().map(one).collect()
}

fn endpoint(service: &Service, pod: &Pod, ip: &str, zone_of: &impl Fn(&str) -> Option<String>) -> Endpoint {
    let publish = service.spec.publish_not_ready_addresses == Some(true);
    let serving = pod.ready_since().is_some();
    let terminating = pod.is_being_deleted();
    let ready = publish || serving && !terminating;
    let node_name = pod.spec.node_name.clone();
    let zone = node_name.as_deref().and_then(zone_of);
    let named = pod.spec.subdomain.as_deref() == Some(service.name());
    Endpoint {
        addresses: vec![ip.to_owned()],
        conditions: Some(EndpointConditions {
            ready: Some(ready),
            serving: Some(serving),
            terminating: Some(terminating),
        }),
        hints: hints(service, node_name.as_deref(), zone.as_deref()).filter(|_| ready),
        hostname: pod.spec.hostname.clone().filter(|name| named && !name.is_empty()),
        node_name,
        zone,
        target_ref: Some(reference_to(pod)),
        ..Endpoint::default()
    }
}

/// Hints for `trafficDistribution`: an endpoint serves its own zone, and with `PreferSameNode` also its own node.
/// Automatic hints take precedence over these hints.
fn hints(service: &Service, node: Option<&str>, zone: Option<&str>) -> Option<EndpointHints> {
    if is_automatic(service) {
        return None;
    }
    let (for_zones, for_nodes) = match service.spec.traffic_distribution.as_deref()? {
        "PreferClose" | "PreferSameZone" => (zone, None),
        "PreferSameNode" => (zone, node),
        _ => return None,
    };
    let hints = EndpointHints {
        for_zones: for_zones.map(|name| vec![ForZone { name: name.to_owned() }]),
        for_nodes: for_nodes.map(|name| vec![ForNode { name: name.to_owned() }]),
    };
    Some(hints).filter(|hints| hints.for_zones.is_some() || hints.for_nodes.is_some())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn service(spec: Value) -> Service {
        serde_json::from_value(json!({"metadata": {"name": "web", "namespace": "d"}, "spec": spec})).unwrap()
    }

    fn pod(name: &str, change: impl FnOnce(&mut Value)) -> Arc<Pod> {
        let mut pod = json!({"metadata": {"name": name, "uid": name, "namespace": "d", "labels": {"app": "a"}},
            "spec": {"nodeName": "n", "containers": [{"ports": [{"name": "http", "containerPort": 8080}]}]},
            "status": {"podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}, {"ip": "fd00::1"}],
                "conditions": [{"type": "Ready", "status": "True"}]}});
        change(&mut pod);
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn planned(spec: Value, pods: &[Arc<Pod>]) -> Vec<Group> {
        desired(&service(spec), pods, |node| Some(format!("zone-of-{node}"))).groups
    }

    fn conditions(group: &Group) -> (bool, bool, bool) {
        let of = group.endpoints[0].conditions.as_ref().unwrap();
        (of.ready.unwrap(), of.serving.unwrap(), of.terminating.unwrap())
    }

    #[test]
    fn a_pod_address_that_the_api_refuses_is_left_out() {
        let at = |name: &str, ip: &'static str| {
            pod(name, move |pod| pod["status"] = json!({"podIP": ip, "podIPs": [{"ip": ip}]}))
        };
        let pods = [at("a", "127.0.0.1"), at("b", "10.0.0.2"), at("c", "169.254.0.1"), at("d", "x")];
        let all = planned(json!({"selector": {"app": "a"}, "ports": [{"port": 80}]}), &pods);
        let addresses: Vec<_> =
            all.iter().flat_map(|group| &group.endpoints).flat_map(|one| &one.addresses).collect();
        assert_eq!(addresses, ["10.0.0.2"]);
    }

    #[test]
    fn a_pod_is_an_endpoint_of_both_families_with_all_ports() {
        let spec = json!({"selector": {"app": "a"}, "ipFamilies": ["IPv4", "IPv6"],
            "ports": [{"name": "a", "port": 80, "targetPort": "http"}, {"name": "b", "port": 81}]});
        let all = planned(spec, &[pod("1", |_| {})]);
        let shown: Vec<_> =
            all.iter().map(|g| (g.slice_key.address_type, g.endpoints[0].addresses[0].as_str())).collect();
        assert_eq!(shown, [("IPv4", "10.0.0.1"), ("IPv6", "fd00::1")]);
        let ports: Vec<_> = all[0].slice_key.ports.iter().map(|port| port.port.unwrap()).collect();
        assert_eq!(ports, [8080, 81]);
        assert_eq!(all[0].endpoints[0].zone.as_deref(), Some("zone-of-n"));
    }

    #[test]
    fn a_pod_without_the_named_port_is_an_endpoint_without_ports() {
        let spec = json!({"selector": {"app": "a"}, "ports": [{"port": 80, "targetPort": "none"}]});
        let all = planned(spec, &[pod("1", |_| {})]);
        assert_eq!((all.len(), all[0].endpoints.len(), all[0].slice_key.ports.len()), (1, 1, 0));
    }

    #[test]
    fn pods_with_different_numbers_of_a_named_port_have_few_groups_of_very_many_ports() {
        let ports: Vec<_> = (1..=16_384)
            .map(|port| json!({"name": format!("p{port}"), "port": port, "targetPort": "http"}))
            .collect();
        let spec = json!({"selector": {"app": "a"}, "ipFamilies": ["IPv4", "IPv6"], "ports": ports});
        let at = |name: &str, port: u16| {
            pod(name, move |pod| pod["spec"]["containers"][0]["ports"][0]["containerPort"] = port.into())
        };
        let pods = [at("1", 1), at("2", 2), at("3", 3), at("4", 1)];
        let DesiredSlices { groups: all, omitted } = desired(&service(spec), &pods, |_| None);
        let shown: Vec<_> =
            all.iter().map(|group| (group.slice_key.address_type, group.endpoints.len())).collect();
        assert_eq!(shown, [("IPv4", 2), ("IPv4", 1), ("IPv6", 2), ("IPv6", 1)]);
        let reported = omitted.event().map(|event| event.message).unwrap_or_default();
        assert!(reported.contains(": 1 (3). "), "one pod, although it has two families: {reported}");
    }

    #[test]
    fn conditions_follow_readiness_and_deletion() {
        let spec = || json!({"selector": {"app": "a"}, "ports": [{"port": 80}]});
        let ending = pod("1", |pod| pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into());
        assert_eq!(conditions(&planned(spec(), std::slice::from_ref(&ending))[0]), (false, true, true));
        let unready = pod("1", |pod| pod["status"]["conditions"][0]["status"] = "False".into());
        assert_eq!(conditions(&planned(spec(), std::slice::from_ref(&unready))[0]), (false, false, false));
        let mut publish = spec();
        publish["publishNotReadyAddresses"] = true.into();
        assert_eq!(conditions(&planned(publish.clone(), &[unready])[0]), (true, false, false));
        assert_eq!(conditions(&planned(publish, &[ending])[0]), (true, true, true));
    }

    #[test]
    fn without_pods_each_family_has_an_empty_group() {
        let all = planned(json!({"selector": {"app": "b"}, "ports": [{"port": 80}]}), &[pod("1", |_| {})]);
        assert_eq!((all.len(), all[0].endpoints.len(), all[0].slice_key.ports.len()), (1, 0, 0));
    }

    #[test]
    fn traffic_distribution_becomes_hints_of_ready_endpoints() {
        let spec = json!({"selector": {"app": "a"}, "ports": [{"port": 80}], "trafficDistribution": "PreferSameNode"});
        let all = planned(spec, &[pod("1", |_| {})]);
        let hints = all[0].endpoints[0].hints.as_ref().unwrap();
        assert_eq!(hints.for_zones.as_ref().unwrap()[0].name, "zone-of-n");
        assert_eq!(hints.for_nodes.as_ref().unwrap()[0].name, "n");
    }
}
