//! Elements and chains of single services.

use std::collections::{BTreeMap, BTreeSet};

use coracle_nft::Rule;
use serde_json::{Value, json};

use super::*;
use crate::layout::masquerade_outside;
use crate::program::ElementId;

fn node() -> NodeView {
    NodeView {
        name: "here".to_owned(),
        zone: Some("z1".to_owned()),
        pod_networks: vec!["10.42.0.0/24".parse().unwrap()],
        served_here: vec!["10.43.0.10".parse().unwrap()],
        external_ips: vec!["192.0.2.0/24".parse().unwrap()],
        addresses: vec!["198.51.100.1".parse().unwrap(), "10.0.0.1".parse().unwrap()],
        ..NodeView::default()
    }
}

fn service(spec: Value) -> Service {
    let mut spec = spec;
    spec["clusterIPs"] = json!([spec["clusterIP"]]);
    if spec["ports"].is_null() {
        spec["ports"] = json!([{"port": 80, "protocol": "TCP"}]);
    }
    serde_json::from_value(json!({"metadata": {"namespace": "n", "name": "s"}, "spec": spec})).unwrap()
}

fn slice(endpoints: Value) -> Vec<Arc<EndpointSlice>> {
    let slice = json!({"metadata": {"namespace": "n", "name": "x", "labels": {"kubernetes.io/service-name": "s"}},
        "addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 8080, "protocol": "TCP"}]});
    vec![Arc::new(serde_json::from_value(slice).unwrap())]
}

fn planned(spec: Value, endpoints: Value) -> Program {
    plan(&service(spec), &slice(endpoints), &node())
}

fn verdict(program: &Program, map: Map, key: Key) -> Option<String> {
    let element_id = ElementId { map, is_ipv4: true, key };
    match program.elements.get(&element_id)? {
        Entry::Verdict(Verdict::Goto(chain)) => Some(chain.clone()),
        Entry::OneOf(choice) => Some(format!("one of {}", choice.targets.len())),
        other => panic!("{other:?}"),
    }
}

fn at(ip: &str, port: u16) -> Key {
    Key::default().address(ip.parse().unwrap()).protocol(6).port(port)
}

fn two() -> Value {
    json!([{"addresses": ["10.42.0.2"], "nodeName": "here"}, {"addresses": ["10.42.1.2"], "nodeName": "there"}])
}

#[test]
fn a_service_without_affinity_has_no_chain_and_no_set_of_its_own() {
    let program = planned(json!({"clusterIP": "10.43.1.1"}), two());
    assert_eq!(verdict(&program, Map::Services, at("10.43.1.1", 80)).unwrap(), "one of 2");
    assert_eq!(program.chains, BTreeMap::new(), "the kernel searches all sets for each new one");
    assert!(verdict(&program, Map::Rejected, at("10.43.1.1", 80)).is_none());
    assert!(program.connectionless.is_empty() && program.affinities.is_empty());
}

#[test]
fn without_endpoints_packets_are_rejected_and_with_endpoints_elsewhere_dropped() {
    let none = planned(
        json!({"clusterIP": "10.43.1.1", "type": "NodePort",
        "ports": [{"port": 80, "nodePort": 30080}]}),
        json!([]),
    );
    let port = || Key::default().protocol(6).port(30080);
    assert_eq!(verdict(&none, Map::Rejected, at("10.43.1.1", 80)).unwrap(), "reject");
    assert_eq!(verdict(&none, Map::RejectedPorts, port()).unwrap(), "reject");
    assert!(verdict(&none, Map::NodePorts, port()).is_none());
    let on_other_node = json!([{"addresses": ["10.42.1.2"], "nodeName": "there"}]);
    let local = planned(json!({"clusterIP": "10.43.1.1", "internalTrafficPolicy": "Local"}), on_other_node);
    assert_eq!(verdict(&local, Map::Rejected, at("10.43.1.1", 80)).unwrap(), "drop");
}

#[test]
fn terminating_endpoints_count_only_without_ready_ones() {
    let ending = json!({"ready": false, "serving": true, "terminating": true});
    let targets = |endpoints: Value| {
        let id = PortId { name: "", protocol: "TCP", is_ipv4: true };
        let choice = choose(&slice(endpoints), id, &node());
        choice.cluster.iter().map(|target| target.address.to_string()).collect::<Vec<_>>()
    };
    let (a, b) = (json!(["10.0.0.1"]), json!(["10.0.0.2"]));
    let old = json!({"addresses": a, "conditions": ending});
    assert_eq!(targets(json!([old, {"addresses": b}])), ["10.0.0.2"]);
    assert_eq!(targets(json!([old, {"addresses": b, "conditions": {"ready": false}}])), ["10.0.0.1"]);
    assert!(targets(json!([{"addresses": b, "conditions": {"ready": false}}])).is_empty());
    let zone = |name: &str, ip: &Value| json!({"addresses": ip, "hints": {"forZones": [{"name": name}]}});
    assert_eq!(targets(json!([zone("z1", &a), zone("z2", &b)])), ["10.0.0.1"]);
    assert_eq!(targets(json!([zone("z3", &a), zone("z2", &b)])).len(), 2, "no endpoint is in the zone");
    assert_eq!(targets(json!([zone("z1", &a), {"addresses": b}])).len(), 2, "an endpoint has no hint");
    let mut all = json!([zone("z1", &a), zone("z2", &b)]);
    for endpoint in all.as_array_mut().unwrap() {
        endpoint["conditions"] = ending.clone();
    }
    assert_eq!(targets(all).len(), 2, "hints of terminating endpoints do not count");
    let new = json!({"addresses": a, "conditions": {"ready": false}});
    assert!(targets(json!([old, new])).is_empty(), "a new pod has the address");
}

#[test]
fn hints_apply_to_external_traffic_whatever_the_internal_policy() {
    let spec = json!({"clusterIP": "10.43.1.1", "type": "NodePort", "internalTrafficPolicy": "Local",
        "ports": [{"port": 80, "nodePort": 30080}]});
    let zone = |name: &str, ip: &str| json!({"addresses": [ip], "hints": {"forZones": [{"name": name}]}});
    let program = planned(spec, json!([zone("z1", "10.42.0.2"), zone("z2", "10.42.1.2")]));
    let targets: Vec<_> = program.targets["cluster n/s/6-80/4"].iter().map(|to| to.address).collect();
    assert_eq!(targets, ["10.42.0.2".parse::<IpAddr>().unwrap()]);
}

#[test]
fn open_flows_of_datagrams_keep_every_endpoint_that_serves() {
    let of = |protocol: &str| {
        let ports = json!([{"port": 53, "protocol": protocol}]);
        let ending = json!({"ready": false, "serving": true, "terminating": true});
        let endpoints = json!([{"addresses": ["10.42.0.2"]}, {"addresses": ["10.42.0.3"], "conditions": ending},
            {"addresses": ["10.42.0.4"], "conditions": {"ready": false}}]);
        let mut slice = (*slice(endpoints)[0]).clone();
        slice.ports[0].protocol = Some(protocol.into());
        let service = service(json!({"clusterIP": "10.43.1.1", "ports": ports}));
        let program = plan(&service, &[Arc::new(slice)], &node());
        program.connectionless.into_values().next()
    };
    let kept: BTreeSet<SocketAddr> =
        ["10.42.0.2:8080", "10.42.0.3:8080"].map(|target| target.parse().unwrap()).into();
    assert_eq!(of("UDP"), Some(kept));
    assert_eq!((of("TCP"), of("SCTP")), (None, None), "they have connections");
}

#[test]
fn external_addresses_are_taken_only_from_permitted_ranges() {
    let spec =
        json!({"clusterIP": "10.43.1.1", "externalIPs": ["192.0.2.7", "8.8.8.8", "10.43.0.10", "127.0.0.1"]});
    let program = planned(spec, two());
    assert_eq!(verdict(&program, Map::External, at("192.0.2.7", 80)).unwrap(), "external n/s/6-80/4");
    for forbidden in ["8.8.8.8", "10.43.0.10", "127.0.0.1"] {
        assert!(verdict(&program, Map::External, at(forbidden, 80)).is_none(), "{forbidden}");
    }
    let dns = planned(json!({"clusterIP": "10.43.0.10"}), two());
    assert!(dns.elements.is_empty(), "the node serves this address");
}

#[test]
fn the_affinity_set_of_an_endpoint_does_not_depend_on_other_endpoints() {
    let spec = json!({"clusterIP": "10.43.1.1", "sessionAffinity": "ClientIP",
        "sessionAffinityConfig": {"clientIP": {"timeoutSeconds": 60}}});
    let both = planned(spec.clone(), two());
    let one = planned(spec, json!([{"addresses": ["10.42.0.2"], "nodeName": "here"}]));
    let names = |program: &Program| program.affinities.keys().cloned().collect::<BTreeSet<_>>();
    assert_eq!(both.affinities.len(), 2);
    assert!(names(&one).is_subset(&names(&both)));
    assert_eq!(both.affinities.values().next().unwrap().timeout, Duration::from_secs(60));
}

#[test]
fn a_balancer_has_guarded_addresses_and_a_local_policy() {
    let mut service =
        service(json!({"clusterIP": "10.43.1.1", "type": "LoadBalancer", "externalTrafficPolicy": "Local",
        "loadBalancerSourceRanges": ["198.51.100.0/24"], "ports": [{"port": 80, "nodePort": 30080}]}));
    service.status = serde_json::from_value(json!({"loadBalancer": {"ingress": [{"ip": "192.0.2.9"},
        {"ip": "192.0.2.10", "ipMode": "Proxy"}]}}))
    .unwrap();
    let program = plan(&service, &slice(two()), &node());
    assert_eq!(verdict(&program, Map::Guarded, at("192.0.2.9", 80)).unwrap(), "guard n/s/6-80/4");
    let permitted =
        |network: &str| Rule::default().from(network.parse().unwrap(), false).verdict(&Verdict::Return);
    let own = permitted("192.0.2.9/32");
    let guard = [permitted("198.51.100.0/24"), own, Rule::default().drop()];
    assert_eq!(program.chains["guard n/s/6-80/4"], guard, "the node's address is in the range");
    assert!(verdict(&program, Map::External, at("192.0.2.10", 80)).is_none());
    assert_eq!(program.chains["external n/s/6-80/4"].len(), 4);
}

#[test]
fn addresses_of_load_balancers_are_taken_only_from_permitted_ranges() {
    let mut service = service(json!({"clusterIP": "10.43.1.1", "type": "LoadBalancer",
        "ports": [{"port": 80, "protocol": "TCP"}]}));
    service.status = serde_json::from_value(json!({"loadBalancer": {"ingress": [{"ip": "203.0.113.9"},
        {"ip": "8.8.8.8"}, {"ip": "10.0.0.1", "ipMode": "Proxy", "ports": [{"port": 80, "protocol": "TCP"}]}]}}))
    .unwrap();
    let taken = |ranges: &[&str]| {
        let load_balancer_ips = ranges.iter().map(|range| range.parse().unwrap()).collect();
        let node = NodeView { load_balancer_ips, ..node() };
        let program = plan(&service, &slice(two()), &node);
        ["203.0.113.9", "8.8.8.8", "10.0.0.1"]
            .map(|address| verdict(&program, Map::External, at(address, 80)).is_some())
    };
    assert_eq!(taken(&[]), [true; 3], "as by kube-proxy");
    assert_eq!(taken(&["203.0.113.0/24"]), [true, false, false]);
    assert_eq!(taken(&["203.0.113.0/24", "10.0.0.0/24"]), [true, false, true]);
    assert_eq!(taken(&["2001:db8::/32"]), [false; 3], "another family");
}

#[test]
fn a_range_with_all_addresses_permits_all_sources() {
    let of = |ranges: &[&str]| {
        let ranges: Vec<String> = ranges.iter().map(|range| (*range).to_owned()).collect();
        let ranges: Vec<&String> = ranges.iter().collect();
        [true, false].map(|is_ipv4| sources(&ranges, is_ipv4).map(|of_family| of_family.len()))
    };
    assert_eq!(of(&[]), [None, None]);
    assert_eq!(of(&["0.0.0.0/0", "10.0.0.0/8"]), [None, None]);
    assert_eq!(of(&["0.0.0.0/0", "fd00::/8"]), [None, Some(1)]);
    assert_eq!(of(&[" 10.0.0.0/8 "]), [Some(1), Some(0)], "the other family is not permitted");
    assert_eq!(of(&["x"]), [Some(0), Some(0)]);
}

#[test]
fn this_node_serves_the_named_ports_of_its_load_balancers_at_its_addresses() {
    let spec = json!({"clusterIP": "10.43.1.1", "type": "LoadBalancer",
        "loadBalancerSourceRanges": ["203.0.113.0/24"],
        "ports": [{"port": 80, "protocol": "TCP"}, {"name": "b", "port": 443, "protocol": "TCP"}]});
    let with = |kind: &str, ip: &str, mode: &str| {
        let mut service = service(spec.clone());
        service.spec.as_mut().unwrap().type_ = Some(kind.to_owned());
        let entry = json!({"ip": ip, "ipMode": mode, "ports": [{"port": 80, "protocol": "TCP"}]});
        service.status = serde_json::from_value(json!({"loadBalancer": {"ingress": [entry]}})).unwrap();
        plan(&service, &slice(two()), &node())
    };
    let here = with("LoadBalancer", "198.51.100.1", "Proxy");
    for own in ["198.51.100.1", "10.0.0.1"] {
        assert_eq!(verdict(&here, Map::External, at(own, 80)).unwrap(), "external n/s/6-80/4", "{own}");
        assert_eq!(verdict(&here, Map::Guarded, at(own, 80)).unwrap(), "guard n/s/6-80/4");
        assert!(
            verdict(&here, Map::External, at(own, 443)).is_none(),
            "a port that the status does not name"
        );
    }
    for other in [
        with("LoadBalancer", "198.51.100.2", "Proxy"),
        with("NodePort", "198.51.100.1", "Proxy"),
        with("LoadBalancer", "10.43.0.10", "Proxy"),
    ] {
        assert!(verdict(&other, Map::External, at("198.51.100.1", 80)).is_none());
        assert!(verdict(&other, Map::External, at("198.51.100.2", 80)).is_none());
    }
}

#[test]
fn very_many_endpoints_have_a_chain_of_their_own() {
    let endpoints = |count: usize| {
        let address = |number: usize| format!("10.44.{}.{}", number / 250, number % 250);
        let all = (0..count).map(|number| json!({"addresses": [address(number)], "nodeName": "there"}));
        let all: Vec<Value> = all.collect();
        // A slice has at most 1,000 endpoints.
        let slices: Vec<_> = all.chunks(1000).flat_map(|some| slice(json!(some))).collect();
        plan(&service(json!({"clusterIP": "10.43.1.1"})), &slices, &node())
    };
    let of = |program: &Program| verdict(program, Map::Services, at("10.43.1.1", 80)).unwrap();
    assert_eq!(of(&endpoints(SHARED_MAX)), format!("one of {SHARED_MAX}"));
    let many = endpoints(SHARED_MAX + 1);
    assert_eq!((of(&many).as_str(), many.chains["cluster n/s/6-80/4"].len()), ("internal n/s/6-80/4", 1));
    let goto = Rule::default().goto("cluster n/s/6-80/4");
    let marked = masquerade_outside(true, &node()).unwrap();
    assert_eq!(many.chains["internal n/s/6-80/4"], [marked, goto], "clients outside are masqueraded");
}

#[test]
fn invalid_and_repeated_ports_and_addresses_have_no_elements() {
    let ports = json!([{"port": 80, "nodePort": -1}, {"port": 80, "nodePort": 70_000}, {"port": 0}, {"port": -1},
        {"port": 65_536}, {"port": 81, "protocol": "ICMP"}]);
    let mut service = service(json!({"clusterIP": "10.43.1.1", "type": "NodePort", "ports": ports}));
    let addresses = ["10.43.1.1", "10.43.1.1", "x", "None", ""].map(str::to_owned).to_vec();
    service.spec.as_mut().unwrap().cluster_ips = Some(addresses);
    let endpoints = json!([{"addresses": ["10.42.0.2"]}, {"addresses": ["10.42.0.2"]}, {"addresses": ["x"]}]);
    let program = plan(&service, &slice(endpoints), &node());
    assert_eq!(verdict(&program, Map::Services, at("10.43.1.1", 80)).unwrap(), "one of 1");
    let count = |map: Map| program.elements.keys().filter(|element_id| element_id.map == map).count();
    let maps = [Map::Services, Map::ClusterIps, Map::Rejected, Map::NodePorts, Map::RejectedPorts];
    assert_eq!(maps.map(count), [1, 1, 0, 0, 0]);
}

#[test]
fn odd_names_do_not_reach_the_kernel() {
    let mut service = service(json!({"clusterIP": "10.43.1.1", "sessionAffinity": "ClientIP"}));
    service.metadata.name = Some("a\"} ; flush\0".to_owned());
    let program = plan(&service, &slice(two()), &node());
    let chain = program.chains.keys().next().unwrap();
    assert!(chain.starts_with("cluster n/_") && chain.is_ascii() && chain.len() < 50, "{chain}");
}
