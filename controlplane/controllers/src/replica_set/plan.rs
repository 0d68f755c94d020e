//! Plans the changes of the pods of one replica set.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use coracle_values::label_selector::{LabelSelector, Labels, has_all};
use jiff::Timestamp;
use k8s_openapi::api::apps::v1::{ReplicaSetCondition, ReplicaSetStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;

use super::{Replicas, rank};
use crate::object::{ObjectExt, Pod, controller_of};
use crate::state::failed_pods;
use crate::state::pod_counts::Groups;

/// Maximum number of pods that one reconcile creates or deletes.
const BURST: usize = 500;
/// Number of immediate failures at which the controller delays creations. For a set with more replicas, the limit is
/// its number of replicas.
const MIN_FAILURES: usize = 10;

/// The input of the plan.
pub(crate) struct Snapshot<'a, K> {
    pub(crate) set: &'a K,
    pub(crate) selector: &'a LabelSelector,
    /// The pods that this set controls, and the pods of its namespace without a controller.
    pub(crate) pods: Vec<Arc<Pod>>,
    /// Active pods of all replica sets of the same owner, by node.
    pub(crate) neighbours: HashMap<String, usize>,
    pub(crate) now: Timestamp,
}

/// The actions.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Orphaned pods that match the selector and must be adopted.
    pub(crate) adopt: Vec<Arc<Pod>>,
    /// Controlled pods that no longer match the selector and must be released.
    pub(crate) release: Vec<Arc<Pod>>,
    pub(crate) change: Change,
}

/// The change of the number of pods.
#[derive(Debug, Default)]
pub(crate) enum Change {
    /// The number is as desired.
    #[default]
    Nothing,
    Create(usize),
    Delete(Vec<Arc<Pod>>),
}

/// Plans the actions. Adopted pods are counted from the next reconcile.
pub(crate) fn plan<K: Replicas>(snapshot: Snapshot<'_, K>) -> Plan {
    let Snapshot { set, selector, pods, neighbours, now } = snapshot;
    let mut plan = Plan::default();
    let mut active = Vec::new();
    for pod in pods {
        let fits = selector.matches(pod.metadata.labels.as_ref());
        match (controller_of(&pod.metadata).is_some(), fits) {
            (true, true) if pod.is_active() => active.push(pod),
            (true, false) if !set.is_being_deleted() && !pod.is_being_deleted() => plan.release.push(pod),
            (false, true) if !set.is_being_deleted() && pod.is_active() => plan.adopt.push(pod),
            (true | false, _) => {}
        }
    }
    if set.is_being_deleted() || !plan.adopt.is_empty() {
        return plan;
    }
    let desired = usize::try_from(desired(set)).unwrap_or_default();
    plan.change = match active.len() {
        have if have < desired => Change::Create((desired - have).min(BURST)),
        have if have > desired => {
            rank::sort_for_deletion(&mut active, &neighbours, now);
            active.truncate((have - desired).min(BURST));
            Change::Delete(active)
        }
        _ => Change::Nothing,
    };
    plan
}

/// `spec.replicas` of the set.
pub(crate) fn desired<K: Replicas>(set: &K) -> i32 {
    set.spec().replicas.unwrap_or(1)
}

/// Whether a change of a pod can affect the plan or the status of a replica set. Most changes of a starting pod have no
/// effect, and the cost of a reconcile grows with the number of the set's pods.
pub(crate) fn is_relevant(old: &Pod, new: &Pod) -> bool {
    old.is_active() != new.is_active()
        || is_terminating(old) != is_terminating(new)
        || old.ready_since() != new.ready_since()
        || labels(old) != labels(new)
        || old.metadata.owner_references != new.metadata.owner_references
        || old.uid() != new.uid()
}

/// Whether the pod is being deleted and has not finished.
fn is_terminating(pod: &Pod) -> bool {
    pod.is_being_deleted() && !pod.finished()
}

/// The labels of a pod. `None` if it has no labels.
fn labels(pod: &Pod) -> Option<&Labels> {
    pod.metadata.labels.as_ref().filter(|labels| !labels.is_empty())
}

/// A failed change of the number of pods.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) reason: &'static str,
    pub(crate) message: String,
}

