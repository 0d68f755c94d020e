//! Filter NodeDeclaredFeatures: the node must declare the features that the pod needs in `status.declaredFeatures`.
//!
//! Source: upstream's plugin of that name and `k8s.io/component-helpers/nodedeclaredfeatures`. Of the features that are
//! on by default in v1.36, only one concerns the scheduling of pods.

use crate::hint::Changes;
use crate::node_properties::NodeProperties;
use crate::refusal::Refused;

/// The feature that restarts all containers of a pod when one container ends.
const RESTARTS: &str = "RestartAllContainersOnContainerExits";
const MISSING: &str = "node(s) didn't match Pod's required features";

/// The refusal of a pod that restarts all of its containers, by a node that does not declare the feature.
pub(crate) fn refuse(restarts_all: bool, node: &NodeProperties) -> Option<Refused> {
    if !restarts_all || node.declared_features.iter().any(|declared| declared == RESTARTS) {
        return None;
    }
    let reasons = vec![MISSING.to_owned()];
    let plugin = "NodeDeclaredFeatures";
    Some(Refused { plugin, reasons, resolvable: false, helped_by: Changes::NODE })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::{Value, json};

    use crate::config::Profile;
    use crate::decide::decide;
    use crate::fixture;
    use crate::hint::Changes;
    use crate::object::Node;
    use crate::snapshot::Snapshot;

    fn node(name: &str, declared: &[&str]) -> Node {
        let mut node = fixture::node(name, json!({}));
        node.status.declared_features = Some(declared.iter().map(|one| (*one).to_owned()).collect());
        node
    }

    fn pod(field: &str, action: &str) -> crate::object::Pod {
        let rules: Value = json!([{"action": action, "exitCodes": {"operator": "In", "values": [1]}}]);
        fixture::pod("p", json!({(field): [{"restartPolicyRules": rules}]}))
    }

    #[test]
    fn a_pod_that_restarts_all_containers_needs_a_node_that_declares_it() {
        let other = node("a", &["InPlacePodVerticalScalingInitContainers"]);
        let mut snapshot = fixture::snapshot(std::slice::from_ref(&other));
        let on =
            |pod: &crate::object::Pod, snapshot: &mut Snapshot| decide(pod, &Profile::default(), snapshot);
        assert_eq!(on(&pod("containers", "Restart"), &mut snapshot), Ok("a".to_owned()));
        for field in ["containers", "initContainers"] {
            let refused = on(&pod(field, "RestartAllContainers"), &mut snapshot).unwrap_err();
            let message = "0/1 nodes are available: 1 node(s) didn't match Pod's required features.";
            assert_eq!((refused.message.as_str(), refused.helped_by), (message, Changes::NODE));
            assert_eq!(refused.resolvable, BTreeSet::new());
        }
        let profile = Profile { without_filters: ["NodeDeclaredFeatures"].into(), ..Profile::default() };
        let wanted = pod("containers", "RestartAllContainers");
        assert_eq!(decide(&wanted, &profile, &mut snapshot), Ok("a".to_owned()));
        assert!(!snapshot.set_node(&other));
        let able = node("a", &["RestartAllContainersOnContainerExits"]);
        assert!(snapshot.set_node(&able), "the change helps refused pods");
        assert_eq!(on(&wanted, &mut snapshot), Ok("a".to_owned()));
    }
}
