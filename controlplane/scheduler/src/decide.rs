//! Selects the node for a pod, or states why no node fits.

use std::collections::BTreeMap;

use crate::config::Profile;
use crate::filter::refusals;
use crate::hint::Changes;
use crate::object::Pod;
use crate::score;
use crate::snapshot::Snapshot;
use crate::topology::Topology;

/// The node has room only for a pod for which others were preempted.
const PROMISED: &str = "node(s) are reserved for a nominated pod";

/// Why no node can run a pod.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Unschedulable {
    pub(crate) message: String,
    /// The changes that may help.
    pub(crate) helped_by: Changes,
}

/// The name of the best node. Otherwise the message of upstream, which counts the nodes by reason.
pub(crate) fn decide(pod: &Pod, profile: &Profile, snapshot: &Snapshot) -> Result<String, Unschedulable> {
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    let mut total = 0;
    // A new node may run any pod.
    let mut helped_by = Changes::NODE;
    let topology = Topology::of(pod, snapshot);
    let claims = match snapshot.volumes.of_pod(pod) {
        Ok(claims) => claims,
        Err(why) => {
            let total = snapshot.candidates().count();
            let message = format!("0/{total} nodes are available: {why}.");
            return Err(Unschedulable { message, helped_by: Changes::ALL });
        }
    };
    let mut fitting = Vec::new();
    for node in snapshot.candidates() {
        total += 1;
        let (mut reasons, mut changes) = refusals(pod, profile, node);
        if reasons.is_empty() {
            (reasons, changes) = (claims.refusals(node, &snapshot.claim_users), Changes::ALL);
        }
        if reasons.is_empty() {
            (reasons, changes) = (topology.refusals(node), Changes::ALL);
        }
        if reasons.is_empty() && snapshot.is_promised(pod, &node.facts.name) {
            (reasons, changes) = (vec![PROMISED.to_owned()], Changes::ALL);
        }
        if reasons.is_empty() {
            fitting.push(node);
        } else {
            helped_by = helped_by | changes;
        }
        for reason in reasons {
            *counts.entry(reason).or_default() += 1;
        }
    }
    if total == 0 {
        return Err(Unschedulable { message: "no nodes available to schedule pods".to_owned(), helped_by });
    }
    if let Some(place) = score::best(pod, profile, (&topology, &snapshot.images), &fitting) {
        return Ok(fitting[place].facts.name.clone());
    }
    let mut reasons: Vec<String> =
        counts.into_iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    reasons.sort();
    let message = format!("0/{total} nodes are available: {}.", reasons.join(", "));
    Err(Unschedulable { message, helped_by })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn nodes_are_counted_by_reason() {
        let taints = json!([{"key": "k", "effect": "NoSchedule"}]);
        let snapshot = fixture::snapshot(&[
            fixture::node("a", json!({})),
            fixture::node("b", json!({})),
            fixture::node("c", json!({"/spec/taints": taints})),
        ]);
        let greedy = fixture::pod("p", json!({"containers": [{"resources": {"requests": {"cpu": "64"}}}]}));
        let message = "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 Insufficient cpu.";
        let refused = decide(&greedy, &Profile::default(), &snapshot).unwrap_err();
        assert_eq!(
            (refused.message.as_str(), refused.helped_by),
            (message, Changes::NODE | Changes::POD_GONE)
        );
        assert_eq!(decide(&fixture::pod("p", json!({})), &Profile::default(), &snapshot), Ok("a".to_owned()));
        let none = decide(&greedy, &Profile::default(), &fixture::snapshot(&[])).unwrap_err();
        assert_eq!(none.message, "no nodes available to schedule pods");
    }
}
