//! The desired endpoints of a service, from the pods of its namespace.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{
    EndpointAddress, EndpointPort, EndpointSubset, ObjectReference, ServicePort,
};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;

use super::omitted_pods::{OmittedPods, PORTS_MAX};
use super::port_lists::PortLists;
use crate::object::{ObjectExt, Pod, Service};

/// Maximum addresses of Endpoints, as upstream. EndpointSlices have no such limit.
const ADDRESSES_MAX: usize = 1000;

/// Whether this controller manages the service's endpoints. Users manage the Endpoints of services without a selector.
pub(crate) fn is_ours(service: &Service) -> bool {
    service.spec.selector.as_ref().is_some_and(|selector| !selector.is_empty())
        && service.spec.type_.as_deref() != Some("ExternalName")
}

/// Whether the service selects the pod.
pub(crate) fn selects(service: &Service, pod: &Pod) -> bool {
    let labels = pod.metadata.labels.as_ref();
    let has = |name: &String, value: &String| labels.and_then(|labels| labels.get(name)) == Some(value);
    is_ours(service) && service.spec.selector.iter().flatten().all(|(name, value)| has(name, value))
}

/// Whether the API accepts an IP address of an endpoint. A node may report any address for its pods. One invalid
/// address must not prevent changes of the endpoints of other nodes. Source: `ValidateEndpointIP`.
pub(crate) fn is_reachable(ip: &str) -> bool {
    match ip.parse() {
        Ok(IpAddr::V4(ip)) => {
            let is_local_group = ip.octets().starts_with(&[224, 0, 0]);
            !(ip.is_unspecified() || ip.is_loopback() || ip.is_link_local() || is_local_group)
        }
        Ok(IpAddr::V6(ip)) => {
            let is_local_group = ip.segments()[0] & 0xff0f == 0xff02;
            !(ip.is_unspecified() || ip.is_loopback() || ip.is_unicast_link_local() || is_local_group)
        }
        Err(_invalid) => false,
    }
}

/// Whether a further list of ports fits beside lists with `known` ports. The first list always fits.
pub(crate) fn has_room(known: usize, added: usize) -> bool {
    known == 0 || known.saturating_add(added) <= PORTS_MAX
}

/// The desired endpoints of a service.
pub(crate) struct DesiredEndpoints {
    /// One subset for all pods with the same ports.
    pub(crate) subsets: Vec<EndpointSubset>,
    pub(crate) omitted: OmittedPods,
}

/// Plans the endpoints. Pods for whose ports there is no room are left out.
pub(crate) fn desired(service: &Service, pods: &[Arc<Pod>]) -> DesiredEndpoints {
    let publish = service.spec.publish_not_ready_addresses == Some(true);
    let mut subsets: Vec<EndpointSubset> = Vec::new();
    let (mut port_count, mut omitted, mut lists) = (0, OmittedPods::default(), PortLists::default());
    for pod in pods.iter().filter(|pod| selects(service, pod) && !pod.finished()) {
        let Some(ip) = pod_ip(pod, is_ipv6(service)) else { continue };
        if pod.is_being_deleted() && !publish {
            continue;
        }
        let ports = ports(service, pod);
        let list = lists.of_subset(&ports);
        let is_equal = |place: usize| subsets[place].ports.as_deref().unwrap_or_default() == ports;
        let place = match lists.find(&list, is_equal) {
            Some(place) => place,
            None if !has_room(port_count, ports.len()) => {
                omitted.add(pod);
                continue;
            }
            None => {
                port_count += ports.len();
                let ports = (!ports.is_empty()).then_some(ports);
                lists.add(list, subsets.len());
                subsets.push(EndpointSubset { ports, ..EndpointSubset::default() });
                subsets.len() - 1
            }
        };
        let subset = &mut subsets[place];
        let ready = publish || pod.ready_since().is_some();
        let list = if ready { &mut subset.addresses } else { &mut subset.not_ready_addresses };
        list.get_or_insert_default().push(address(service, pod, ip));
    }
    for subset in &mut subsets {
        for list in [&mut subset.addresses, &mut subset.not_ready_addresses].into_iter().flatten() {
            list.sort_by(|one, other| one.ip.cmp(&other.ip));
        }
    }
    subsets.sort_by_key(|subset| subset.ports.iter().flatten().map(|port| port.port).collect::<Vec<_>>());
    // Pods without any of the service's ports are not endpoints, unless the service has no ports.
    let portless = service.spec.ports.as_ref().is_none_or(Vec::is_empty);
    subsets.retain(|subset| subset.ports.is_some() || portless);
    DesiredEndpoints { subsets, omitted }
}

