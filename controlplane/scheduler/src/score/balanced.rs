//! Score NodeResourcesBalancedAllocation: nodes with similar use of CPU and memory are better.

use super::{BEST, share};
use crate::object::Pod;
use crate::request::of_pod;
use crate::snapshot::Candidate;

pub(crate) fn score(pod: &Pod, nodes: &[Candidate<'_>]) -> Vec<i64> {
    let own = of_pod(pod);
    // In hundredths, at most all.
    let part = |has: i128, given: i128| if has <= 0 { BEST } else { share(given, has).min(BEST) };
    let mark = |node: &Candidate<'_>| {
        let (has, given) = (&node.facts.allocatable, &node.info.requested);
        let cpu = part(has.cpu_millis, given.cpu_millis + own.cpu_millis);
        let memory = part(has.memory, given.memory + own.memory);
        // The deviation of two values from their mean is half their distance.
        BEST - (cpu - memory).abs() / 2
    };
    nodes.iter().map(mark).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn a_node_with_unequal_use_of_its_resources_is_worse() {
        let pod = |name: &str, cpu: &str, memory: &str| {
            let requests = json!({"cpu": cpu, "memory": memory});
            fixture::pod(name, json!({"containers": [{"resources": {"requests": requests}}]}))
        };
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        snapshot.place(&pod("one", "2", "0"), "a");
        let nodes: Vec<_> = snapshot.candidates().collect();
        assert_eq!(score(&pod("p", "1", "2Gi"), &nodes), [75, 100]);
    }
}
