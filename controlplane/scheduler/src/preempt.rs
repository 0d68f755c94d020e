//! Preemption: chooses pods of lower priority, and deletes them so that a pod fits. Source: upstream's plugin
//! DefaultPreemption.
//!
//! Disruption budgets are best effort, as upstream: a choice of victims that violates fewer budgets is preferred.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use coracle_values::CollectMap;
use jiff::Timestamp;

use crate::config::Profile;
use crate::decide::{self, FoundBy, Prepared, Unschedulable, fit_error_message};
use crate::devices::{DEVICES, NOTHING_TO_DEALLOCATE};
use crate::object::Pod;
use crate::placed::Placed;
use crate::snapshot::Snapshot;
use crate::topology::PodChange;

const NOT_HELPFUL: &str = "Preemption is not helpful for scheduling";
const NO_VICTIMS: &str = "No preemption victims found for incoming pod";

/// A pod that is deleted for a pod of higher priority.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Victim {
    pub(crate) uid: String,
    pub(crate) namespace: String,
    pub(crate) name: String,
    pub(crate) priority: i32,
    started: Option<Timestamp>,
    /// Whether the removal of the pod violates a disruption budget.
    pub(crate) violates: bool,
    /// Whether the pod is already being deleted.
    pub(crate) terminating: bool,
}

impl Victim {
    fn of(uid: &str, placed: &Placed, violates: bool) -> Self {
        Self {
            uid: uid.to_owned(),
            namespace: placed.namespace.clone(),
            name: placed.name.clone(),
            priority: placed.priority,
            started: placed.started,
            violates,
            terminating: placed.terminating,
        }
    }
}

/// The node of a preemption and its victims.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Preemption {
    pub(crate) node: String,
    pub(crate) victims: Vec<Victim>,
}

/// The message of a pod that cannot be scheduled, with the outcome of the preemption. `devices` is the text that
/// upstream's plugin DynamicResources adds to every such message. If its own pre-filter refused the pod, the plugin has
/// an empty state of the pod, as for a pod without claims. If an earlier pre-filter refused the pod, the plugin has no
/// state of the pod and reports "not found".
pub(crate) fn with_outcome(refused: &Unschedulable, devices: &str, preemption: &str) -> String {
    let message = &refused.message;
    let devices = match refused.found_by {
        FoundBy::Error => return message.clone(),
        FoundBy::PreFilter if !refused.plugins.contains(DEVICES) => return format!("{message} not found"),
        FoundBy::PreFilter => NOTHING_TO_DEALLOCATE,
        FoundBy::Filters => devices,
    };
    if preemption.is_empty() {
        format!("{message} {devices}")
    } else {
        format!("{message} {devices}, {preemption}")
    }
}

/// Chooses a node for preemption: the node with the least important victims. The error is upstream's message.
pub(crate) fn preempt(
    pod: &Pod,
    profile: &Profile,
    snapshot: &mut Snapshot,
    resolvable: &BTreeSet<String>,
) -> Result<Preemption, String> {
    let found = search(pod, profile, snapshot, resolvable)?;
    best(found).ok_or_else(String::new)
}

/// The node with the least important victims.
pub(crate) fn best(found: Vec<Preemption>) -> Option<Preemption> {
    found.into_iter().min_by_key(|preemption| disruption_cost(&preemption.victims))
}

/// The nodes on which preemption helps, at least one. The error is upstream's message.
pub(crate) fn search(
    pod: &Pod,
    profile: &Profile,
    snapshot: &mut Snapshot,
    resolvable: &BTreeSet<String>,
) -> Result<Vec<Preemption>, String> {
    if pod.spec.preemption_policy.as_deref() == Some("Never") {
        return Err("preemption: not eligible due to preemptionPolicy=Never.".to_owned());
    }
    if waits_for_victims(pod, snapshot, resolvable) {
        let message = "preemption: not eligible due to a terminating pod on the nominated node.";
        return Err(message.to_owned());
    }
    let (found, unhelpful) = candidates(pod, profile, snapshot, resolvable);
    if !found.is_empty() {
        return Ok(found);
    }
    let total = snapshot.node_count();
    let useless = std::iter::repeat_n(NOT_HELPFUL, total.saturating_sub(resolvable.len()));
    let reasons = unhelpful.iter().map(String::as_str).chain(useless);
    Err(format!("preemption: {}", fit_error_message(total, reasons)))
}

