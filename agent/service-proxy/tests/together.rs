//! Services, endpoints and policies change at random, and other programs flush the tables. Random packets come from
//! pods, from the node and from outside. An independent model predicts their delivery.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test panics")]

#[path = "property/conntrack.rs"]
mod conntrack;
#[path = "together/hosts.rs"]
mod hosts;
#[path = "together/world.rs"]
mod world;

use std::sync::Arc;

use coracle_network_policy::{Enforcer, Model, PodFacts};
use coracle_service_proxy::{NodeView, Proxy, State};
use coracle_services::ServiceState;
use coracle_testing::{in_new_namespace, run};
use coracle_values::object::Key;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use serde_json::{Value, json};

use hosts::{Network, Sending};
use world::{
    Changed, Delivery, NAMESPACES, PODS, PORTS, Peer, Policy, Readiness, ServiceSpec, World, cluster_ip,
    external_ip, is_local, namespace_of, node_port, pod_address,
};

const SERVICES_TABLE: &str = "test-services";
const POLICIES_TABLE: &str = "test-policies";

fn node() -> NodeView {
    NodeView {
        name: "here".to_owned(),
        pod_networks: vec!["10.42.0.0/24".parse().unwrap(), "fd42::/64".parse().unwrap()],
        service_ranges: vec!["10.43.0.0/16".parse().unwrap(), "fd43::/112".parse().unwrap()],
        external_ips: vec!["198.51.100.0/24".parse().unwrap()],
        ..NodeView::default()
    }
}

fn node_name(pod: u8) -> &'static str {
    if is_local(pod) { "here" } else { "there" }
}

fn traffic_policy(is_local: bool) -> &'static str {
    if is_local { "Local" } else { "Cluster" }
}

fn service_key(number: u8) -> Key {
    Key::new("n", &format!("s{number}"))
}

/// The objects of a service.
fn state(world: &World, number: u8) -> State {
    let (key, spec) = (service_key(number), world.services.get(&number));
    let state = spec.map(|spec| {
        let families: &[bool] = if spec.is_dual_stack { &[true, false] } else { &[true] };
        let slices = families
            .iter()
            .map(|is_ipv4| Arc::new(serde_json::from_value(slice(&key, spec, *is_ipv4)).unwrap()));
        let service = serde_json::from_value(service(number, spec, families)).unwrap();
        ServiceState { service: Arc::new(service), slices: slices.collect() }
    });
    (key, state)
}

fn protocol(spec: &ServiceSpec) -> &'static str {
    if spec.is_udp { "UDP" } else { "TCP" }
}

fn service(number: u8, spec: &ServiceSpec, families: &[bool]) -> Value {
    let ips: Vec<String> = families.iter().map(|is_ipv4| cluster_ip(number, *is_ipv4).to_string()).collect();
    let ports = PORTS.iter().enumerate().map(|(index, (port, _))| {
        let mut value = json!({"name": format!("p{port}"), "port": port, "protocol": protocol(spec)});
        if spec.has_node_ports {
            value["nodePort"] = node_port(number, index).into();
        }
        value
    });
    let external = [external_ip(number).to_string()];
    json!({"metadata": {"namespace": "n", "name": service_key(number).name}, "spec": {
        "type": if spec.has_node_ports { "NodePort" } else { "ClusterIP" },
        "clusterIP": ips[0], "clusterIPs": ips, "ports": ports.collect::<Vec<_>>(),
        "externalIPs": if spec.has_external_ip { &external[..] } else { &[] },
        "internalTrafficPolicy": traffic_policy(spec.is_internal_local),
        "externalTrafficPolicy": traffic_policy(spec.is_external_local)}})
}

fn slice(key: &Key, spec: &ServiceSpec, is_ipv4: bool) -> Value {
    let endpoints = spec.endpoints.iter().map(|(pod, readiness)| {
        let conditions = match readiness {
            Readiness::Ready => json!({"ready": true}),
            Readiness::NotReady => json!({"ready": false, "serving": false}),
            Readiness::Terminating => json!({"ready": false, "serving": true, "terminating": true}),
        };
        json!({"addresses": [pod_address(*pod, is_ipv4)], "nodeName": node_name(*pod), "conditions": conditions})
    });
    let ports = PORTS.iter().map(
        |(port, target)| json!({"name": format!("p{port}"), "port": target, "protocol": protocol(spec)}),
    );
    let family = if is_ipv4 { "IPv4" } else { "IPv6" };
    let labels = json!({"kubernetes.io/service-name": key.name});
    json!({"metadata": {"namespace": "n", "name": format!("{}-{family}", key.name), "labels": labels},
        "addressType": family, "endpoints": endpoints.collect::<Vec<_>>(), "ports": ports.collect::<Vec<_>>()})
}

/// The facts of a pod. Pods of other nodes are needed as peers of policy rules.
fn facts(world: &World, pod: u8) -> PodFacts {
    let ips = [true, false].map(|is_ipv4| json!({"ip": pod_address(pod, is_ipv4)}));
    let value = json!({"metadata": {"uid": format!("u{pod}"), "namespace": NAMESPACES[namespace_of(pod)],
        "labels": {"app": world.app(pod)}}, "spec": {"nodeName": node_name(pod), "containers": []},
        "status": {"podIPs": ips}});
    PodFacts::of(&serde_json::from_value(value).unwrap(), "here").unwrap()
}

