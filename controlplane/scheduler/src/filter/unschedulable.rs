//! Filter NodeUnschedulable: only pods with the matching toleration run on a cordoned node.

use coracle_values::toleration::is_tolerated;
use k8s_openapi::api::core::v1::Taint;

use super::Refusal;
use crate::object::Pod;
use crate::snapshot::Candidate;

pub(crate) fn refuse(pod: &Pod, node: Candidate<'_>) -> Vec<Refusal> {
    if !node.properties.unschedulable {
        return Vec::new();
    }
    let taint = Taint {
        key: "node.kubernetes.io/unschedulable".to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    };
    if is_tolerated(&taint, pod.tolerations()) {
        return Vec::new();
    }
    vec!["node(s) were unschedulable".to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn a_cordoned_node_accepts_only_pods_with_the_toleration() {
        let snapshot = fixture::snapshot(&[fixture::node("a", json!({"/spec/unschedulable": true}))]);
        let node = snapshot.candidates().next().unwrap();
        assert_eq!(refuse(&fixture::pod("p", json!({})), node), ["node(s) were unschedulable"]);
        let tolerations = json!([{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]);
        assert!(refuse(&fixture::pod("p", json!({"tolerations": tolerations})), node).is_empty());
    }
}
