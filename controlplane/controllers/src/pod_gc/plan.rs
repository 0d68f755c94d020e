//! The pods to delete, for a node that does not exist or is out of service.

use std::sync::Arc;

use crate::object::{Node, ObjectExt, Pod};

/// The taint that an administrator sets on a node that is switched off, so that none of its pods runs.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// The pods of a node that does not exist.
pub(crate) fn stranded(node: &str, pods: Vec<Arc<Pod>>) -> Vec<Arc<Pod>> {
    pods.into_iter().filter(|pod| pod.spec.node_name.as_deref() == Some(node)).collect()
}

/// Whether the node cannot stop its pods. A Ready node can, even with the taint.
pub(crate) fn is_out_of_service(node: &Node) -> bool {
    let ready = node.condition("Ready").is_some_and(|ready| ready.status == "True");
    !ready && node.taints().iter().any(|taint| taint.key == OUT_OF_SERVICE)
}

/// The terminating pods of a node that is out of service.
pub(crate) fn abandoned(node: &Node, pods: Vec<Arc<Pod>>) -> Vec<Arc<Pod>> {
    let mut pods = stranded(node.name(), pods);
    pods.retain(|pod| is_out_of_service(node) && pod.is_being_deleted());
    pods
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn terminating_pods_of_a_node_out_of_service_are_deleted() {
        let node = |ready: &str, key: &str| -> Node {
            let taints = json!([{"key": key, "value": "nodeshutdown", "effect": "NoExecute"}]);
            serde_json::from_value(json!({"metadata": {"name": "a"}, "spec": {"taints": taints},
                "status": {"conditions": [{"type": "Ready", "status": ready}]}}))
            .unwrap()
        };
        let pod = |node: &str, deleted: serde_json::Value| {
            let pod = json!({"metadata": {"deletionTimestamp": deleted}, "spec": {"nodeName": node}});
            Arc::new(serde_json::from_value::<Pod>(pod).unwrap())
        };
        let pods = || {
            let at = json!("2026-01-01T00:00:00Z");
            vec![pod("a", at.clone()), pod("a", json!(null)), pod("b", at)]
        };
        assert_eq!(abandoned(&node("Unknown", OUT_OF_SERVICE), pods()).len(), 1);
        assert_eq!(abandoned(&node("False", OUT_OF_SERVICE), pods()).len(), 1);
        assert_eq!(abandoned(&node("True", OUT_OF_SERVICE), pods()).len(), 0);
        assert_eq!(abandoned(&node("Unknown", "other"), pods()).len(), 0);
    }

    #[test]
    fn only_pods_of_missing_nodes_are_stranded() {
        let pod = |node: &str| {
            Arc::new(serde_json::from_value::<Pod>(json!({"spec": {"nodeName": node}})).unwrap())
        };
        assert_eq!(stranded("a", vec![pod("a"), pod("b"), pod("")]).len(), 1);
    }
}
