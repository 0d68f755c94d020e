//! Writes the annotation of nodes.

use std::sync::{Arc, Mutex, PoisonError};

use serde_json::json;

use super::plan::{self, ClusterSize};
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, Node, ObjectExt};
use crate::pod_cidr;
use crate::queue::{Next, Queue};
use crate::write::Part;

/// The key that stands for all nodes. No node has an empty name.
fn all() -> Key {
    Key::new("", "")
}

/// Counts nodes. Queues a node without the annotation, and all nodes when the time to live changes.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>, state: &Arc<Mutex<ClusterSize>>) {
    let (own, state) = (queue.clone(), state.clone());
    context.caches.nodes.on_change(move |change| {
        let (is_changed, seconds) = {
            let mut size = state.lock().unwrap_or_else(PoisonError::into_inner);
            let is_changed = match (change.old, change.new) {
                (None, Some(_)) => size.add(),
                (Some(_), None) => size.remove(),
                _ => false,
            };
            (is_changed, size.seconds())
        };
        if is_changed {
            own.add(all());
        } else if let Some(node) = change.new.filter(|node| plan::needs(node, seconds)) {
            own.add(node.key());
        }
    });
}

/// Reconciles one node, or all nodes. An error of one node does not prevent the writes of the other nodes.
pub(crate) async fn reconcile(
    context: &Context,
    state: &Mutex<ClusterSize>,
    key: Key,
) -> Result<Next, Error> {
    let seconds = state.lock().unwrap_or_else(PoisonError::into_inner).seconds();
    let cache = &context.caches.nodes;
    let mut nodes = if key == all() { cache.all() } else { cache.get(&key).into_iter().collect() };
    nodes.retain(|node| plan::needs(node, seconds) && !waits_for_range(context, node));
    let mut outcome = Ok(Next::Wait);
    for node in nodes {
        let annotations = json!({plan::TTL: seconds.to_string()});
        let patch = json!({"metadata": {"uid": node.uid(), "annotations": annotations}});
        if let Err(error) = context.writer(cache).merge(&node.key(), Part::Main, patch).await {
            outcome = outcome.and(Err(error));
        }
    }
    outcome
}

/// Whether the node gets a pod CIDR soon. The annotation is written after the pod CIDR, so that the two writes do not
/// conflict. The write of the pod CIDR queues the node again.
fn waits_for_range(context: &Context, node: &Node) -> bool {
    let assigns = !context.config.cluster_cidrs.is_empty() && context.config.selection.has("pod-cidr");
    assigns && !node.is_being_deleted() && pod_cidr::plan::ranges(node).is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_api::TestApi;

    #[tokio::test]
    async fn a_node_that_refuses_the_write_does_not_stop_the_others() {
        let api = TestApi::new(&[]);
        for name in ["a", "b"] {
            let node = json!({"metadata": {"name": name, "uid": name, "resourceVersion": "7"},
                "spec": {"podCIDR": "10.0.0.0/24", "podCIDRs": ["10.0.0.0/24"]}});
            api.context.caches.nodes.written(serde_json::from_value(node).unwrap());
        }
        let outcome = reconcile(&api.context, &Mutex::default(), all()).await;
        assert!(outcome.is_err(), "the writes are tried again");
        let mut paths: Vec<String> = api.writes().into_iter().map(|write| write.path).collect();
        paths.sort();
        assert_eq!(paths, ["/api/v1/nodes/a", "/api/v1/nodes/b"]);
    }
}
