//! Check of CPU, memory, extended resources and the number of pods.

use std::collections::BTreeMap;

use coracle_values::pod_resources::PodResources;
use coracle_values::quantity::value_of;
use k8s_openapi::api::core::v1::Pod;

use super::facts::{Facts, refuse};
use crate::cgroup::resources::pod_requests;
use crate::node::is_extended;
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
        fits(name, requested.into(), used.into(), capacity.into())?;
    }
    let allocatable = facts.node.and_then(|node| node.status.as_ref()?.allocatable.as_ref());
    let summed = extended_requests(facts.pod).into_iter().filter(|(name, _)| !facts.managed.contains(name));
    for (name, requested) in summed {
        // As upstream, a resource that the node does not have is ignored: it may belong to the cluster.
        let Some(capacity) = allocatable.and_then(|all| all.get(&name)) else { continue };
        let used = facts.used.extended.get(&name).copied().unwrap_or_default();
        fits(&name, requested, used, value_of(capacity).into())?;
    }
    Ok(())
}

fn fits(name: &str, requested: i128, used: i128, capacity: i128) -> Result<(), Verdict> {
    if requested <= 0 || used + requested <= capacity {
        return Ok(());
    }
    let message = format!(
        "Pod was rejected: Node didn't have enough resource: {name}, requested: {requested}, used: {used}, capacity: {capacity}"
    );
    Err(refuse(&format!("OutOf{name}"), message))
}

/// The extended resources that a pod requests, in units, by name.
pub(crate) fn extended_requests(pod: &Pod) -> BTreeMap<String, i128> {
    let requests = pod.spec.as_ref().map(|spec| PodResources::from(spec).requests()).unwrap_or_default();
    requests.others.into_iter().filter(|(name, amount)| is_extended(name) && *amount > 0).collect()
}