/// Removes addresses beyond the maximum, unready addresses first. Each subset keeps its share, rounded up. Returns
/// whether addresses were removed. Source: `truncateEndpoints`.
pub(crate) fn truncate(subsets: &mut Vec<EndpointSubset>) -> bool {
    let count = |of: fn(&EndpointSubset) -> &Option<Vec<EndpointAddress>>| {
        subsets.iter().filter_map(|subset| of(subset).as_ref()).map(Vec::len).sum::<usize>()
    };
    let (ready, unready) = (count(|subset| &subset.addresses), count(|subset| &subset.not_ready_addresses));
    if ready + unready <= ADDRESSES_MAX {
        return false;
    }
    let keeps_unready = ready <= ADDRESSES_MAX;
    let (room, all) = if keeps_unready { (ADDRESSES_MAX - ready, unready) } else { (ADDRESSES_MAX, ready) };
    let mut left = room;
    for subset in subsets.iter_mut() {
        if !keeps_unready {
            subset.not_ready_addresses = None;
        }
        let list = if keeps_unready { &mut subset.not_ready_addresses } else { &mut subset.addresses };
        let Some(addresses) = list else { continue };
        addresses.truncate((addresses.len() * room).div_ceil(all).min(left));
        left -= addresses.len();
        if addresses.is_empty() {
            *list = None;
        }
    }
    // The API refuses a subset without addresses.
    subsets.retain(|subset| {
        let mut lists = [&subset.addresses, &subset.not_ready_addresses].into_iter().flatten();
        lists.any(|list| !list.is_empty())
    });
    true
}

/// Whether the first family of the service is IPv6. The Endpoints of the service have only addresses of that family.
fn is_ipv6(service: &Service) -> bool {
    match service.spec.ip_families.as_deref() {
        Some([first, ..]) => first == "IPv6",
        _ => service.spec.cluster_ip.as_deref().is_some_and(|ip| ip.contains(':')),
    }
}

/// The pod's first valid address in a family.
fn pod_ip(pod: &Pod, is_ipv6: bool) -> Option<String> {
    let all = pod.status.pod_ips.iter().flatten().map(|ip| &ip.ip).chain(&pod.status.pod_ip);
    all.filter(|ip| is_reachable(ip)).find(|ip| ip.contains(':') == is_ipv6).cloned()
}

/// The `targetRef` of a pod's endpoint.
pub(crate) fn reference_to(pod: &Pod) -> ObjectReference {
    ObjectReference {
        kind: Some("Pod".to_owned()),
        namespace: pod.metadata.namespace.clone(),
        name: pod.metadata.name.clone(),
        uid: pod.metadata.uid.clone(),
        ..ObjectReference::default()
    }
}

fn address(service: &Service, pod: &Pod, ip: String) -> EndpointAddress {
    let named = pod.spec.subdomain.as_deref() == Some(service.name());
    EndpointAddress {
        ip,
        hostname: pod.spec.hostname.clone().filter(|name| named && !name.is_empty()),
        node_name: pod.spec.node_name.clone(),
        target_ref: Some(reference_to(pod)),
    }
}

/// The ports of a pod's endpoint. Named target ports are looked up in the pod's containers, then in its sidecars. A
/// service and a pod may each have very many ports, so this takes linear time.
pub(crate) fn ports(service: &Service, pod: &Pod) -> Vec<EndpointPort> {
    let all = || service.spec.ports.iter().flatten();
    let is_name = |port: &ServicePort| matches!(port.target_port, Some(IntOrString::String(_)));
    let named = if all().any(is_name) { named_ports(pod) } else { HashMap::new() };
    let mut ports: Vec<EndpointPort> = all()
        .filter_map(|port| {
            Some(EndpointPort {
                port: target(port, &named)?,
                name: port.name.clone(),
                protocol: Some(protocol(port.protocol.as_ref()).to_owned()),
                app_protocol: port.app_protocol.clone(),
            })
        })
        .collect();
    ports.sort_by(|one, other| (&one.name, one.port).cmp(&(&other.name, other.port)));
    ports
}

/// The ports of a pod by name and protocol. If several ports have the same name and protocol, the first port counts.
fn named_ports(pod: &Pod) -> HashMap<(&str, &str), i32> {
    let containers = pod.spec.containers.iter().chain(&pod.spec.sidecars);
    let mut named = HashMap::new();
    for port in containers.filter_map(|container| container.ports.as_ref()).flatten() {
        if let Some(name) = &port.name {
            named.entry((name.as_str(), protocol(port.protocol.as_ref()))).or_insert(port.container_port);
        }
    }
    named
}