fn labels(app: Option<&str>) -> Value {
    app.map_or_else(|| json!({}), |app| json!({"matchLabels": {"app": app}}))
}

fn policy_key(number: u8) -> Key {
    Key::new(NAMESPACES[usize::from(number) % NAMESPACES.len()], &format!("p{number}"))
}

fn policy(number: u8, policy: &Policy) -> NetworkPolicy {
    let (direction, peers) = if policy.is_egress { ("Egress", "to") } else { ("Ingress", "from") };
    let rules = policy.allowed.iter().map(|allowed| {
        let mut rule = json!({});
        match &allowed.peer {
            Peer::Everyone => {}
            Peer::Pods { namespace: None, app } => rule[peers] = json!([{"podSelector": labels(*app)}]),
            Peer::Pods { namespace: Some(of), app } => {
                let namespaces = json!({"matchLabels": {"name": NAMESPACES[*of]}});
                rule[peers] = json!([{"namespaceSelector": namespaces, "podSelector": labels(*app)}]);
            }
            Peer::Block { range, except } => {
                let except: Vec<String> = except.iter().map(ToString::to_string).collect();
                rule[peers] = json!([{"ipBlock": {"cidr": range.to_string(), "except": except}}]);
            }
        }
        if let Some((protocol, port)) = allowed.port {
            rule["ports"] = json!([{"protocol": protocol, "port": port}]);
        }
        rule
    });
    let key = policy_key(number);
    let mut value = json!({"metadata": {"namespace": key.namespace, "name": key.name},
        "spec": {"podSelector": labels(policy.app), "policyTypes": [direction]}});
    value["spec"][direction.to_lowercase()] = rules.collect();
    serde_json::from_value(value).unwrap()
}

/// Number of changes. Set by `CORACLE_PROPERTY_CHANGES`; the default is 400.
fn changes() -> usize {
    std::env::var("CORACLE_PROPERTY_CHANGES").ok().and_then(|text| text.parse().ok()).unwrap_or(400)
}

/// The parts under test, in the namespace of the node.
struct Node {
    proxy: Proxy,
    model: Model,
    enforcer: Enforcer,
}

// === impl Node ===

impl Node {
    fn start(world: &World) -> Self {
        let mut model = Model::default();
        for name in NAMESPACES {
            model.put_namespace(name, [("name".to_owned(), name.to_owned())].into());
        }
        (1..=PODS).for_each(|pod| model.put_pod(facts(world, pod)));
        let mut node = Self {
            proxy: Proxy::open(SERVICES_TABLE, node()).unwrap(),
            model,
            enforcer: Enforcer::open(POLICIES_TABLE).unwrap(),
        };
        node.repair(world);
        node
    }

    /// Writes both tables anew.
    fn repair(&mut self, world: &World) {
        let states: Vec<State> = world.services.keys().map(|number| state(world, *number)).collect();
        self.proxy.replace(node(), states).unwrap();
        self.enforcer.replace(&mut self.model).unwrap();
    }

    fn apply(&mut self, world: &World, changed: Changed) {
        match changed {
            Changed::Service(number) => self.proxy.change([state(world, number)]).unwrap(),
            Changed::Policy(number) => match world.policies.get(&number) {
                Some(of) => self.model.put_policy(&policy(number, of)),
                None => self.model.remove_policy(&policy_key(number)),
            },
            Changed::Pod(pod) => self.model.put_pod(facts(world, pod)),
        }
        match self.enforcer.must_replace(&self.model) {
            true => self.enforcer.replace(&mut self.model).unwrap(),
            false => drop(self.enforcer.change(&mut self.model).unwrap()),
        }
    }
}

#[test]
fn packets_go_where_services_and_policies_send_them_together() {
    const CHECK_EVERY: usize = 20;
    const FLUSH_EVERY: usize = 70;
    const PACKETS: usize = 20;
    in_new_namespace(|| {
        let network = Network::start();
        let (mut random, mut world) = (SmallRng::seed_from_u64(15), World::new());
        let mut node = Node::start(&world);
        if !conntrack::are_entries_visible() {
            coracle_testing::skip_part!("packets: the kernel has no CONFIG_NF_CONNTRACK_PROCFS");
            return;
        }
        // Each packet has another source port, so that it belongs to no earlier connection.
        let mut from_ports = (20_000..60_000).cycle();
        for step in 1..=changes() {
            let changed = world.change(&mut random);
            node.apply(&world, changed);
            if step % FLUSH_EVERY == 0 {
                run("nft", &["flush", "ruleset"]);
                assert!(!node.proxy.is_intact().unwrap() && !node.enforcer.is_intact().unwrap());
                node.repair(&world);
            }
            if step % CHECK_EVERY != 0 {
                continue;
            }
            let any_packet = |from_port| {
                let packet = world.packet(&mut random);
                let may_be_dropped = world.permitted(&packet).contains(&Delivery::Dropped);
                Sending { packet, from_port, may_be_dropped }
            };
            let packets: Vec<Sending> = from_ports.by_ref().take(PACKETS).map(any_packet).collect();
            for (Sending { packet, .. }, delivery) in packets.iter().zip(network.send(&packets)) {
                let permitted = world.permitted(packet);
                assert!(
                    permitted.contains(&delivery),
                    "after {step} changes: {packet:?}: {delivery:?} instead of {permitted:?} in {world:#?}"
                );
            }
        }
    });
}
