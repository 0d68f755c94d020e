//! Topology hints of services with the annotation `service.kubernetes.io/topology-mode: Auto`: every zone gets
//! endpoints in proportion to its processors. The module does no I/O. Source: `topologycache` of k8s.io/endpointslice.
//! The module also determines the zones of nodes.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use coracle_values::CollectMap;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointHints, ForZone};

use super::pack::Group;
use crate::object::{EndpointSlice, Key, Node, ObjectExt, Service, controller_of};
use crate::state::zones::ZoneNode;

/// Label of a node with its zone.
const ZONE: &str = "topology.kubernetes.io/zone";
/// Annotation of a service.
const MODE: &str = "service.kubernetes.io/topology-mode";
/// The former name of the annotation. It takes precedence over [`MODE`].
const FORMER_MODE: &str = "service.kubernetes.io/topology-aware-hints";
/// Labels of nodes that do not count: they usually run no endpoints and no clients.
const EXCLUDED: [&str; 2] = ["node-role.kubernetes.io/control-plane", "node-role.kubernetes.io/master"];
/// Maximum load of a zone's endpoints. 1 is the load of an even distribution.
const OVERLOAD: f64 = 1.2;

/// The share of each zone in the processors of the cluster's nodes.
#[derive(Debug, PartialEq)]
pub(crate) struct Zones(BTreeMap<String, f64>);

/// Whether the controller sets hints in proportion to processors.
pub(crate) fn is_automatic(service: &Service) -> bool {
    let annotations = service.metadata.annotations.as_ref();
    let mode = annotations.and_then(|all| all.get(FORMER_MODE).or_else(|| all.get(MODE)));
    mode.is_some_and(|mode| matches!(mode.as_str(), "Auto" | "auto"))
}

/// The zone and the processors of a node. `None` for a node that is not ready or belongs to the control plane.
pub(crate) fn zone_node(node: &Arc<Node>) -> Option<ZoneNode> {
    let labels = node.metadata.labels.as_ref();
    let is_excluded = EXCLUDED.iter().any(|label| labels.is_some_and(|labels| labels.contains_key(*label)));
    let is_ready = node.condition("Ready").is_some_and(|ready| ready.status == "True");
    let zone = labels.and_then(|labels| labels.get(ZONE)).filter(|zone| !zone.is_empty());
    (is_ready && !is_excluded).then(|| ZoneNode { zone: zone.cloned(), processors: node.status.processors })
}

/// The zone of a node.
pub(crate) fn zone(node: &Node) -> Option<&String> {
    node.metadata.labels.as_ref()?.get(ZONE)
}

/// The zone of each node, by the name of the node.
pub(crate) fn zones_by_node(nodes: &[Arc<Node>]) -> HashMap<&str, Option<&String>> {
    nodes.iter().map(|node| (node.name(), zone(node))).collect()
}

/// The service of a slice, if the slice has an outdated endpoint. Such an endpoint is on one of these nodes, but does
/// not have the node's zone. Upstream corrects these endpoints at the next change of the service.
pub(crate) fn outdated(slice: &EndpointSlice, zones: &HashMap<&str, Option<&String>>) -> Option<Key> {
    let is_outdated = slice.endpoints.iter().any(|endpoint| {
        let zone = endpoint.node_name.as_deref().and_then(|node| zones.get(node));
        zone.is_some_and(|zone| endpoint.zone.as_ref() != *zone)
    });
    let owner = controller_of(&slice.metadata).filter(|owner| is_outdated && owner.kind == "Service")?;
    Some(Key::new(slice.namespace(), &owner.name))
}

/// Sets the hints of the ready endpoints, and removes the hints of the other endpoints. Without `zones` all hints are
/// removed.
pub(crate) fn set_hints(groups: &mut [Group], zones: Option<&Zones>) {
    for address_type in ["IPv4", "IPv6"] {
        let of_type = groups.iter_mut().filter(|group| group.slice_key.address_type == address_type);
        let mut ready = Vec::new();
        for endpoint in of_type.flat_map(|group| &mut group.endpoints) {
            endpoint.hints = None;
            let conditions = endpoint.conditions.as_ref();
            if conditions.and_then(|conditions| conditions.ready) == Some(true) {
                ready.push(endpoint);
            }
        }
        // The endpoints are sorted, so that the hints do not depend on the order in which the pods are listed.
        ready.sort_by(|one, other| one.addresses.cmp(&other.addresses));
        let own: Vec<Option<&str>> = ready.iter().map(|endpoint| endpoint.zone.as_deref()).collect();
        let Some(assigned) = zones.and_then(|zones| zones.assign(&own)) else { continue };
        ready.into_iter().zip(assigned).for_each(|(endpoint, zone)| hint(endpoint, zone));
    }
}