fn target(port: &ServicePort, named: &HashMap<(&str, &str), i32>) -> Option<i32> {
    match &port.target_port {
        None | Some(IntOrString::Int(0)) => Some(port.port),
        Some(IntOrString::Int(number)) => Some(*number),
        Some(IntOrString::String(name)) => {
            named.get(&(name.as_str(), protocol(port.protocol.as_ref()))).copied()
        }
    }
}

/// The protocol of a port. The default is TCP.
fn protocol(protocol: Option<&String>) -> &str {
    protocol.map_or("TCP", String::as_str)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn service(spec: Value) -> Service {
        serde_json::from_value(json!({"metadata": {"name": "web", "namespace": "d"}, "spec": spec})).unwrap()
    }

    fn pod(name: &str, ip: &str, ready: &str) -> Arc<Pod> {
        Arc::new(
            serde_json::from_value(json!({
                "metadata": {"name": name, "namespace": "d", "labels": {"app": "a"}},
                "spec": {"nodeName": "n", "containers": [{"ports": [{"name": "http", "containerPort": 8080}]}]},
                "status": {"podIP": ip, "conditions": [{"type": "Ready", "status": ready}]},
            }))
            .unwrap(),
        )
    }

    fn show(service: &Service, pods: &[Arc<Pod>]) -> String {
        let ips = |list: &Option<Vec<EndpointAddress>>| {
            list.iter().flatten().map(|address| address.ip.clone()).collect::<Vec<_>>().join(",")
        };
        let DesiredEndpoints { subsets, .. } = desired(service, pods);
        let show = |subset: &EndpointSubset| {
            let ports: Vec<_> = subset.ports.iter().flatten().map(|port| port.port.to_string()).collect();
            format!("[{}|{}]:{}", ips(&subset.addresses), ips(&subset.not_ready_addresses), ports.join(","))
        };
        subsets.iter().map(show).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn ready_and_unready_pods_are_separate_and_named_ports_are_resolved() {
        let service =
            service(json!({"selector": {"app": "a"}, "ports": [{"port": 80, "targetPort": "http"}]}));
        let pods =
            [pod("1", "10.0.0.2", "True"), pod("2", "10.0.0.1", "True"), pod("3", "10.0.0.3", "False")];
        assert_eq!(show(&service, &pods), "[10.0.0.1,10.0.0.2|10.0.0.3]:8080");
        assert_eq!(show(&service, &[pod("1", "", "True")]), "");
    }

    #[test]
    fn unready_addresses_beyond_the_maximum_are_removed_first() {
        let subset = |ready: usize, unready: usize| {
            let list = |count| Some(vec![EndpointAddress::default(); count]);
            EndpointSubset { addresses: list(ready), not_ready_addresses: list(unready), ports: None }
        };
        let left = |mut subsets: Vec<EndpointSubset>| {
            let is_truncated = truncate(&mut subsets);
            let count = |list: &Option<Vec<EndpointAddress>>| list.as_ref().map_or(0, Vec::len);
            let of = |subset: &EndpointSubset| (count(&subset.addresses), count(&subset.not_ready_addresses));
            (is_truncated, subsets.iter().map(of).collect::<Vec<_>>())
        };
        assert_eq!(left(vec![subset(900, 100)]), (false, vec![(900, 100)]));
        assert_eq!(left(vec![subset(900, 0), subset(0, 300)]), (true, vec![(900, 0), (0, 100)]));
        assert_eq!(left(vec![subset(500, 100), subset(400, 200)]), (true, vec![(500, 34), (400, 66)]));
        assert_eq!(left(vec![subset(900, 9), subset(600, 9)]), (true, vec![(600, 0), (400, 0)]));
        assert_eq!(left(vec![subset(1001, 0), subset(0, 9)]), (true, vec![(1000, 0)]), "no subset is empty");
    }

    #[test]
    fn very_many_named_ports_are_found_in_linear_time() {
        const PORTS: u32 = 30_000;
        let names = || (0..PORTS).map(|number| format!("p{number}"));
        let of_service = names().map(|name| json!({"name": name, "port": 80, "targetPort": name}));
        let of_pod =
            names().enumerate().map(|(number, name)| json!({"name": name, "containerPort": number + 1}));
        let (of_service, of_pod): (Vec<_>, Vec<_>) = (of_service.collect(), of_pod.collect());
        let service = service(json!({"selector": {"app": "a"}, "ports": of_service}));
        let pod: Pod = serde_json::from_value(json!({"spec": {"containers": [{"ports": of_pod}]}})).unwrap();
        let found = ports(&service, &pod);
        assert_eq!(found.len(), usize::try_from(PORTS).unwrap());
        assert!(found.iter().all(|port| port.name == Some(format!("p{}", port.port - 1))));
    }

    #[test]
    fn pods_with_different_numbers_of_a_named_port_do_not_multiply_very_many_ports() {
        let ports: Vec<_> = (1..=PORTS_MAX / 2)
            .map(|port| json!({"name": format!("p{port}"), "port": port, "targetPort": "t"}))
            .collect();
        let service = service(json!({"selector": {"app": "a"}, "ports": ports}));
        let pod = |name: &str, ip: &str, port: u16| -> Arc<Pod> {
            let metadata = json!({"name": name, "namespace": "d", "labels": {"app": "a"}});
            let spec = json!({"containers": [{"ports": [{"name": "t", "containerPort": port}]}]});
            let pod = json!({"metadata": metadata, "spec": spec, "status": {"podIP": ip}});
            Arc::new(serde_json::from_value(pod).unwrap())
        };
        let pods = [
            pod("1", "10.0.0.1", 1),
            pod("2", "10.0.0.2", 2),
            pod("3", "10.0.0.3", 3),
            pod("4", "10.0.0.4", 1),
        ];
        let DesiredEndpoints { subsets: all, omitted } = desired(&service, &pods);
        let counts: Vec<_> =
            all.iter().map(|subset| subset.not_ready_addresses.as_ref().map_or(0, Vec::len)).collect();
        assert_eq!(counts, [2, 1], "the third list of ports has no room");
        let reported = omitted.event().map(|event| event.message).unwrap_or_default();
        assert!(reported.contains(": 1 (3). "), "{reported}");
        assert!(desired(&service, &pods[..2]).omitted.is_empty());
        assert!(has_room(0, 2 * PORTS_MAX), "one list is not limited");
    }

    #[test]
    fn a_named_port_may_be_a_port_of_a_sidecar() {
        let service =
            service(json!({"selector": {"app": "a"}, "ports": [{"port": 80, "targetPort": "side"}]}));
        let with = |init: Value| -> Arc<Pod> {
            let spec = json!({"containers": [{"ports": [{"name": "http", "containerPort": 8080}]}],
                "initContainers": [init]});
            let pod = json!({"metadata": {"name": "1", "namespace": "d", "labels": {"app": "a"}}, "spec": spec,
                "status": {"podIP": "10.0.0.2", "conditions": [{"type": "Ready", "status": "True"}]}});
            Arc::new(serde_json::from_value(pod).unwrap())
        };
        let ports = json!([{"name": "side", "containerPort": 9090}, {"containerPort": 1}]);
        let sidecar = with(json!({"restartPolicy": "Always", "ports": ports}));
        assert_eq!(show(&service, &[sidecar]), "[10.0.0.2|]:9090");
        assert_eq!(show(&service, &[with(json!({"ports": ports}))]), "", "it does not run any more");
    }

    #[test]
    fn endpoints_have_the_default_family_of_the_service() {
        let mut dual = (*pod("1", "10.0.0.2", "True")).clone();
        let ips = json!([{"ip": "10.0.0.2"}, {"ip": "fd00::2"}]);
        dual.status.pod_ips = serde_json::from_value(ips).unwrap();
        let shown = |families: Value| {
            let spec = json!({"selector": {"app": "a"}, "ports": [{"port": 80}], "ipFamilies": families});
            show(&service(spec), &[Arc::new(dual.clone())])
        };
        assert_eq!(shown(json!(["IPv6", "IPv4"])), "[fd00::2|]:80");
        assert_eq!(shown(json!(["IPv4"])), "[10.0.0.2|]:80");
    }

    #[test]
    fn unknown_ports_and_missing_selectors_give_no_endpoints() {
        let named =
            service(json!({"selector": {"app": "a"}, "ports": [{"port": 80, "targetPort": "other"}]}));
        assert_eq!(show(&named, &[pod("1", "10.0.0.2", "True")]), "");
        assert!(!is_ours(&service(json!({"ports": [{"port": 80}]}))));
        let all =
            json!({"selector": {"app": "a"}, "ports": [{"port": 80}], "publishNotReadyAddresses": true});
        assert_eq!(show(&service(all), &[pod("1", "10.0.0.2", "False")]), "[10.0.0.2|]:80");
        let headless = service(json!({"selector": {"app": "a"}, "clusterIP": "None"}));
        assert_eq!(show(&headless, &[pod("1", "10.0.0.2", "True")]), "[10.0.0.2|]:");
    }
}
