//! Selection of the pods that end so that a critical pod fits on the node. Pure.
//!
//! Source: `pkg/kubelet/preemption/preemption.go`. As few pods of a group as possible end. Upstream's groups are the
//! QoS classes. Here the pods of the lowest priority end first, and among these the pods of the lowest class.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;

use super::admit::{Shortage, other_requests};
use super::eviction::{is_critical, priority};
use crate::cgroup::resources::{Amount, pod_requests};
use crate::cgroup::{QosClass, qos_class};

/// The other pods of the node.
#[derive(Debug, Default)]
pub(crate) struct OtherPods {
    /// Pods that are ending: their resources will be free.
    pub(crate) ending: Vec<Arc<Pod>>,
    pub(crate) running: Vec<Arc<Pod>>,
}

/// An amount of a resource that other pods must release.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Requirement {
    name: String,
    amount: i128,
}

/// A pod that may end.
struct Candidate {
    pod: Arc<Pod>,
    requested: Amount,
    others: BTreeMap<String, i128>,
}

/// The pods that must end so that the critical pod fits. Empty if the pods that are ending already release enough.
///
/// # Errors
/// The amounts that are missing even after the end of all pods that the pod may preempt.
pub(crate) fn select(
    preemptor: &Pod,
    others: &OtherPods,
    shortages: &[Shortage],
) -> Result<Vec<Arc<Pod>>, Vec<Requirement>> {
    let ending: Vec<Candidate> = others.ending.iter().map(Candidate::of).collect();
    let required: Vec<Requirement> = shortages.iter().map(Requirement::of).collect();
    let mut remaining = without(&required, &ending);
    let mut groups: BTreeMap<(bool, i32, QosClass), Vec<Candidate>> = BTreeMap::new();
    for pod in others.running.iter().filter(|pod| may_preempt(preemptor, pod)) {
        let rank = (is_critical(pod), priority(pod), qos_class(pod));
        groups.entry(rank).or_default().push(Candidate::of(pod));
    }
    // The amounts that are missing after the end of all pods in lower groups, for each group.
    let mut missing = Vec::new();
    for group in groups.values() {
        missing.push(remaining.clone());
        remaining = without(&remaining, group);
    }
    if !remaining.is_empty() {
        return Err(remaining);
    }
    let mut selected: Vec<Candidate> = Vec::new();
    for (group, missing) in groups.into_values().zip(missing).rev() {
        let missing = without(&missing, &selected);
        select_nearest(group, missing, &mut selected);
    }
    Ok(selected.into_iter().map(|candidate| candidate.pod).collect())
}

/// Whether the critical pod may preempt the other pod (`Preemptable` of `pkg/kubelet/types`).
fn may_preempt(preemptor: &Pod, other: &Pod) -> bool {
    let priority = |pod: &Pod| pod.spec.as_ref().and_then(|spec| spec.priority);
    let has_higher_priority =
        priority(preemptor).zip(priority(other)).is_some_and(|(preemptor, other)| preemptor > other);
    !is_critical(other) || has_higher_priority
}

/// Selects pods of the group until nothing is missing: in each step the pod that leaves the smallest part missing.
fn select_nearest(mut group: Vec<Candidate>, mut missing: Vec<Requirement>, selected: &mut Vec<Candidate>) {
    while !missing.is_empty() {
        let nearest = group.iter().enumerate().min_by(|(_, a), (_, b)| {
            let by_distance = a.distance(&missing).total_cmp(&b.distance(&missing));
            by_distance.then_with(|| a.size().cmp(&b.size()))
        });
        let Some((index, _)) = nearest else { return };
        let candidate = group.swap_remove(index);
        missing = without(&missing, std::slice::from_ref(&candidate));
        selected.push(candidate);
    }
}

/// The amounts that are missing after the end of these pods.
fn without(required: &[Requirement], ended: &[Candidate]) -> Vec<Requirement> {
    let left = required.iter().map(|one| {
        let released: i128 = ended.iter().map(|candidate| candidate.request(&one.name)).sum();
        Requirement { name: one.name.clone(), amount: one.amount - released }
    });
    left.filter(|one| one.amount > 0).collect()
}

// === impl Requirement ===

impl Requirement {
    fn of(shortage: &Shortage) -> Self {
        Self { name: shortage.name.clone(), amount: shortage.missing() }
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "(res: {}, q: {}), ", self.name, self.amount)
    }
}

// === impl Candidate ===

impl Candidate {
    fn of(pod: &Arc<Pod>) -> Self {
        let (requested, others) = (pod_requests(pod), other_requests(pod));
        Self { pod: Arc::clone(pod), requested, others }
    }

