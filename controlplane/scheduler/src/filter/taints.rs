//! Filter TaintToleration: the pod must tolerate every NoSchedule and NoExecute taint.

use coracle_values::toleration::{forbids_scheduling, is_tolerated};

use super::Refusal;
use crate::object::Pod;
use crate::snapshot::Candidate;

pub(crate) fn refuse(pod: &Pod, node: Candidate<'_>) -> Vec<Refusal> {
    let tolerations = pod.tolerations();
    let mut forbidding = node.properties.taints.iter().filter(|taint| forbids_scheduling(taint));
    if forbidding.all(|taint| is_tolerated(taint, tolerations)) {
        return Vec::new();
    }
    vec!["node(s) had untolerated taint(s)".to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::{Value, json};

    fn refused(taint: Value, tolerations: Value) -> bool {
        let snapshot = fixture::snapshot(&[fixture::node("a", json!({"/spec/taints": [taint]}))]);
        let pod = fixture::pod("p", json!({"tolerations": tolerations}));
        !refuse(&pod, snapshot.candidates().next().unwrap()).is_empty()
    }

    #[test]
    fn tolerations_match_taints_by_key_value_and_effect() {
        let taint = |effect: &str| json!({"key": "k", "value": "v", "effect": effect});
        assert!(refused(taint("NoSchedule"), json!([])));
        assert!(refused(taint("NoExecute"), json!([])));
        assert!(!refused(taint("PreferNoSchedule"), json!([])));
        assert!(!refused(taint("NoSchedule"), json!([{"operator": "Exists"}])));
        assert!(!refused(taint("NoSchedule"), json!([{"key": "k", "operator": "Exists"}])));
        assert!(!refused(taint("NoSchedule"), json!([{"key": "k", "value": "v", "effect": "NoSchedule"}])));
        assert!(refused(taint("NoSchedule"), json!([{"key": "k", "value": "w"}])));
        assert!(refused(taint("NoSchedule"), json!([{"key": "k", "value": "v", "effect": "NoExecute"}])));
        assert!(refused(taint("NoSchedule"), json!([{"key": "other", "operator": "Exists"}])));
    }
}