/// Numbers of pods of a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ReplicaCounts {
    replicas: usize,
    labelled: usize,
    ready: usize,
    available: usize,
    terminating: usize,
    /// Time until the next pod becomes available.
    next: Option<Duration>,
}

impl ReplicaCounts {
    /// Counts pods.
    pub(crate) fn of_pods<K: Replicas>(set: &K, pods: &[Arc<Pod>], now: Timestamp) -> Self {
        let template_labels = set.spec().template.labels();
        let terminating = pods.iter().filter(|pod| is_terminating(pod)).count();
        let mut counts = Self { terminating, ..Self::default() };
        for pod in pods.iter().filter(|pod| pod.is_active()) {
            counts.replicas += 1;
            counts.labelled += usize::from(has_all(pod.metadata.labels.as_ref(), Some(&template_labels)));
            let Some(since) = pod.ready_since() else { continue };
            counts.ready += 1;
            match until_available(since, min_ready(set), now) {
                None => counts.available += 1,
                Some(wait) => counts.next = Some(counts.next.map_or(wait, |next| next.min(wait))),
            }
        }
        counts
    }

    /// Sums groups of pods. Without `minReadySeconds` all ready pods are available.
    pub(crate) fn of_groups<K: Replicas>(set: &K, groups: &Groups) -> Self {
        let template_labels = set.spec().template.labels();
        let mut counts = Self::default();
        for (labels, group) in groups {
            counts.replicas += group.active;
            counts.ready += group.ready;
            counts.terminating += group.terminating;
            if has_all(Some(labels), Some(&template_labels)) {
                counts.labelled += group.active;
            }
        }
        counts.available = counts.ready;
        counts
    }

    /// Time after which the status may change without an event.
    pub(crate) fn next(&self) -> Option<Duration> {
        self.next
    }

    /// The pause after a write of the status. While many pods start, each pod changes the counts. Each status write of
    /// the set causes a status write of the deployment. The pause shrinks with the number of pods that are not ready.
    pub(crate) fn pause(&self) -> Option<Duration> {
        /// Minimum number of pods that are not ready for a pause.
        const MANY: usize = 10;
        const PER_POD: Duration = Duration::from_millis(1);
        const MAX_PAUSE: Duration = Duration::from_millis(100);
        let missing = self.replicas.saturating_sub(self.ready);
        let pause = PER_POD.saturating_mul(u32::try_from(missing).unwrap_or(u32::MAX)).min(MAX_PAUSE);
        (missing >= MANY).then_some(pause)
    }
}

/// The change of the number of pods, if the counts are sufficient. The counts are sufficient if all pods of the set
/// match its selector, no orphaned pod matches the selector, and no pod must be deleted. `None` if [`plan`] must read
/// the pods.
pub(crate) fn by_counts<K: Replicas>(
    set: &K,
    selector: &LabelSelector,
    own: &Groups,
    orphans: &Groups,
) -> Option<Change> {
    let matches = |labels: &Labels| selector.matches(Some(labels));
    if set.is_being_deleted() || !own.keys().all(matches) || orphans.keys().any(matches) {
        return None;
    }
    let have: usize = own.values().map(|group| group.active).sum();
    match usize::try_from(desired(set)).unwrap_or_default().checked_sub(have)? {
        0 => Some(Change::Nothing),
        missing => Some(Change::Create(missing.min(BURST))),
    }
}

/// Time until the set creates further pods. `None` if the set may create pods now. `failed` are the creation times of
/// its pods that have failed.
///
/// A node refuses a pod that does not fit, and will refuse the replacement of the pod, too. Without a delay, such a set
/// would create pods at once, again and again. Upstream's controller has no delay.
pub(crate) fn creation_delay(desired: usize, failed: &[Timestamp], now: Timestamp) -> Option<Duration> {
    let mut remaining: Vec<Duration> =
        failed.iter().filter_map(|created| failed_pods::remaining(*created, now)).collect();
    remaining.sort_unstable();
    // Creations continue when the window contains fewer failures than the maximum.
    let last = remaining.len().checked_sub(desired.max(MIN_FAILURES))?;
    remaining.get(last).copied()
}

/// `spec.minReadySeconds` of the set.
pub(crate) fn min_ready<K: Replicas>(set: &K) -> i64 {
    set.spec().min_ready_seconds.unwrap_or_default().into()
}