/// The pods of lower priority on the nodes of these preemptions, by node. If one of these preemptions already has the
/// pod as a victim, that victim is returned.
pub(crate) fn removable(
    pod: &Pod,
    snapshot: &Snapshot,
    found: &[Preemption],
) -> BTreeMap<String, Vec<Victim>> {
    let priority = pod.spec.priority.unwrap_or_default();
    let of_node = |one: &Preemption| {
        let lower = snapshot.lower_priority_pods(&one.node, priority);
        let violations = snapshot.budgets.violations(lower.iter().map(|(_, placed)| placed));
        let pods = lower.iter().zip(violations).map(|((uid, placed), violates)| {
            let known = one.victims.iter().find(|victim| victim.uid == *uid);
            known.cloned().unwrap_or_else(|| Victim::of(uid, placed, violates))
        });
        (one.node.clone(), pods.collect())
    };
    found.iter().map(of_node).collect_map()
}

/// The nodes on which preemption helps, and the reasons of the other nodes.
pub(crate) fn candidates(
    pod: &Pod,
    profile: &Profile,
    snapshot: &mut Snapshot,
    nodes: &BTreeSet<String>,
) -> (Vec<Preemption>, Vec<String>) {
    let (mut found, mut unhelpful) = (Vec::new(), Vec::new());
    let prepared = decide::prepare(pod, profile, snapshot);
    let with_nominated = snapshot.nodes_nominated_beside(pod);
    let mut simulation = Simulation { pod, profile, prepared, snapshot };
    for node in nodes {
        match victims(&mut simulation, node, with_nominated.contains(node)) {
            // Only an extender refuses the node. The filters accept it, so a removal of pods does not help.
            Ok(victims) if victims.is_empty() => unhelpful.push(NO_VICTIMS.to_owned()),
            Ok(victims) => found.push(Preemption { node: node.clone(), victims }),
            Err(reasons) => unhelpful.extend(reasons),
        }
    }
    (found, unhelpful)
}

/// The cost of removing pods. The fields have upstream's order: violated budgets, highest priority, sum of the
/// priorities, number of pods, start time of the pods of the highest priority.
pub(crate) fn disruption_cost(victims: &[Victim]) -> impl Ord + use<> {
    let violations = victims.iter().filter(|victim| victim.violates).count();
    let highest = victims.iter().map(|victim| victim.priority).max();
    // Upstream makes each priority positive, so that more pods never cost less.
    let sum: i64 = victims.iter().map(|victim| i64::from(victim.priority) + i64::from(i32::MAX) + 1).sum();
    let oldest = victims
        .iter()
        .filter(|victim| Some(victim.priority) == highest)
        .map(|victim| start_time(victim.started));
    (violations, highest, sum, victims.len(), Reverse(oldest.min()))
}

/// The start time of a pod for comparisons. A pod that has not started is the youngest.
fn start_time(started: Option<Timestamp>) -> Timestamp {
    started.unwrap_or(Timestamp::MAX)
}

/// Whether victims of an earlier preemption are still terminating on the pod's nominated node, and the pod can still
/// use that node.
pub(crate) fn waits_for_victims(pod: &Pod, snapshot: &Snapshot, resolvable: &BTreeSet<String>) -> bool {
    let nominated = pod.status.nominated_node_name.as_deref().filter(|node| resolvable.contains(*node));
    let priority = pod.spec.priority.unwrap_or_default();
    let node = nominated.and_then(|nominated| snapshot.candidate(nominated));
    node.is_some_and(|node| node.info.pods().any(|other| other.preempted && other.priority < priority))
}

