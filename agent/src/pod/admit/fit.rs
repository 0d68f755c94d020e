//! Check of CPU, memory and the number of pods.

use super::facts::{Facts, refuse};
use crate::cgroup::resources::pod_requests;
use crate::pod::state::Verdict;

pub(super) fn check(facts: &Facts<'_>) -> Result<(), Verdict> {
    let used = facts.used.requested;
    let wanted = pod_requests(facts.pod);
    let pods = i64::try_from(facts.used.pods).unwrap_or(i64::MAX);
    let max_pods = i64::try_from(facts.max_pods).unwrap_or(i64::MAX);
    for (name, requested, used, capacity) in [
        ("pods", 1, pods, max_pods),
        ("cpu", wanted.cpu_millis, used.cpu_millis, facts.allocatable.cpu_millis),
        ("memory", wanted.memory, used.memory, facts.allocatable.memory),
    ] {
        if requested > 0 && used + requested > capacity {
            let message = format!(
                "Pod was rejected: Node didn't have enough resource: {name}, requested: {requested}, used: {used}, capacity: {capacity}"
            );
            return Err(refuse(&format!("OutOf{name}"), message));
        }
    }
    Ok(())
}