fn hint(endpoint: &mut Endpoint, zone: String) {
    endpoint.hints =
        Some(EndpointHints { for_zones: Some(vec![ForZone { name: zone }]), ..EndpointHints::default() });
}

// === impl Zones ===

impl Zones {
    /// The shares of zones with these processors. `None` if there are fewer than two zones.
    pub(crate) fn of(processors: &BTreeMap<String, i128>) -> Option<Self> {
        let all: f64 = processors.values().map(|own| *own as f64).sum();
        let shares = processors.iter().map(|(zone, own)| (zone.clone(), *own as f64 / all));
        Some(Self(shares.collect_map())).filter(|zones| zones.0.len() >= 2)
    }

    /// The zone that each endpoint serves. `endpoints` has the zones of the endpoints. `None` if an endpoint has no
    /// zone, or if there are too few endpoints to avoid an overloaded zone.
    fn assign(&self, endpoints: &[Option<&str>]) -> Option<Vec<String>> {
        let own = endpoints.iter().map(|zone| zone.filter(|zone| !zone.is_empty()).map(str::to_owned));
        let mut assigned: Vec<String> = own.collect::<Option<_>>()?;
        let Transfers { mut giving, mut receiving } = transfers(self.desired(assigned.len())?, &assigned);
        for zone in &mut assigned {
            let Some(left) = giving.get_mut(zone.as_str()).filter(|left| **left > 0) else { continue };
            let Some((receiver, wanted)) = receiving.iter_mut().find(|(_, wanted)| **wanted > 0) else {
                break;
            };
            (*left, *wanted) = (*left - 1, *wanted - 1);
            zone.clone_from(receiver);
        }
        Some(assigned)
    }

    /// The number of endpoints that each zone should have.
    fn desired(&self, endpoints: usize) -> Option<BTreeMap<String, f64>> {
        let count = endpoints as f64;
        let least = |share: &f64| (share * count * (1.0 / OVERLOAD)).ceil();
        let sum: f64 = self.0.values().map(least).sum();
        let desired = self.0.iter().map(|(zone, share)| (zone.clone(), (share * count).max(least(share))));
        (self.0.len() <= endpoints && sum <= count).then(|| desired.collect_map())
    }
}

/// Numbers of endpoints that change their zone.
struct Transfers {
    /// The number of endpoints that each zone must give.
    giving: BTreeMap<String, usize>,
    /// The number of endpoints that each zone must get.
    receiving: BTreeMap<String, usize>,
}

fn transfers(desired: BTreeMap<String, f64>, assigned: &[String]) -> Transfers {
    let (mut surplus, mut lack) = (BTreeMap::new(), BTreeMap::new());
    for (zone, target) in desired {
        let count = assigned.iter().filter(|own| **own == zone).count() as f64;
        if count > target {
            surplus.insert(zone, count - target);
        } else if count < target {
            lack.insert(zone, target - count);
        }
    }
    let (mut giving, mut receiving) = (BTreeMap::new(), BTreeMap::new());
    while let (Some((giver, gives)), Some((receiver, gets))) = (most(&mut surplus), most(&mut lack)) {
        if (*gives < 1.0 && *gets < 1.0) || *gives < 0.5 || *gets < 0.5 {
            break;
        }
        (*gives, *gets) = (*gives - 1.0, *gets - 1.0);
        *giving.entry(giver.clone()).or_default() += 1;
        *receiving.entry(receiver.clone()).or_default() += 1;
    }
    Transfers { giving, receiving }
}

