//! The pods to delete. These are the pods of nodes that do not exist, and the oldest finished pods above the limit. The
//! terminating pods without a node, or on a node that is out of service, are also deleted.

use std::collections::BTreeSet;
use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use crate::object::{Key, Node, ObjectExt, Pod};

/// The finished pods that are not being deleted.
#[derive(Debug)]
pub(crate) struct Finished {
    max: usize,
    /// The finished pods, sorted by time of creation.
    pods: BTreeSet<(Option<Time>, Key)>,
}

impl Finished {
    /// Starts without pods. `max` is the number of finished pods to keep; 0 keeps all.
    pub(crate) fn new(max: usize) -> Self {
        let max = if max == 0 { usize::MAX } else { max };
        Self { max, pods: BTreeSet::new() }
    }

    /// Records a changed pod. Returns the pods above the limit, which must be deleted. A pod that changes before its
    /// deletion is returned again.
    pub(crate) fn observe(&mut self, old: Option<&Pod>, new: Option<&Pod>) -> Vec<Key> {
        let place = |pod: &Pod| (pod.metadata.creation_timestamp.clone(), pod.key());
        if let Some(old) = old {
            self.pods.remove(&place(old));
        }
        if let Some(new) = new.filter(|new| is_finished(new)) {
            self.pods.insert(place(new));
        }
        let surplus = self.pods.len().saturating_sub(self.max);
        (0..surplus).filter_map(|_| self.pods.pop_first()).map(|(_, key)| key).collect()
    }
}

/// Whether the pod has finished and is not being deleted.
pub(crate) fn is_finished(pod: &Pod) -> bool {
    pod.finished() && !pod.is_being_deleted()
}

/// Whether the pod is being deleted and has no node. Such a pod exists because of a finalizer, and no kubelet sets its
/// phase. Without this controller, a job that replaces only failed pods would wait forever.
pub(crate) fn is_unscheduled(pod: &Pod) -> bool {
    pod.is_being_deleted() && !pod.finished() && pod.spec.node_name.as_deref().is_none_or(str::is_empty)
}

/// Taint that an administrator sets on a switched-off node, on which no pod runs any more.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service";

/// The pods of a node that does not exist.
pub(crate) fn pods_of_absent_node(node: &str, pods: Vec<Arc<Pod>>) -> Vec<Arc<Pod>> {
    pods.into_iter().filter(|pod| pod.spec.node_name.as_deref() == Some(node)).collect()
}

/// Whether the node cannot stop its pods. A ready node can stop them, even if it has the taint.
pub(crate) fn is_out_of_service(node: &Node) -> bool {
    let ready = node.condition("Ready").is_some_and(|ready| ready.status == "True");
    !ready && node.taints().iter().any(|taint| taint.key == OUT_OF_SERVICE)
}

/// The terminating pods of a node that is out of service.
pub(crate) fn abandoned(node: &Node, pods: Vec<Arc<Pod>>) -> Vec<Arc<Pod>> {
    let mut pods = pods_of_absent_node(node.name(), pods);
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
        assert_eq!(pods_of_absent_node("a", vec![pod("a"), pod("b"), pod("")]).len(), 1);
    }

    #[test]
    fn the_oldest_finished_pods_above_the_maximum_are_deleted() {
        let pod = |name: &str, hour: u8, phase: &str| -> Pod {
            let time = format!("2026-01-01T{hour:02}:00:00Z");
            let metadata = json!({"name": name, "namespace": "n", "creationTimestamp": time});
            serde_json::from_value(json!({"metadata": metadata, "status": {"phase": phase}})).unwrap()
        };
        assert_eq!(Finished::new(0).max, usize::MAX);
        let mut finished = Finished::new(2);
        let none = Vec::<Key>::new();
        assert_eq!(finished.observe(None, Some(&pod("new", 9, "Succeeded"))), none);
        assert_eq!(finished.observe(None, Some(&pod("running", 1, "Running"))), none);
        let old = pod("old", 2, "Failed");
        assert_eq!(finished.observe(None, Some(&old)), none);
        let surplus = finished.observe(Some(&pod("mid", 5, "Running")), Some(&pod("mid", 5, "Succeeded")));
        assert_eq!(surplus, [old.key()]);
        assert_eq!(finished.observe(Some(&old), Some(&old)), [old.key()], "it is not deleted yet");
        let mut deleting = old.clone();
        deleting.metadata.deletion_timestamp = old.metadata.creation_timestamp.clone();
        assert_eq!(finished.observe(Some(&old), Some(&deleting)), none);
        assert_eq!(finished.observe(Some(&pod("mid", 5, "Succeeded")), None), none);
        assert_eq!(finished.pods.len(), 1);
    }
}