/// The desired status.
pub(crate) fn status<K: Replicas>(
    set: &K,
    counts: &ReplicaCounts,
    failure: Option<&Failure>,
    now: Timestamp,
) -> ReplicaSetStatus {
    ReplicaSetStatus {
        replicas: count(counts.replicas),
        fully_labeled_replicas: positive(count(counts.labelled)),
        ready_replicas: positive(count(counts.ready)),
        available_replicas: positive(count(counts.available)),
        observed_generation: set.meta().generation.max(set.status().observed_generation),
        conditions: conditions(set, failure, now),
        terminating_replicas: K::HAS_TERMINATING.then(|| count(counts.terminating)),
    }
}

/// Remaining time until a ready pod becomes available. `None` if it is available.
fn until_available(since: Option<Time>, min_ready: i64, now: Timestamp) -> Option<Duration> {
    if min_ready == 0 {
        return None;
    }
    let since = since.map_or(now, |time| time.0);
    let left = since.as_millisecond() + min_ready * 1000 - now.as_millisecond();
    u64::try_from(left).ok().filter(|left| *left > 0).map(Duration::from_millis)
}

fn conditions<K: Replicas>(
    set: &K,
    failure: Option<&Failure>,
    now: Timestamp,
) -> Option<Vec<ReplicaSetCondition>> {
    const TYPE: &str = "ReplicaFailure";
    let mut conditions = set.status().conditions.clone().unwrap_or_default();
    let known = conditions.iter().any(|condition| condition.type_.as_deref() == Some(TYPE));
    match failure {
        Some(failure) if !known => conditions.push(ReplicaSetCondition {
            type_: Some(TYPE.to_owned()),
            status: Some("True".to_owned()),
            last_transition_time: Some(Time(now)),
            reason: Some(failure.reason.to_owned()),
            message: Some(failure.message.clone()),
        }),
        // The condition keeps the first failure until a reconcile succeeds.
        Some(_) => {}
        None => conditions.retain(|condition| condition.type_.as_deref() != Some(TYPE)),
    }
    (!conditions.is_empty()).then_some(conditions)
}

fn positive(count: i32) -> Option<i32> {
    (count > 0).then_some(count)
}

