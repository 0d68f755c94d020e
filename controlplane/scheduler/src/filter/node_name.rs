//! A pod that names a node goes there or nowhere.

use super::Refusal;
use crate::object::Pod;
use crate::snapshot::Candidate;

pub(crate) fn refuse(pod: &Pod, node: Candidate<'_>) -> Vec<Refusal> {
    match pod.node() {
        Some(name) if name != node.facts.name => {
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
    fn only_the_named_node_will_do() {
        let snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
        let node = snapshot.candidates().next().unwrap();
        assert!(refuse(&fixture::pod("p", json!({})), node).is_empty());
        assert!(refuse(&fixture::pod("p", json!({"nodeName": "a"})), node).is_empty());
        assert_eq!(refuse(&fixture::pod("p", json!({"nodeName": "b"})), node).len(), 1);
    }
}
