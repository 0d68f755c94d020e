//! Score NodeResourcesFit (LeastAllocated): nodes with more free CPU and memory are better.

use super::share;
use crate::object::Pod;
use crate::request::of_pod;
use crate::snapshot::{Candidate, weight_of};

pub(crate) fn score(pod: &Pod, nodes: &[Candidate<'_>]) -> Vec<i64> {
    let own = weight_of(&of_pod(&pod.spec));
    let free = |has: i128, given: i128| {
        if has <= 0 || given > has { 0 } else { share(has - given, has) }
    };
    let mark = |node: &Candidate<'_>| {
        let (has, given) = (&node.facts.allocatable, &node.info.weighed);
        i64::midpoint(
            free(has.cpu_millis, given.cpu_millis + own.cpu_millis),
            free(has.memory, given.memory + own.memory),
        )
    };
    nodes.iter().map(mark).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture;
    use serde_json::json;

    #[test]
    fn the_emptier_node_is_better() {
        let pod = |name: &str| {
            fixture::pod(
                name,
                json!({"containers": [{"resources": {"requests": {"cpu": "1", "memory": "2Gi"}}}]}),
            )
        };
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        snapshot.place(&pod("one"), "a");
        let nodes: Vec<_> = snapshot.candidates().collect();
        assert_eq!(score(&pod("p"), &nodes), [50, 75]);
    }
}
