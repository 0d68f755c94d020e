//! Score for spreading: nodes with fewer pods of the same owner are better.

use super::{BEST, normalize};
use crate::object::Pod;
use crate::snapshot::{Candidate, owner_of};

pub(crate) fn score(pod: &Pod, nodes: &[Candidate<'_>]) -> Vec<i64> {
    let Some(owner) = owner_of(pod) else { return vec![BEST; nodes.len()] };
    let siblings = |node: &Candidate<'_>| i64::try_from(node.info.of_owner(&owner)).unwrap_or_default();
    normalize(nodes.iter().map(siblings).collect(), true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn pods_of_one_owner_spread_and_other_pods_do_not_matter() {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        snapshot.place(&fixture::owned("one", "set"), "a");
        snapshot.place(&fixture::owned("two", "set"), "a");
        snapshot.place(&fixture::owned("three", "set"), "b");
        let nodes: Vec<_> = snapshot.candidates().collect();
        assert_eq!(score(&fixture::owned("new", "set"), &nodes), [0, 50]);
        assert_eq!(score(&fixture::owned("new", "other"), &nodes), [100, 100]);
    }
}
