//! A node that is gone and all pods → those that must go too.

use std::sync::Arc;

use crate::object::Pod;

/// The pods of a node that is gone.
pub(crate) fn stranded(node: &str, pods: Vec<Arc<Pod>>) -> Vec<Arc<Pod>> {
    pods.into_iter().filter(|pod| pod.spec.node_name.as_deref() == Some(node)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_the_gone_nodes_pods_are_stranded() {
        let pod = |node: &str| {
            Arc::new(serde_json::from_value::<Pod>(json!({"spec": {"nodeName": node}})).unwrap())
        };
        assert_eq!(stranded("a", vec![pod("a"), pod("b"), pod("")]).len(), 1);
    }
}