/// A simulated preemption: it removes pods from the snapshot and restores them. Each step updates the input of the
/// filters and reads only the pods of its node.
struct Simulation<'a> {
    pod: &'a Pod,
    profile: &'a Profile,
    prepared: Result<Prepared, String>,
    snapshot: &'a mut Snapshot,
}

impl Simulation<'_> {
    fn remove(&mut self, node: &str, uid: &str) {
        self.update_filters(node, uid, false);
        self.snapshot.remove(uid);
    }

    fn restore(&mut self, node: &str, uid: &str, placed: Placed) {
        self.snapshot.restore(uid, node, placed);
        self.update_filters(node, uid, true);
    }

    /// Updates the input of the filters: a pod was added to the snapshot, or will be removed from it.
    fn update_filters(&mut self, node: &str, uid: &str, is_added: bool) {
        let (Some(candidate), Ok(prepared)) = (self.snapshot.candidate(node), &mut self.prepared) else {
            return;
        };
        if let Some(other) = self.snapshot.placed_pod(node, uid) {
            let change = PodChange { node: candidate, other, is_added };
            prepared.topology.update(self.pod, change, self.snapshot);
        }
    }

    /// The reasons why the node cannot run the pod. `with_nominated` also checks the node with the pods that are
    /// nominated for it.
    fn refuse(&mut self, node: &str, with_nominated: bool) -> Option<Vec<String>> {
        if with_nominated {
            let added = self.snapshot.assume_nominated(self.pod, node);
            for uid in &added {
                self.update_filters(node, uid, true);
            }
            let refused = self.refuse_now(node);
            for uid in &added {
                self.remove(node, uid);
            }
            if refused.is_some() {
                return refused;
            }
        }
        self.refuse_now(node)
    }

    fn refuse_now(&self, node: &str) -> Option<Vec<String>> {
        let prepared = match &self.prepared {
            Ok(prepared) => prepared,
            Err(why) => return Some(vec![why.clone()]),
        };
        let candidate = self.snapshot.candidate(node)?;
        let refused = decide::refuse(self.pod, self.profile, prepared, candidate, self.snapshot);
        refused.map(|refused| refused.reasons)
    }
}

