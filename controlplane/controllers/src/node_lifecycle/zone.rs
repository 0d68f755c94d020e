//! How a zone fares, and how fast its nodes may be given up. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::config::ControllersConfig;
use crate::object::Node;

/// How many of a zone's nodes are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Most of them are ready.
    Normal,
    /// More of them are lost than single failures explain.
    Partial,
    /// None is ready.
    Full,
}

/// One zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Zone {
    pub(crate) state: State,
    pub(crate) nodes: usize,
}

/// Region and zone of a node, by its labels.
pub(crate) fn name(node: &Node) -> String {
    let label = |name: &str| {
        let labels = node.metadata.labels.as_ref();
        labels.and_then(|labels| labels.get(name)).map(String::as_str).unwrap_or_default()
    };
    format!("{}/{}", label("topology.kubernetes.io/region"), label("topology.kubernetes.io/zone"))
}

/// The zones of all nodes.
pub(crate) fn all<'a>(
    nodes: impl IntoIterator<Item = &'a Node>,
    config: &ControllersConfig,
) -> BTreeMap<String, Zone> {
    let mut counts: BTreeMap<String, (usize, usize)> = BTreeMap::new();
    for node in nodes {
        let (ready, lost) = counts.entry(name(node)).or_default();
        *(if node.condition("Ready").is_some_and(|found| found.status == "True") { ready } else { lost }) +=
            1;
    }
    let state = |ready: usize, lost: usize| match (ready, lost) {
        (0, 1..) => State::Full,
        // Two that fail at once may be chance.
        (ready, 3..) if lost * 100 >= (ready + lost) * config.unhealthy_percent => State::Partial,
        _ => State::Normal,
    };
    counts
        .into_iter()
        .map(|(name, (ready, lost))| (name, Zone { state: state(ready, lost), nodes: ready + lost }))
        .collect()
}

/// Whether no node at all is ready: then it is not the nodes that failed.
pub(crate) fn is_full_disruption(zones: &BTreeMap<String, Zone>) -> bool {
    !zones.is_empty() && zones.values().all(|zone| zone.state == State::Full)
}

/// The time between two nodes of a zone that are given up; nothing while none may be.
pub(crate) fn interval(zone: Zone, config: &ControllersConfig) -> Option<Duration> {
    match zone.state {
        State::Normal | State::Full => Some(config.eviction_interval),
        // A small zone keeps its pods where they are until it recovers.
        State::Partial if zone.nodes > config.large_zone => Some(config.eviction_interval * 10),
        State::Partial => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn nodes(zone: &str, ready: usize, lost: usize) -> Vec<Node> {
        let node = |status: &str| {
            serde_json::from_value(json!({
                "metadata": {"labels": {"topology.kubernetes.io/zone": zone}},
                "status": {"conditions": [{"type": "Ready", "status": status}]},
            }))
            .unwrap()
        };
        (0..ready).map(|_| node("True")).chain((0..lost).map(|_| node("Unknown"))).collect()
    }

    #[test]
    fn zones_fare_as_their_nodes_do() {
        let config = ControllersConfig::default();
        for (ready, lost, state) in [
            (1, 0, State::Normal),
            (1, 2, State::Normal),
            (0, 1, State::Full),
            (2, 3, State::Partial),
            (6, 3, State::Normal),
            (0, 9, State::Full),
        ] {
            let found = all(&nodes("a", ready, lost), &config);
            assert_eq!(found["/a"], Zone { state, nodes: ready + lost }, "{ready} ready, {lost} lost");
        }
    }

    #[test]
    fn only_when_all_zones_are_gone_is_it_us() {
        let config = ControllersConfig::default();
        let two = |ready| nodes("a", 0, 2).into_iter().chain(nodes("b", ready, 1)).collect::<Vec<_>>();
        assert!(is_full_disruption(&all(&two(0), &config)));
        assert!(!is_full_disruption(&all(&two(1), &config)));
        assert!(!is_full_disruption(&all(&[], &config)));
    }

    #[test]
    fn a_partly_lost_zone_is_given_up_slowly_or_not_at_all() {
        let config = ControllersConfig::default();
        let of = |state, nodes| interval(Zone { state, nodes }, &config).map(|wait| wait.as_secs());
        assert_eq!(of(State::Normal, 3), Some(10));
        assert_eq!(of(State::Full, 3), Some(10));
        assert_eq!(of(State::Partial, 50), None);
        assert_eq!(of(State::Partial, 51), Some(100));
    }
}
