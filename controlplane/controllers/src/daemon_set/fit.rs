//! Whether a node must run the pod of a daemon set, and the pod for it.

use std::collections::BTreeMap;

use coracle_values::label_selector::has_all;
use coracle_values::node_selector::term_matches;
use coracle_values::toleration::{forbids_scheduling, is_tolerated};
use k8s_openapi::api::core::v1::{Affinity, Toleration};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::object::{DaemonSet, Node, ObjectExt};
use crate::pod_control;
use crate::revision_history::POD_REVISION;
use crate::template::Template;

/// The fields of a pod template that determine the nodes of the pods.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(crate) struct NodeRequirements {
    node_name: Option<String>,
    node_selector: Option<BTreeMap<String, String>>,
    affinity: Option<Affinity>,
    tolerations: Vec<Toleration>,
    host_network: Option<bool>,
}

/// Whether a node must have the pod, and whether the node may keep an existing pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Eligibility {
    pub(crate) runs: bool,
    pub(crate) keeps: bool,
}

/// Taints that daemon pods tolerate, with their effects.
const TOLERATED: [(&str, &str); 6] = [
    ("node.kubernetes.io/not-ready", "NoExecute"),
    ("node.kubernetes.io/unreachable", "NoExecute"),
    ("node.kubernetes.io/disk-pressure", "NoSchedule"),
    ("node.kubernetes.io/memory-pressure", "NoSchedule"),
    ("node.kubernetes.io/pid-pressure", "NoSchedule"),
    ("node.kubernetes.io/unschedulable", "NoSchedule"),
];
/// The taint that daemon pods in the host's network tolerate, too.
const NO_NETWORK: (&str, &str) = ("node.kubernetes.io/network-unavailable", "NoSchedule");

impl NodeRequirements {
    /// Reads a pod template, and adds the tolerations of daemon pods.
    pub(crate) fn of(template: &Template) -> Self {
        let mut requirements: Self =
            serde_json::from_value(template.value()["spec"].take()).unwrap_or_default();
        let added = tolerations(requirements.host_network == Some(true));
        requirements
            .tolerations
            .extend(added.into_iter().filter_map(|value| serde_json::from_value(value).ok()));
        requirements
    }

    /// Whether the node must have the pod, and whether the node may keep an existing pod.
    pub(crate) fn fit(&self, node: &Node) -> Eligibility {
        let none = Eligibility { runs: false, keeps: false };
        if self.node_name.as_deref().is_some_and(|name| !name.is_empty() && name != node.name()) {
            return none;
        }
        let labels = node.metadata.labels.clone().unwrap_or_default();
        let affinity = self.affinity.as_ref().and_then(|affinity| affinity.node_affinity.as_ref());
        let required =
            affinity.and_then(|node| node.required_during_scheduling_ignored_during_execution.as_ref());
        let matches = required.is_none_or(|required| {
            required.node_selector_terms.iter().any(|term| term_matches(term, &labels, node.name()))
        });
        if !matches || !has_all(Some(&labels), self.node_selector.as_ref()) {
            return none;
        }
        let refused = |taint: &&k8s_openapi::api::core::v1::Taint| !is_tolerated(taint, &self.tolerations);
        let runs =
            !node.taints().iter().filter(|taint| forbids_scheduling(taint)).any(|taint| refused(&taint));
        let keeps =
            !node.taints().iter().filter(|taint| taint.effect == "NoExecute").any(|taint| refused(&taint));
        Eligibility { runs, keeps }
    }
}

fn tolerations(host_network: bool) -> Vec<Value> {
    let taints = TOLERATED.into_iter().chain(host_network.then_some(NO_NETWORK));
    taints.map(|(key, effect)| json!({"key": key, "operator": "Exists", "effect": effect})).collect()
}

/// A copy of a JSON object. JSON of another type gives an empty object.
fn as_object(value: &Value) -> Value {
    if value.is_object() { value.clone() } else { json!({}) }
}