/// The zone with the largest number.
fn most(zones: &mut BTreeMap<String, f64>) -> Option<(&String, &mut f64)> {
    zones.iter_mut().max_by(|(_, one), (_, other)| one.total_cmp(other))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::endpoint_slice::pack::SliceKey;
    use crate::state::zones::ZoneIndex;

    fn node(zone: &str, processors: &str, ready: &str, role: &str) -> Arc<Node> {
        let labels = json!({"topology.kubernetes.io/zone": zone, role: ""});
        let node = json!({"metadata": {"name": "n", "labels": labels}, "status": {
            "allocatable": {"cpu": processors, "memory": "1Gi"},
            "conditions": [{"type": "Ready", "status": ready}]}});
        Arc::new(serde_json::from_value(node).unwrap())
    }

    fn zones(nodes: &[(&str, &str)]) -> Option<Zones> {
        let nodes: Vec<_> = nodes.iter().map(|(zone, cpu)| node(zone, cpu, "True", "x")).collect();
        of_nodes(&nodes)
    }

    fn of_nodes(nodes: &[Arc<Node>]) -> Option<Zones> {
        let index = ZoneIndex::default();
        for node in nodes {
            index.follow_node(None, zone_node(node).as_ref());
        }
        Zones::of(&index.processors()?)
    }

    /// The zone that each endpoint serves, in a cluster of zones `a` and `b` with these processors.
    fn served(a: &str, b: &str, endpoints: &[&str]) -> Option<String> {
        let zones = zones(&[("a", a), ("b", b)]).unwrap();
        let own: Vec<_> = endpoints.iter().map(|zone| Some(*zone)).collect();
        zones.assign(&own).map(|all| all.concat())
    }

    #[test]
    fn nodes_without_zone_or_processors_prevent_hints() {
        assert!(zones(&[("a", "2"), ("b", "500m")]).is_some());
        for insufficient in
            [&[("a", "2"), ("", "2"), ("b", "2")][..], &[("a", "2"), ("b", "0")], &[("a", "2")]]
        {
            assert_eq!(zones(insufficient), None, "{insufficient:?}");
        }
        let two = || [node("a", "2", "True", "x"), node("b", "2", "True", "x")];
        let with = |other| of_nodes(&[&two()[..], &[other]].concat());
        let (control, unready) =
            (node("", "2", "True", "node-role.kubernetes.io/control-plane"), node("", "2", "False", "x"));
        assert_eq!(with(control), of_nodes(&two()));
        assert_eq!(with(unready), of_nodes(&two()));
    }

    #[test]
    fn zones_get_endpoints_in_proportion_to_their_processors() {
        assert_eq!(served("2", "2", &["a", "b"]).as_deref(), Some("ab"), "each stays in its zone");
        assert_eq!(
            served("2", "2", &["a", "a", "a", "b"]).as_deref(),
            Some("baab"),
            "one endpoint serves the other zone"
        );
        assert_eq!(served("3", "1", &["a", "a", "b", "b"]).as_deref(), Some("aaab"));
        assert_eq!(served("2", "2", &["a"]), None, "fewer endpoints than zones");
        assert_eq!(served("2", "2", &["a", "a", "b"]), None, "one zone would have too few");
        assert_eq!(served("2", "2", &["a", ""]), None, "an endpoint has no zone");
    }

    #[test]
    fn only_ready_endpoints_have_hints_of_one_zone() {
        let endpoint = |ip: &str, zone: &str, ready: bool| -> Endpoint {
            let hints = json!({"forZones": [{"name": "old"}]});
            let conditions = json!({"ready": ready});
            let endpoint = json!({"addresses": [ip], "zone": zone, "hints": hints, "conditions": conditions});
            serde_json::from_value(endpoint).unwrap()
        };
        let endpoints = vec![
            endpoint("10.0.0.2", "b", true),
            endpoint("10.0.0.1", "a", true),
            endpoint("10.0.0.3", "a", false),
        ];
        let slice_key = SliceKey { address_type: "IPv4", ports: Vec::new() };
        let mut groups = [Group { slice_key, endpoints }];
        let shown = |groups: &[Group]| {
            let zone = |endpoint: &Endpoint| {
                let zones = endpoint.hints.as_ref()?.for_zones.as_ref()?;
                Some(zones.iter().map(|zone| zone.name.as_str()).collect::<Vec<_>>().join(","))
            };
            groups[0].endpoints.iter().map(zone).collect::<Vec<_>>()
        };
        set_hints(&mut groups, zones(&[("a", "2"), ("b", "2")]).as_ref());
        assert_eq!(shown(&groups), [Some("b".to_owned()), Some("a".to_owned()), None]);
        set_hints(&mut groups, None);
        assert_eq!(shown(&groups), [None, None, None]);
    }

    #[test]
    fn the_former_annotation_has_precedence() {
        let of = |annotations| {
            let service = json!({"metadata": {"annotations": annotations}});
            is_automatic(&serde_json::from_value(service).unwrap())
        };
        assert!(of(json!({"service.kubernetes.io/topology-mode": "Auto"})));
        assert!(of(json!({"service.kubernetes.io/topology-aware-hints": "auto"})));
        assert!(!of(json!({"service.kubernetes.io/topology-mode": "Auto",
            "service.kubernetes.io/topology-aware-hints": "disabled"})));
        assert!(!of(json!({})));
    }
}
