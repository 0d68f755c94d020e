//! Counts the evaluations of plugins in a search for a node. Source: `instrumented_plugins.go` of upstream.
//!
//! As upstream, a filter counts only if it applies to the pod: for example, NodePorts does not apply to a pod without
//! host ports. Equal pods share results. A shared result counts once, for the first of these pods.

use std::collections::BTreeMap;

use super::Prepared;
use crate::config::Profile;
use crate::memo::NodeOutcome;
use crate::metrics::Evaluation;
use crate::node_score::NodeScores;
use crate::object::Pod;
use crate::refusal::Refused;

/// The filters that depend on the pod and the node alone, in the order in which they run.
const OF_NODE: &[&str] =
    &["NodeUnschedulable", "NodeName", "TaintToleration", "NodeAffinity", "NodePorts", "NodeResourcesFit"];
/// The other filters, in the order in which they run.
const OF_OTHERS: &[&str] = &[
    "VolumeRestrictions",
    "NodeVolumeLimits",
    "VolumeBinding",
    "VolumeZone",
    "PodTopologySpread",
    "InterPodAffinity",
    "DynamicResources",
    "NodeDeclaredFeatures",
];
/// The filters without a pre-filter.
const WITHOUT_PRE_FILTER: &[&str] = &["NodeUnschedulable", "NodeName", "TaintToleration"];

/// Numbers of nodes in one search, by the computed filters.
#[derive(Debug, Default)]
pub(super) struct Computed {
    /// Nodes for which the filters of [`OF_NODE`] were computed.
    of_node: u64,
    /// Nodes that passed these filters and have the scores that depend on the node alone.
    scored: u64,
    /// Nodes for which the filters of [`OF_OTHERS`] were computed.
    of_others: u64,
    /// Refused nodes by filter.
    refused: BTreeMap<&'static str, u64>,
}

/// The evaluations of the pre-filters for a pod.
pub(super) fn pre_filters(pod: &Pod, profile: &Profile, prepared: &Prepared) -> Vec<Evaluation> {
    let all = OF_NODE.iter().chain(OF_OTHERS).filter(|plugin| !WITHOUT_PRE_FILTER.contains(plugin));
    all.filter(|plugin| applies(plugin, pod, profile, prepared)).map(|plugin| (*plugin, 1)).collect()
}

/// Whether a filter is enabled, and the pod has what the filter checks.
fn applies(plugin: &str, pod: &Pod, profile: &Profile, prepared: &Prepared) -> bool {
    let Prepared { topology, needs, claims, devices } = prepared;
    let applies = match plugin {
        "NodeAffinity" => {
            let affinity = pod.spec.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
            pod.spec.node_selector.is_some() || affinity.is_some() || profile.added_affinity.is_some()
        }
        "NodePorts" => !needs.ports.is_empty(),
        "VolumeRestrictions" | "NodeVolumeLimits" | "VolumeBinding" | "VolumeZone" => !claims.is_empty(),
        "PodTopologySpread" => !topology.skips_spread(),
        "InterPodAffinity" => !topology.skips_affinity(),
        "NodeDeclaredFeatures" => needs.restarts_all,
        "DynamicResources" => !devices.is_empty(),
        _ => true,
    };
    applies && profile.filters_by(plugin)
}

// === impl Computed ===

impl Computed {
    /// Counts a node for which the filters of [`OF_NODE`] were computed.
    pub(super) fn add_of_node(&mut self, outcome: &NodeOutcome) {
        self.of_node += 1;
        match outcome {
            Ok(_) => self.scored += 1,
            Err(refused) => self.add_refusal(refused),
        }
    }

    /// Counts a node for which the filters of [`OF_OTHERS`] were computed.
    pub(super) fn add_of_others(&mut self, refused: Option<&Refused>) {
        self.of_others += 1;
        if let Some(refused) = refused {
            self.add_refusal(refused);
        }
    }

    fn add_refusal(&mut self, refused: &Refused) {
        *self.refused.entry(refused.plugin).or_default() += 1;
    }

    /// The evaluations of the filters. Filters after the first refusal do not check the node.
    pub(super) fn filters(&self, pod: &Pod, profile: &Profile, prepared: &Prepared) -> Vec<Evaluation> {
        let mut found = Vec::new();
        for (plugins, mut nodes) in [(OF_NODE, self.of_node), (OF_OTHERS, self.of_others)] {
            for plugin in plugins {
                if nodes > 0 && applies(plugin, pod, profile, prepared) {
                    found.push((*plugin, nodes));
                }
                nodes = nodes.saturating_sub(self.refused.get(plugin).copied().unwrap_or_default());
            }
        }
        found
    }