/// The victims on a node. The error has the reasons why the pod does not fit even if all pods of lower priority are
/// removed.
fn victims(
    simulation: &mut Simulation<'_>,
    node: &str,
    with_nominated: bool,
) -> Result<Vec<Victim>, Vec<String>> {
    let mut lower =
        simulation.snapshot.lower_priority_pods(node, simulation.pod.spec.priority.unwrap_or_default());
    if lower.is_empty() {
        return Err(vec![NO_VICTIMS.to_owned()]);
    }
    // Pods are kept if possible, in this order: first pods whose removal violates a budget, then the other pods. Each
    // of the two groups is sorted by descending importance.
    lower.sort_by_key(|(uid, placed)| (Reverse(placed.priority), start_time(placed.started), uid.clone()));
    let violations = simulation.snapshot.budgets.violations(lower.iter().map(|(_, placed)| placed));
    let mut lower: Vec<_> = lower.into_iter().zip(violations).collect();
    lower.sort_by_key(|(_, violates)| !violates);
    for ((uid, _), _) in &lower {
        simulation.remove(node, uid);
    }
    let refused = simulation.refuse(node, with_nominated);
    let mut victims: Vec<Victim> = Vec::new();
    let mut removed: Vec<(String, Placed)> = Vec::new();
    for ((uid, placed), violates) in lower {
        simulation.restore(node, &uid, placed.clone());
        if refused.is_none() && simulation.refuse(node, with_nominated).is_some() {
            simulation.remove(node, &uid);
            victims.push(Victim::of(&uid, &placed, violates));
            removed.push((uid, placed));
        }
    }
    for (uid, placed) in removed {
        simulation.restore(node, &uid, placed);
    }
    match refused {
        Some(reasons) => Err(reasons),
        None => Ok(victims),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::fixture;

    fn pod(name: &str, priority: i32, cpu: &str, more: Value) -> Pod {
        let mut spec =
            json!({"priority": priority, "containers": [{"resources": {"requests": {"cpu": cpu}}}]});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        fixture::pod(name, spec)
    }

    /// Two nodes of four CPUs.
    fn snapshot(pods: &[(&str, i32, &str, &str)]) -> Snapshot {
        let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
        for (name, priority, cpu, node) in pods {
            snapshot.place(&pod(name, *priority, cpu, json!({})), node);
        }
        snapshot
    }

    fn preempt_refused(pod: &Pod, snapshot: &mut Snapshot) -> Result<Preemption, String> {
        let refused = crate::decide::decide(pod, &Profile::default(), snapshot).unwrap_err();
        preempt(pod, &Profile::default(), snapshot, &refused.resolvable)
    }

    fn decide(pod: &Pod, snapshot: &mut Snapshot) -> String {
        match preempt_refused(pod, snapshot) {
            Ok(found) => {
                let names: Vec<&str> = found.victims.iter().map(|victim| victim.name.as_str()).collect();
                format!("{}: {}", found.node, names.join(" "))
            }
            Err(message) => message,
        }
    }

    #[test]
    fn the_fewest_and_least_important_pods_make_room() {
        let mut snapshot = snapshot(&[("low", 1, "2", "a"), ("mid", 5, "2", "a"), ("other", 5, "4", "b")]);
        assert_eq!(decide(&pod("p", 10, "2", json!({})), &mut snapshot), "a: low");
        assert_eq!(decide(&pod("p", 10, "4", json!({})), &mut snapshot), "b: other");
        assert_eq!(decide(&pod("p", 3, "2", json!({})), &mut snapshot), "a: low");
        let none = "preemption: 0/2 nodes are available: 2 No preemption victims found for incoming pod.";
        assert_eq!(decide(&pod("p", 1, "2", json!({})), &mut snapshot), none);
        let useless = "preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.";
        assert_eq!(decide(&pod("p", 10, "9", json!({})), &mut snapshot), useless);
        // A trial leaves the snapshot unchanged.
        let used: Vec<i128> = snapshot.candidates().map(|node| node.info.requested.cpu_millis).collect();
        assert_eq!(used, [4000, 4000]);
    }

    #[test]
    fn preemption_does_not_help_against_selectors_and_is_never_repeated() {
        let mut snapshot = snapshot(&[("low", 1, "4", "a"), ("high", 1, "4", "b")]);
        let elsewhere = pod("p", 10, "1", json!({"nodeSelector": {"x": "y"}}));
        let useless = "preemption: 0/2 nodes are available: 2 Preemption is not helpful for scheduling.";
        assert_eq!(decide(&elsewhere, &mut snapshot), useless);
        let never = pod("p", 10, "1", json!({"preemptionPolicy": "Never"}));
        assert_eq!(decide(&never, &mut snapshot), "preemption: not eligible due to preemptionPolicy=Never.");
        let mut nominated = pod("p", 10, "4", json!({}));
        assert_eq!(decide(&nominated, &mut snapshot), "a: low");
        nominated.status.nominated_node_name = Some("a".to_owned());
        let mut terminating = pod("low", 1, "4", json!({}));
        let target =
            json!([{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]);
        terminating.status.conditions = serde_json::from_value(target).unwrap();
        terminating.metadata.deletion_timestamp =
            serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        snapshot.place(&terminating, "a");
        let waits = "preemption: not eligible due to a terminating pod on the nominated node.";
        assert_eq!(decide(&nominated, &mut snapshot), waits);
    }

    #[test]
    fn budgets_are_violated_only_if_no_other_preemption_makes_room() {
        let mut snapshot = snapshot(&[("one", 1, "2", "a"), ("two", 1, "2", "a"), ("old", 1, "4", "b")]);
        let mut guarded = pod("one", 1, "2", json!({}));
        guarded.metadata.labels = Some([("app".to_owned(), "db".to_owned())].into());
        snapshot.place(&guarded, "a");
        let budget = |allowed: i32| {
            serde_json::from_value(json!({"metadata": {"name": "b", "namespace": "d"},
                "spec": {"selector": {"matchLabels": {"app": "db"}}}, "status": {"disruptionsAllowed": allowed}}))
            .unwrap()
        };
        snapshot.budgets.set(&budget(0));
        assert_eq!(decide(&pod("p", 10, "2", json!({})), &mut snapshot), "a: two");
        assert_eq!(decide(&pod("p", 10, "4", json!({})), &mut snapshot), "b: old");
        snapshot.remove("old");
        snapshot.place(&pod("old", 20, "4", json!({})), "b");
        assert_eq!(decide(&pod("p", 10, "4", json!({})), &mut snapshot), "a: one two");
        snapshot.budgets.set(&budget(1));
        let violations: Vec<bool> = preempt_refused(&pod("p", 10, "4", json!({})), &mut snapshot)
            .unwrap()
            .victims
            .iter()
            .map(|victim| victim.violates)
            .collect();
        assert_eq!(violations, [false, false]);
    }

    #[test]
    fn of_equal_pods_the_youngest_makes_room() {
        let mut snapshot = snapshot(&[]);
        let started = |name: &str, time: &str| {
            let mut pod = pod(name, 1, "2", json!({}));
            pod.status.start_time = serde_json::from_value(json!(time)).unwrap();
            pod
        };
        for node in ["a", "b"] {
            snapshot.place(&started(&format!("{node}1"), "2024-01-01T00:00:00Z"), node);
            snapshot.place(&started(&format!("{node}2"), "2024-01-01T00:00:05Z"), node);
        }
        snapshot.place(&started("b2", "2024-01-01T00:00:09Z"), "b");
        assert_eq!(decide(&pod("p", 10, "2", json!({})), &mut snapshot), "b: b2");
    }

    #[test]
    fn the_input_of_the_filters_follows_each_removed_and_restored_pod() {
        let select = json!({"matchLabels": {"app": "db"}});
        let term = |key: &str| json!([{"topologyKey": key, "labelSelector": select}]);
        let way = |key: &str| json!({"requiredDuringSchedulingIgnoredDuringExecution": term(key)});
        let spread = json!([{"maxSkew": 1, "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule", "labelSelector": select}]);
        let labelled = |name: &str, more: Value| {
            let mut pod = pod(name, 1, "1", more);
            pod.metadata.labels = Some([("app".to_owned(), "db".to_owned())].into());
            pod
        };
        let host = "kubernetes.io/hostname";
        let kinds = [
            json!({}),
            json!({"affinity": {"podAffinity": way(host)}}),
            json!({"affinity": {"podAntiAffinity": way(host)}}),
            json!({"topologySpreadConstraints": spread}),
        ];
        for incoming in &kinds {
            let mut snapshot = snapshot(&[("plain", 1, "1", "a"), ("other", 1, "1", "b")]);
            for (index, kind) in kinds.iter().enumerate() {
                snapshot.place(&labelled(&format!("p{index}"), kind.clone()), ["a", "b"][index % 2]);
            }
            let (pod, profile) = (labelled("new", incoming.clone()), Profile::default());
            let fresh = |snapshot: &Snapshot| decide::prepare(&pod, &profile, snapshot).unwrap().topology;
            let before = fresh(&snapshot);
            let prepared = decide::prepare(&pod, &profile, &snapshot);
            let mut simulation =
                Simulation { pod: &pod, profile: &profile, prepared, snapshot: &mut snapshot };
            let lower = simulation.snapshot.lower_priority_pods("a", 10);
            assert_eq!(lower.len(), 3);
            for (uid, _) in &lower {
                simulation.remove("a", uid);
                let counted = &simulation.prepared.as_ref().unwrap().topology;
                assert!(counted.filters_as(&fresh(simulation.snapshot)), "{incoming} without {uid}");
            }
            for (uid, placed) in lower {
                simulation.restore("a", &uid, placed);
            }
            assert!(simulation.prepared.as_ref().unwrap().topology.filters_as(&before), "{incoming}");
        }
    }
}