    /// The amount of a resource that the pod requests.
    fn request(&self, name: &str) -> i128 {
        match name {
            "pods" => 1,
            "cpu" => self.requested.cpu_millis.into(),
            "memory" => self.requested.memory.into(),
            other => self.others.get(other).copied().unwrap_or_default(),
        }
    }

    /// The missing amount after the end of the pod: the sum of the squared parts of all resources.
    fn distance(&self, missing: &[Requirement]) -> f64 {
        let parts = missing.iter().map(|one| {
            let left = (one.amount - self.request(&one.name)).max(0);
            (left as f64 / one.amount as f64).powi(2)
        });
        parts.sum()
    }

    /// Memory and CPU, to compare pods of the same distance.
    fn size(&self) -> [i64; 2] {
        [self.requested.memory, self.requested.cpu_millis]
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    const CRITICAL: i32 = 2_000_000_000;

    fn pod(name: &str, priority: Option<i32>, requests: Value) -> Arc<Pod> {
        let resources = json!({"requests": requests});
        let containers = json!([{"name": "c", "resources": resources}]);
        let spec = json!({"priority": priority, "containers": containers});
        let pod = json!({"metadata": {"name": name, "uid": name}, "spec": spec});
        Arc::new(serde_json::from_value(pod).unwrap())
    }

    fn cpu(name: &str, priority: i32, millis: i32) -> Arc<Pod> {
        pod(name, Some(priority), json!({"cpu": format!("{millis}m")}))
    }

    /// The selected pods if this amount of a resource is missing, or the amount that they cannot release.
    fn selected(preemptor: &Pod, others: &OtherPods, name: &str, amount: i128) -> String {
        match select(preemptor, others, &[Shortage::of_amount(name, amount)]) {
            Ok(pods) => {
                let names: Vec<&str> = pods.iter().filter_map(|pod| pod.metadata.name.as_deref()).collect();
                names.join(" ")
            }
            Err(missing) => missing.iter().map(ToString::to_string).collect(),
        }
    }

    fn running(pods: &[&Arc<Pod>]) -> OtherPods {
        OtherPods { ending: Vec::new(), running: pods.iter().map(|pod| Arc::clone(pod)).collect() }
    }

    #[test]
    fn few_pods_of_the_lowest_priority_end() {
        let critical = cpu("critical", CRITICAL, 1000);
        let (small, large) = (cpu("small", 0, 100), cpu("large", 0, 600));
        let (huge, high) = (cpu("huge", 0, 900), cpu("high", 1000, 500));
        let all = || running(&[&high, &small, &huge, &large]);
        assert_eq!(selected(&critical, &all(), "cpu", 500), "large");
        assert_eq!(selected(&critical, &all(), "cpu", 1500), "huge large");
        assert_eq!(selected(&critical, &all(), "cpu", 1700), "high huge large");
        assert_eq!(selected(&critical, &all(), "cpu", 2200), "(res: cpu, q: 100), ");
        assert_eq!(selected(&critical, &all(), "pods", 1), "small");
        let best_effort = pod("best-effort", Some(0), json!({}));
        let with_class = || running(&[&small, &best_effort]);
        assert_eq!(selected(&critical, &with_class(), "pods", 1), "best-effort");
        assert_eq!(selected(&critical, &with_class(), "cpu", 50), "small");
    }

    #[test]
    fn a_critical_pod_ends_only_for_a_higher_priority() {
        let (node, cluster) = (cpu("node", CRITICAL + 1000, 500), cpu("cluster", CRITICAL, 500));
        assert_eq!(selected(&node, &running(&[&cluster]), "cpu", 100), "cluster");
        assert_eq!(selected(&cluster, &running(&[&node]), "cpu", 100), "(res: cpu, q: 100), ");
        let uid = "0123456789abcdef0123456789abcdef";
        let of_manifest = pod(uid, None, json!({"cpu": "1"}));
        assert_eq!(selected(&node, &running(&[&of_manifest]), "cpu", 100), "(res: cpu, q: 100), ");
        let user = cpu("user", 5, 500);
        assert_eq!(selected(&of_manifest, &running(&[&user, &cluster]), "cpu", 100), "user");
    }

    #[test]
    fn resources_of_ending_pods_count_as_free() {
        let critical = cpu("critical", CRITICAL, 1000);
        let (ending, other) = (cpu("ending", 0, 300), cpu("other", 0, 300));
        let others = || OtherPods { ending: vec![Arc::clone(&ending)], running: vec![Arc::clone(&other)] };
        assert_eq!(selected(&critical, &others(), "cpu", 300), "");
        assert_eq!(selected(&critical, &others(), "cpu", 301), "other");
    }
}