    /// The evaluations of the scores. Scores that depend on other nodes are computed for the fitting nodes, which
    /// `scores` contains.
    pub(super) fn scores(
        &self,
        profile: &Profile,
        prepared: &Prepared,
        scores: &[NodeScores],
    ) -> Vec<Evaluation> {
        let (weights, topology, all) = (&profile.weights, &prepared.topology, scores.len() as u64);
        let when = |applies: bool| if applies { all } else { 0 };
        let plugins = [
            ("TaintToleration", weights.taints, self.scored),
            ("NodeAffinity", weights.node_affinity, self.scored),
            ("NodeResourcesFit", weights.fit, self.scored),
            ("PodTopologySpread", weights.spread, when(topology.prefers_spread())),
            ("InterPodAffinity", weights.pod_affinity, when(topology.prefers_domains())),
            ("NodeResourcesBalancedAllocation", weights.balanced, self.scored),
            ("ImageLocality", weights.images, all),
            ("DynamicResources", weights.devices, when(scores.iter().any(|node| node.devices != 0))),
        ];
        let counted = plugins.into_iter().filter(|(_, weight, nodes)| *weight > 0 && *nodes > 0);
        counted.map(|(plugin, _, nodes)| (plugin, nodes)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use serde_json::{Value, json};

    use super::*;
    use crate::config::FILTERS;
    use crate::decide::decide_measured;
    use crate::fixture;
    use crate::metrics::ExtensionPoint;
    use crate::snapshot::Snapshot;

    /// The evaluations of one extension point in a search.
    fn evaluations(spec: Value, snapshot: &mut Snapshot, wanted: ExtensionPoint) -> Vec<Evaluation> {
        let found = RefCell::new(Vec::new());
        let pod = fixture::pod("p", spec);
        let _ = decide_measured(&pod, &Profile::default(), snapshot, |point, _, _, evaluations| {
            if point == wanted {
                found.borrow_mut().extend_from_slice(evaluations);
            }
        });
        found.into_inner()
    }

    fn three_nodes() -> Snapshot {
        let cordoned = fixture::node("c", json!({"/spec/unschedulable": true}));
        fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({})), cordoned])
    }

    #[test]
    fn the_filters_have_the_order_of_the_configuration() {
        let mut all: Vec<&str> = OF_NODE.iter().chain(OF_OTHERS).copied().collect();
        // The filter of devices cannot be disabled. As upstream, it comes before the filter of declared features.
        assert_eq!(all.remove(FILTERS.len() - 1), "DynamicResources");
        assert_eq!(all, FILTERS);
    }

    #[test]
    fn a_filter_counts_for_the_nodes_that_the_filters_before_it_accept() {
        let mut snapshot = three_nodes();
        let plain = || json!({"containers": [{}]});
        let computed =
            [("NodeUnschedulable", 3), ("NodeName", 2), ("TaintToleration", 2), ("NodeResourcesFit", 2)];
        assert_eq!(evaluations(plain(), &mut snapshot, ExtensionPoint::Filter), computed);
        let shared = evaluations(plain(), &mut snapshot, ExtensionPoint::Filter);
        assert!(shared.is_empty(), "equal pods share the results: {shared:?}");
        snapshot.place(&fixture::pod("q", json!({"containers": [{}]})), "a");
        let again = evaluations(plain(), &mut snapshot, ExtensionPoint::Filter);
        assert!(again.iter().all(|(_, nodes)| *nodes == 1) && again.len() == 4, "{again:?}");
    }

    #[test]
    fn filters_that_do_not_apply_to_the_pod_do_not_count() {
        let spread = json!([{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule", "labelSelector": {"matchLabels": {"app": "web"}}}]);
        let ports = json!([{"ports": [{"containerPort": 80, "hostPort": 80}]}]);
        let spec = || {
            json!({"containers": ports.clone(), "nodeSelector": {"disk": "ssd"},
                "topologySpreadConstraints": spread.clone()})
        };
        let all = [("NodeAffinity", 1), ("NodePorts", 1), ("NodeResourcesFit", 1), ("PodTopologySpread", 1)];
        assert_eq!(evaluations(spec(), &mut three_nodes(), ExtensionPoint::PreFilter), all);
        let plain = json!({"containers": [{}]});
        let found = evaluations(plain, &mut three_nodes(), ExtensionPoint::PreFilter);
        assert_eq!(found, [("NodeResourcesFit", 1)]);
        // No node has the label. So NodeAffinity refuses all nodes, and the later filters do not run.
        let filters = evaluations(spec(), &mut three_nodes(), ExtensionPoint::Filter);
        assert_eq!(filters.last(), Some(&("NodeAffinity", 2)));
    }

    #[test]
    fn a_pre_filter_that_refuses_the_pod_counts() {
        let claim = json!({"name": "v", "persistentVolumeClaim": {"claimName": "absent"}});
        let spec = json!({"containers": [{}], "volumes": [claim]});
        let found = evaluations(spec, &mut three_nodes(), ExtensionPoint::PreFilter);
        assert_eq!(found, [("VolumeBinding", 1)]);
    }

    #[test]
    fn scores_count_for_the_fitting_nodes() {
        let plain = json!({"containers": [{}]});
        let found = evaluations(plain, &mut three_nodes(), ExtensionPoint::Score);
        let plugins = [
            "TaintToleration",
            "NodeAffinity",
            "NodeResourcesFit",
            "NodeResourcesBalancedAllocation",
            "ImageLocality",
        ];
        assert_eq!(found, plugins.map(|plugin| (plugin, 2)));
    }
}
