//! Filter NodeName: a pod with a node name runs on that node only.

use super::Refusal;
use crate::object::Pod;
use crate::snapshot::Candidate;

pub(crate) fn refuse(pod: &Pod, node: Candidate<'_>) -> Vec<Refusal> {
    match pod.node() {
        Some(name) if name != node.properties.name => {
            vec!["node(s) didn't match the requested node name".to_owned()]
        }
        Some(_) | None => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn only_the_named_node_is_accepted() {
        let snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
        let node = snapshot.candidates().next().unwrap();
        assert!(refuse(&fixture::pod("p", json!({})), node).is_empty());
        assert!(refuse(&fixture::pod("p", json!({"nodeName": "a"})), node).is_empty());
        assert_eq!(refuse(&fixture::pod("p", json!({"nodeName": "b"})), node).len(), 1);
    }
}
