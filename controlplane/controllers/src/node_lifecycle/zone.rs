//! The health of zones, and the rate of NoExecute taints in each zone. No I/O.

use std::collections::BTreeMap;
use std::time::Duration;

use coracle_values::CollectMap;

use crate::config::ControllersConfig;
use crate::object::Node;

/// The health of a zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Most nodes are ready.
    Normal,
    /// The share of nodes that are not ready is high, so their failures probably have a common cause.
    Partial,
    /// No node is ready.
    Full,
}

/// One zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Zone {
    pub(crate) state: State,
    /// Number of nodes without the exclusion label.
    pub(crate) nodes: usize,
    /// Number of these nodes that are not ready.
    pub(crate) unready: usize,
}

/// Label of nodes that are not counted for the health of their zone.
const EXCLUDED: &str = "node.kubernetes.io/exclude-disruption";

fn label<'a>(node: &'a Node, name: &str) -> Option<&'a str> {
    node.metadata.labels.as_ref()?.get(name).map(String::as_str)
}

/// Region and zone of a node according to its labels. As upstream, the deprecated labels take precedence.
pub(crate) fn name(node: &Node) -> String {
    let of = |what: &str| {
        let beta = label(node, &format!("failure-domain.beta.kubernetes.io/{what}"));
        beta.or_else(|| label(node, &format!("topology.kubernetes.io/{what}"))).unwrap_or_default()
    };
    format!("{}/{}", of("region"), of("zone"))
}

/// The zones of all nodes.
pub(crate) fn all<'a>(
    nodes: impl IntoIterator<Item = &'a Node>,
    config: &ControllersConfig,
) -> BTreeMap<String, Zone> {
    let mut counts: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for node in nodes {
        let (ready, unready) = counts.entry(name(node)).or_default();
        if label(node, EXCLUDED).is_some() {
            continue;
        }
        let is_ready = node.condition("Ready").is_some_and(|found| found.status == "True");
        *(if is_ready { ready } else { unready }) += 1;
    }
    let state = |ready: usize, unready: usize| match (ready, unready) {
        (0, 1..) => State::Full,
        // At least three nodes must be not ready: two may fail at the same time by chance.
        (ready, 3..) if unready * 100 >= (ready + unready) * config.unhealthy_percent => State::Partial,
        _ => State::Normal,
    };
    counts
        .into_iter()
        .map(|(name, (ready, unready))| {
            (name, Zone { state: state(ready, unready), nodes: ready + unready, unready })
        })
        .collect_map()
}

/// Whether no node of the cluster is ready. The control plane is then probably disconnected from the nodes.
pub(crate) fn is_full_disruption(zones: &BTreeMap<String, Zone>) -> bool {
    let mut counted = zones.values().filter(|zone| zone.nodes > 0).peekable();
    counted.peek().is_some() && counted.all(|zone| zone.state == State::Full)
}

/// The interval between NoExecute taints in a zone. `None` if no node may be tainted.
pub(crate) fn interval(zone: Zone, config: &ControllersConfig) -> Option<Duration> {
    match zone.state {
        State::Normal | State::Full => Some(config.eviction_interval),
        // A small zone keeps its pods until it recovers.
        State::Partial if zone.nodes > config.large_zone => Some(config.eviction_interval * 10),
        State::Partial => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn nodes(zone: &str, ready: usize, unready: usize) -> Vec<Node> {
        labelled(&json!({"topology.kubernetes.io/zone": zone}), ready, unready)
    }

    fn labelled(labels: &Value, ready: usize, unready: usize) -> Vec<Node> {
        let node = |status: &str| {
            serde_json::from_value(json!({
                "metadata": {"labels": labels},
                "status": {"conditions": [{"type": "Ready", "status": status}]},
            }))
            .unwrap()
        };
        (0..ready).map(|_| node("True")).chain((0..unready).map(|_| node("Unknown"))).collect()
    }

    #[test]
    fn the_health_of_a_zone_follows_its_nodes() {
        let config = ControllersConfig::default();
        for (ready, unready, state) in [
            (1, 0, State::Normal),
            (1, 2, State::Normal),
            (0, 1, State::Full),
            (2, 3, State::Partial),
            (6, 3, State::Normal),
            (0, 9, State::Full),
            // Lost nodes: 55 %, then a little less.
            (9, 11, State::Partial),
            (46, 54, State::Normal),
        ] {
            let found = all(&nodes("a", ready, unready), &config);
            assert_eq!(
                found["/a"],
                Zone { state, nodes: ready + unready, unready },
                "{ready} ready, {unready} unready"
            );
        }
    }

    #[test]
    fn the_control_plane_is_cut_off_only_if_all_zones_are_lost() {
        let config = ControllersConfig::default();
        let two = |ready| nodes("a", 0, 2).into_iter().chain(nodes("b", ready, 1)).collect::<Vec<_>>();
        assert!(is_full_disruption(&all(&two(0), &config)));
        assert!(!is_full_disruption(&all(&two(1), &config)));
        assert!(!is_full_disruption(&all(&[], &config)));
    }

    #[test]
    fn excluded_nodes_do_not_change_the_health_of_a_zone() {
        let config = ControllersConfig::default();
        let mark = json!({"topology.kubernetes.io/zone": "a", EXCLUDED: ""});
        let with =
            |ready, unready| all(nodes("a", 0, 1).iter().chain(&labelled(&mark, ready, unready)), &config);
        assert_eq!(with(5, 0)["/a"], Zone { state: State::Full, nodes: 1, unready: 1 });
        assert!(is_full_disruption(&with(5, 0)));
        let alone = all(&labelled(&mark, 0, 3), &config);
        assert_eq!(alone["/a"], Zone { state: State::Normal, nodes: 0, unready: 0 });
        assert!(!is_full_disruption(&alone));
    }

    #[test]
    fn a_zone_may_come_from_deprecated_labels() {
        let old = json!({"failure-domain.beta.kubernetes.io/zone": "b", "topology.kubernetes.io/zone": "a",
            "failure-domain.beta.kubernetes.io/region": "r"});
        assert_eq!(name(&labelled(&old, 1, 0)[0]), "r/b");
        assert_eq!(name(&labelled(&json!({}), 1, 0)[0]), "/");
    }

    #[test]
    fn nodes_of_a_partly_lost_zone_are_tainted_slowly_or_not_at_all() {
        let config = ControllersConfig::default();
        let of =
            |state, nodes| interval(Zone { state, nodes, unready: 0 }, &config).map(|wait| wait.as_secs());
        assert_eq!(of(State::Normal, 3), Some(10));
        assert_eq!(of(State::Full, 3), Some(10));
        assert_eq!(of(State::Partial, 50), None);
        assert_eq!(of(State::Partial, 51), Some(100));
    }
}