/// A count in the API's type.
fn count(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

/// Whether two statuses are equal. An absent count equals zero.
pub(crate) fn are_equal(one: &ReplicaSetStatus, other: &ReplicaSetStatus) -> bool {
    let counts = |status: &ReplicaSetStatus| {
        [
            status.replicas,
            status.fully_labeled_replicas.unwrap_or_default(),
            status.ready_replicas.unwrap_or_default(),
            status.available_replicas.unwrap_or_default(),
        ]
    };
    counts(one) == counts(other)
        && one.observed_generation == other.observed_generation
        && one.terminating_replicas == other.terminating_replicas
        && one.conditions.as_deref().unwrap_or_default() == other.conditions.as_deref().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::{ReplicaSet, ReplicationController};
    use serde_json::{Value, json};

    fn now() -> Timestamp {
        "2026-01-01T12:00:00Z".parse().unwrap()
    }

    fn set(replicas: i32) -> ReplicaSet {
        serde_json::from_value(json!({
            "metadata": {"name": "rs", "namespace": "d", "uid": "rs", "generation": 2},
            "spec": {"replicas": replicas, "selector": {"matchLabels": {"app": "a"}},
                     "template": {"metadata": {"labels": {"app": "a", "x": "y"}}}},
        }))
        .unwrap()
    }

    fn pod(uid: &str, app: &str, owned: bool, status: Value) -> Arc<Pod> {
        let owners = if owned {
            json!([{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "rs", "uid": "rs", "controller": true}])
        } else {
            Value::Null
        };
        Arc::new(
            serde_json::from_value(json!({
                "metadata": {"name": uid, "namespace": "d", "uid": uid, "labels": {"app": app}, "ownerReferences": owners},
                "spec": {"nodeName": "n", "containers": []},
                "status": status,
            }))
            .unwrap(),
        )
    }

    fn decide(set: &ReplicaSet, pods: Vec<Arc<Pod>>) -> String {
        let selector = LabelSelector::try_from(&set.spec.selector).unwrap();
        let plan = plan(Snapshot { set, selector: &selector, pods, neighbours: HashMap::new(), now: now() });
        let names =
            |pods: &[Arc<Pod>]| pods.iter().map(|pod| pod.uid().to_owned()).collect::<Vec<_>>().join(",");
        let change = match &plan.change {
            Change::Nothing => "nothing".to_owned(),
            Change::Create(count) => format!("create {count}"),
            Change::Delete(pods) => format!("delete {}", names(pods)),
        };
        format!("adopt[{}] release[{}] {change}", names(&plan.adopt), names(&plan.release))
    }

    fn running() -> Value {
        json!({"phase": "Running"})
    }

    #[test]
    fn missing_pods_are_created_and_finished_ones_do_not_count() {
        let pods = vec![pod("1", "a", true, running()), pod("2", "a", true, json!({"phase": "Failed"}))];
        assert_eq!(decide(&set(3), pods), "adopt[] release[] create 2");
    }

    #[test]
    fn pods_that_fail_at_once_are_replaced_slowly() {
        let at = |age: u64| now().checked_sub(Duration::from_secs(age)).unwrap();
        let delay = |desired, failed: &[Timestamp]| creation_delay(desired, failed, now());
        let mut failed: Vec<_> = (0..9).map(at).collect();
        assert_eq!(delay(1, &failed), None);
        failed.push(at(40));
        assert_eq!(delay(1, &failed), Some(Duration::from_secs(20)), "until the first has left the window");
        failed.push(at(0));
        assert_eq!(delay(1, &failed), Some(Duration::from_secs(52)), "until two have left it");
        assert_eq!(delay(12, &failed), None, "each replica may fail once");
        assert_eq!(delay(1, &[at(61); 20]), None);
    }

    #[test]
    fn a_starting_pod_needs_one_look_at_its_set() {
        let condition = |ready: &str| json!([{"type": "Ready", "status": ready}]);
        let status = |phase: &str, ready: &str| json!({"phase": phase, "conditions": condition(ready)});
        let steps = [
            json!({}),
            json!({"phase": "Pending"}),
            json!({"phase": "Pending", "conditions": [{"type": "PodScheduled", "status": "True"}]}),
            status("Pending", "False"),
            json!({"phase": "Running", "podIP": "10.0.0.1", "conditions": condition("False")}),
            status("Running", "True"),
            json!({"phase": "Running", "hostIP": "10.0.0.2", "conditions": condition("True")}),
        ];
        let versions = steps.map(|status| pod("1", "a", true, status));
        let looks = versions.windows(2).filter(|pair| is_relevant(&pair[0], &pair[1])).count();
        assert_eq!(looks, 1);
        let ready = &versions[6];
        for other in [
            pod("1", "b", true, status("Running", "True")),
            pod("1", "a", false, status("Running", "True")),
            pod("2", "a", true, status("Running", "True")),
            pod("1", "a", true, status("Running", "False")),
            pod("1", "a", true, status("Failed", "True")),
        ] {
            assert!(is_relevant(ready, &other), "{other:?}");
        }
        let mut deleted = (**ready).clone();
        deleted.metadata.deletion_timestamp = Some(Time(now()));
        assert!(is_relevant(ready, &deleted));
    }

    #[test]
    fn one_reconcile_creates_at_most_one_burst() {
        assert_eq!(decide(&set(2000), Vec::new()), "adopt[] release[] create 500");
    }

    #[test]
    fn the_least_needed_pod_is_deleted() {
        let pods = vec![pod("1", "a", true, running()), pod("2", "a", true, json!({"phase": "Pending"}))];
        assert_eq!(decide(&set(1), pods), "adopt[] release[] delete 2");
    }

    #[test]
    fn matching_orphans_are_adopted_first_and_other_pods_are_released() {
        let pods = vec![pod("1", "a", false, running()), pod("2", "b", false, running())];
        assert_eq!(decide(&set(3), pods), "adopt[1] release[] nothing");
        assert_eq!(decide(&set(1), vec![pod("1", "b", true, running())]), "adopt[] release[1] create 1");
    }

    #[test]
    fn a_set_that_is_being_deleted_has_no_actions() {
        let mut set = set(3);
        set.metadata.deletion_timestamp = Some(Time(now()));
        assert_eq!(decide(&set, vec![pod("1", "a", false, running())]), "adopt[] release[] nothing");
    }

    #[test]
    fn availability_waits_for_min_ready_seconds() {
        let mut set = set(2);
        set.spec.min_ready_seconds = Some(30);
        let ready = |since: &str| {
            json!({"phase": "Running", "conditions": [
                {"type": "Ready", "status": "True", "lastTransitionTime": since}]})
        };
        let pods = vec![
            pod("1", "a", true, ready("2026-01-01T11:59:50Z")),
            pod("2", "a", true, ready("2026-01-01T11:59:00Z")),
        ];
        let mut ending = Pod::clone(&pod("3", "a", true, ready("2026-01-01T11:59:00Z")));
        ending.metadata.deletion_timestamp = Some(Time(now()));
        assert!(is_relevant(&ending, &{
            let mut done = ending.clone();
            done.status.phase = Some("Failed".to_owned());
            done
        }));
        let pods = [pods, vec![Arc::new(ending)]].concat();
        let counts = ReplicaCounts::of_pods(&set, &pods, now());
        let (status, next) = (status(&set, &counts, None, now()), counts.next());
        assert_eq!(
            (status.replicas, status.ready_replicas, status.available_replicas),
            (2, Some(2), Some(1))
        );
        assert_eq!((status.fully_labeled_replicas, status.observed_generation), (None, Some(2)));
        assert_eq!(status.terminating_replicas, Some(1));
        assert_eq!(next, Some(Duration::from_secs(20)));
    }

    #[test]
    fn a_failure_is_in_the_status_until_a_reconcile_succeeds() {
        let failure = Failure { reason: "FailedCreate", message: "quota".into() };
        let mut set = set(1);
        set.status = status(&set, &ReplicaCounts::default(), Some(&failure), now());
        let condition = set.status.conditions.as_ref().unwrap()[0].clone();
        assert_eq!(
            (condition.reason.as_deref(), condition.message.as_deref()),
            (Some("FailedCreate"), Some("quota"))
        );
        assert_eq!(status(&set, &ReplicaCounts::default(), None, now()).conditions, None);
    }

    #[test]
    fn counts_decide_unless_single_pods_matter() {
        use crate::state::pod_counts::Group;
        let labels = |app: &str| -> Labels {
            [("app".to_owned(), app.to_owned()), ("x".to_owned(), "y".to_owned())].into()
        };
        let groups = |app: &str, active: usize| -> Groups {
            [(labels(app), Group { active, ready: 1, terminating: 2 })].into_iter().collect()
        };
        let selector = LabelSelector::try_from(&set(3).spec.selector).unwrap();
        let decide = |own: Groups, orphans: Groups| by_counts(&set(3), &selector, &own, &orphans);
        let missing = decide(groups("a", 1), groups("b", 5));
        assert!(matches!(missing, Some(Change::Create(2))), "{missing:?}");
        assert!(matches!(decide(groups("a", 3), Groups::new()), Some(Change::Nothing)));
        assert!(decide(groups("a", 4), Groups::new()).is_none(), "a pod must be chosen for deletion");
        assert!(decide(groups("b", 3), Groups::new()).is_none(), "a pod is to be released");
        assert!(decide(groups("a", 3), groups("a", 1)).is_none(), "a pod is to be adopted");
        let counts = ReplicaCounts::of_groups(&set(3), &groups("a", 3));
        let expected =
            ReplicaCounts { replicas: 3, labelled: 3, ready: 1, available: 1, terminating: 2, next: None };
        assert_eq!(counts, expected);
        assert_eq!(status(&set(3), &counts, None, now()).terminating_replicas, Some(2));
        assert_eq!(
            status(&ReplicationController::default(), &counts, None, now()).terminating_replicas,
            None
        );
    }

    #[test]
    fn a_set_rests_while_many_of_its_pods_are_not_ready() {
        let pause = |replicas, ready| ReplicaCounts { replicas, ready, ..ReplicaCounts::default() }.pause();
        assert_eq!(pause(9, 0), None);
        assert_eq!(pause(100, 91), None);
        assert_eq!(pause(100, 60), Some(Duration::from_millis(40)));
        assert_eq!(pause(5000, 0), Some(Duration::from_millis(100)));
        // While a set shrinks, more pods can be ready than the status counts as replicas.
        assert_eq!(pause(10, 20), None);
    }
}
