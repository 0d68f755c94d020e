//! Enough processor, memory and places for the pod.

use super::{Facts, refuse};
use crate::cgroup::resources::pod_requests;
use crate::pod::state::Verdict;

pub(super) fn check(facts: &Facts<'_>) -> Result<(), Verdict> {
    let (millis, memory) = facts.allocatable;
    let used = facts.others.iter().map(|pod| pod_requests(pod));
    let (used_millis, used_memory) =
        used.fold((0, 0), |(cpu, memory), amount| (cpu + amount.cpu_millis, memory + amount.memory));
    let wanted = pod_requests(facts.pod);
    let places = i64::try_from(facts.others.len()).unwrap_or(i64::MAX);
    let most = i64::try_from(facts.max_pods).unwrap_or(i64::MAX);
    for (name, requested, used, capacity) in [
        ("pods", 1, places, most),
        ("cpu", wanted.cpu_millis, used_millis, millis),
        ("memory", wanted.memory, used_memory, memory),
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
