//! The score of a node for requests with alternatives: nodes with devices for the first alternatives get higher scores.
//! Source: `computeScore` of upstream's plugin DynamicResources.

use serde_json::Value;

use super::object::Claim;
use super::{Devices, PodDevices};
use crate::node_properties::NodeProperties;

/// Maximum number of alternatives of a request, as in the API.
const MAX_ALTERNATIVES: usize = 8;

impl Devices {
    /// The sum of the ranks of the alternatives that a node would provide. 0 for a pod without alternatives.
    pub(crate) fn score(&self, claims: &PodDevices, node: &NodeProperties) -> i64 {
        let has_alternatives = |claim: &Claim| {
            let mut requests = claim.spec.devices.requests.iter();
            requests.any(|request| !request.first_available.is_empty())
        };
        if !claims.waiting.iter().any(has_alternatives) {
            return 0;
        }
        let state = self.lock();
        let new = state.new_claim(claims, node).ok().flatten();
        let waiting = claims.waiting_with(new.as_ref());
        // The filter found devices, but another pod may use them by now.
        let Ok(Some(allocations)) = state.allocate(&waiting, &claims.work, node) else { return 0 };
        waiting.iter().zip(&allocations).map(|(claim, allocation)| rank(claim, allocation)).sum()
    }
}

/// The sum of the ranks of the chosen alternatives of a claim: 8 for the first alternative, and one less for each later
/// alternative.
fn rank(claim: &Claim, allocation: &Value) -> i64 {
    let results = allocation.pointer("/devices/results").and_then(Value::as_array).into_iter().flatten();
    let chosen: Vec<(&str, &str)> =
        results.filter_map(|result| result["request"].as_str()?.split_once('/')).collect();
    let mut sum = 0;
    for request in &claim.spec.devices.requests {
        let mut ranks = request.first_available.iter().zip((1..=MAX_ALTERNATIVES).rev());
        let found = ranks.find(|(other, _)| chosen.contains(&(request.name.as_str(), other.name.as_str())));
        sum += found.map_or(0, |(_, rank)| i64::try_from(rank).unwrap_or_default());
    }
    sum
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_first_alternatives_have_the_highest_rank() {
        let of = |name: &str| json!({"name": name, "deviceClassName": "c"});
        let requests = json!([{"name": "r", "firstAvailable": [of("a"), of("b"), of("c")]},
            {"name": "s", "firstAvailable": [of("a"), of("b")]}, {"name": "t", "exactly": {"deviceClassName": "c"}}]);
        let claim = json!({"metadata": {"name": "x"}, "spec": {"devices": {"requests": requests}}});
        let claim: Claim = serde_json::from_value(claim).unwrap();
        let rank_of = |chosen: &[&str]| {
            let results: Vec<Value> = chosen.iter().map(|request| json!({"request": request})).collect();
            rank(&claim, &json!({"devices": {"results": results}}))
        };
        assert_eq!(rank_of(&["r/a", "s/a", "t"]), 16);
        assert_eq!(rank_of(&["r/c", "s/b", "t"]), 6 + 7);
        assert_eq!(rank_of(&["r/b", "r/b"]), 7, "a request counts once");
        assert_eq!(rank_of(&["t"]), 0);
    }
}