/// The pod for a node. Its node affinity names the node, so that the scheduler binds the pod to that node.
pub(crate) fn new_pod(set: &DaemonSet, node: &str, hash: &str) -> Value {
    let mut pod = pod_control::from_template(set, &set.spec.template.value());
    pod["metadata"]["generateName"] = format!("{}-", set.name()).into();
    pod["metadata"]["labels"][POD_REVISION] = hash.into();
    let annotations = set.metadata.annotations.as_ref();
    if let Some(generation) = annotations.and_then(|all| all.get("deprecated.daemonset.template.generation"))
    {
        pod["metadata"]["labels"]["pod-template-generation"] = generation.clone().into();
    }
    let host_network = pod["spec"]["hostNetwork"] == true;
    let mut list = pod["spec"]["tolerations"].as_array().cloned().unwrap_or_default();
    for added in tolerations(host_network) {
        let same = |own: &Value| own["key"] == added["key"] && own["effect"] == added["effect"];
        list.retain(|own| !same(own));
        list.push(added);
    }
    pod["spec"]["tolerations"] = list.into();
    let by_name = json!([{"key": "metadata.name", "operator": "In", "values": [node]}]);
    // The terms of the template are replaced. They are not needed, because the node matches them.
    let mut affinity = as_object(&pod["spec"]["affinity"]);
    let mut of_nodes = as_object(&affinity["nodeAffinity"]);
    of_nodes["requiredDuringSchedulingIgnoredDuringExecution"] =
        json!({"nodeSelectorTerms": [{"matchFields": by_name}]});
    affinity["nodeAffinity"] = of_nodes;
    pod["spec"]["affinity"] = affinity;
    pod
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fit(spec: Value, node: Value) -> (bool, bool) {
        let node: Node = serde_json::from_value(node).unwrap();
        let fit = NodeRequirements::of(&Template::new(&json!({"spec": spec}))).fit(&node);
        (fit.runs, fit.keeps)
    }

    #[test]
    fn selectors_and_taints_decide_where_the_pod_runs() {
        let node = |taints: Value| json!({"metadata": {"name": "a", "labels": {"disk": "ssd"}}, "spec": {"taints": taints}});
        let plain = || node(json!([]));
        let taint = |key: &str, effect: &str| node(json!([{"key": key, "effect": effect}]));
        let by_name = |name: &str| {
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
            {"nodeSelectorTerms": [{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]}]}}}})
        };
        assert_eq!(fit(json!({}), plain()), (true, true));
        assert_eq!(fit(json!({"nodeSelector": {"disk": "hdd"}}), plain()), (false, false));
        assert_eq!(fit(json!({"nodeName": "b"}), plain()), (false, false));
        assert_eq!(fit(by_name("a"), plain()), (true, true));
        assert_eq!(fit(by_name("b"), plain()), (false, false));
        assert_eq!(fit(json!({}), taint("k", "NoSchedule")), (false, true));
        assert_eq!(fit(json!({}), taint("k", "NoExecute")), (false, false));
        assert_eq!(fit(json!({}), taint("node.kubernetes.io/not-ready", "NoExecute")), (true, true));
        assert_eq!(fit(json!({}), taint(NO_NETWORK.0, "NoSchedule")), (false, true));
        assert_eq!(fit(json!({"hostNetwork": true}), taint(NO_NETWORK.0, "NoSchedule")), (true, true));
        assert_eq!(
            fit(json!({"tolerations": [{"operator": "Exists"}]}), taint("k", "NoExecute")),
            (true, true)
        );
    }

    #[test]
    fn a_template_with_fields_of_a_wrong_type_makes_a_pod() {
        for spec in [json!("text"), json!({"affinity": "text"}), json!({"affinity": {"nodeAffinity": [1]}})] {
            let set = json!({"metadata": {"name": "d"}, "spec": {"template": {"metadata": {"labels": 1}, "spec": spec}}});
            let set: DaemonSet = serde_json::from_value(set).unwrap();
            let pod: crate::object::Pod = serde_json::from_value(new_pod(&set, "node-1", "abc")).unwrap();
            assert_eq!(pod.spec.pinned_node.as_deref(), Some("node-1"), "{spec}");
        }
    }

    #[test]
    fn a_new_pod_names_its_node_and_tolerates_the_nodes_conditions() {
        let set: DaemonSet = serde_json::from_value(json!({"metadata": {"name": "d"}, "spec": {"template": {
            "metadata": {"labels": {"a": "b"}}, "spec": {"tolerations": [{"key": "k", "operator": "Exists"}]}}}}))
        .unwrap();
        let pod = new_pod(&set, "node-1", "abc");
        assert_eq!(pod["metadata"]["labels"], json!({"a": "b", POD_REVISION: "abc"}));
        assert_eq!(pod["spec"]["tolerations"].as_array().unwrap().len(), 7);
        let pod: crate::object::Pod = serde_json::from_value(pod).unwrap();
        assert_eq!(pod.spec.pinned_node.as_deref(), Some("node-1"));
    }
}
