use serde_json::{Value, json};

use super::placement::{Decision, Outcome, UNSCHEDULABLE, is_alike, place};
use super::*;
use crate::config::Profile;
use crate::fixture;
use crate::hint::Changes;
use crate::snapshot::Snapshot;

fn pod(name: &str, group: &str, cpu: &str) -> Pod {
    prioritized(name, group, cpu, 0)
}

fn prioritized(name: &str, group: &str, cpu: &str, priority: i32) -> Pod {
    let container = json!({"resources": {"requests": {"cpu": cpu}}});
    let group = json!({"podGroupName": group});
    fixture::pod(name, json!({"schedulingGroup": group, "priority": priority, "containers": [container]}))
}

fn group(name: &str, policy: Value) -> PodGroup {
    let metadata = json!({"name": name, "namespace": "d", "uid": name});
    serde_json::from_value(json!({"metadata": metadata, "spec": {"schedulingPolicy": policy}})).unwrap()
}

fn gang(name: &str, count: i32) -> PodGroup {
    group(name, json!({"gang": {"minCount": count}}))
}

fn key(name: &str) -> Key {
    Key::new("d", name)
}

fn sorted(mut uids: Vec<String>) -> Vec<String> {
    uids.sort();
    uids
}

fn placed(pods: &[Pod], snapshot: &mut Snapshot, needed: usize) -> Outcome {
    let members: Vec<&Pod> = pods.iter().collect();
    place(&members, &Profile::default(), snapshot, needed, &|uid| pods.iter().any(|pod| pod.uid() == uid))
}

/// For each pod, whether it is bound or refused.
fn texts(outcome: &Outcome) -> Vec<&str> {
    let text = |decision: &'_ Decision| match decision {
        Decision::Bind(..) => "bound",
        Decision::Refuse { .. } => "refused",
    };
    outcome.decisions.iter().map(text).collect()
}

fn message(decision: &Decision) -> &str {
    match decision {
        Decision::Bind(..) => "",
        Decision::Refuse { message, .. } => message,
    }
}

/// Requested CPUs of each node, in thousandths.
fn used(snapshot: &Snapshot) -> Vec<i128> {
    snapshot.candidates().map(|node| node.info.requested.cpu_millis).collect()
}

#[test]
fn pods_are_gated_until_their_group_and_enough_pods_exist() {
    let mut groups = Groups::default();
    assert!(groups.put_pod(&fixture::pod("alone", json!({})), false).is_empty());
    for name in ["a", "b"] {
        assert!(groups.put_pod(&pod(name, "g", "1"), false).is_empty());
        assert_eq!(groups.policy(&key("g")), Policy::Gated);
        groups.gate(name);
    }
    assert!(groups.put(gang("other", 1)).is_empty());
    assert!(groups.put(gang("g", 3)).is_empty());
    let third = pod("c", "g", "1");
    assert_eq!(sorted(groups.put_pod(&third, false)), ["a", "b"]);
    assert_eq!(groups.policy(&key("g")), Policy::Gang { needed: 3 });
    assert!(groups.put_pod(&third, false).is_empty(), "the other pods are woken once");
    assert_eq!(sorted(groups.waiting(&key("g"))), ["a", "b", "c"]);
    groups.remove_pod("a");
    assert_eq!(groups.policy(&key("g")), Policy::Gated, "a member was deleted");
}

#[test]
fn a_pod_of_the_policy_basic_needs_only_its_group() {
    let mut groups = Groups::default();
    groups.put_pod(&pod("a", "g", "1"), false);
    groups.gate("a");
    assert_eq!(groups.put(group("g", json!({"basic": {}}))), ["a"]);
    assert_eq!(groups.policy(&key("g")), Policy::Basic);
    groups.remove(&key("g"));
    assert_eq!(groups.policy(&key("g")), Policy::Gated);
    let mut limited = gang("g", 1);
    limited.spec.scheduling_constraints = Some(json!({"topology": [{"key": "zone"}]}));
    groups.put(limited.clone());
    assert_eq!(groups.policy(&key("g")), Policy::Unsupported);
    limited.spec.scheduling_constraints = Some(json!({"topology": []}));
    groups.put(limited);
    assert_eq!(groups.policy(&key("g")), Policy::Gang { needed: 1 });
}

#[test]
fn another_min_count_wakes_refused_pods() {
    let mut groups = Groups::default();
    for name in ["a", "b"] {
        groups.put_pod(&pod(name, "g", "1"), false);
    }
    assert_eq!(groups.put(gang("g", 2)).len(), 2);
    assert!(groups.put(gang("g", 2)).is_empty(), "only the status changed");
    assert!(groups.put(gang("g", 3)).is_empty());
    assert_eq!(groups.policy(&key("g")), Policy::Gated);
    assert_eq!(sorted(groups.put(gang("g", 1))), ["a", "b"]);
    let mut again = gang("g", 1);
    again.metadata.uid = Some("again".to_owned());
    assert_eq!(groups.put(again).len(), 2, "the group was created again");
}

#[test]
fn bound_pods_count_after_a_restart() {
    let mut groups = Groups::default();
    groups.put_pod(&pod("a", "g", "1"), true);
    groups.put_pod(&pod("b", "g", "1"), true);
    for name in ["c", "d"] {
        groups.put_pod(&pod(name, "g", "1"), false);
    }
    groups.put(gang("g", 4));
    assert_eq!(groups.policy(&key("g")), Policy::Gang { needed: 2 });
    groups.assume("c");
    assert_eq!(groups.policy(&key("g")), Policy::Gang { needed: 1 });
    groups.forget("c");
    assert_eq!(groups.policy(&key("g")), Policy::Gang { needed: 2 }, "its binding failed");
    // Another client binds a pod.
    assert_eq!(groups.put_pod(&pod("c", "g", "1"), true), ["d"]);
}

#[test]
fn groups_without_object_and_pods_are_removed() {
    let mut groups = Groups::default();
    groups.put_pod(&pod("a", "g", "1"), false);
    groups.list();
    groups.put_listed(gang("g", 1));
    groups.put_listed(gang("h", 1));
    groups.finish_list();
    groups.list();
    groups.put_listed(gang("g", 1));
    groups.finish_list();
    assert_eq!(groups.groups.keys().collect::<Vec<_>>(), [&key("g")]);
    groups.remove(&key("g"));
    assert!(!groups.is_empty());
    groups.remove_pod("a");
    groups.remove_pod("a");
    assert!(groups.is_empty() && groups.members.is_empty());
}

#[test]
fn one_write_of_a_group_is_in_flight_and_success_is_final() {
    let mut groups = Groups::default();
    let refused = || Verdict::refused(UNSCHEDULABLE);
    let scheduled = Verdict::scheduled;
    assert_eq!(groups.report(&key("g"), refused()), None, "the group does not exist");
    groups.put(gang("g", 1));
    let first = groups.report(&key("g"), refused()).unwrap();
    assert_eq!((first.uid.as_str(), &first.condition["status"]), ("g", &json!("False")));
    assert_eq!(groups.report(&key("g"), scheduled()), None);
    assert_eq!(groups.report(&key("g"), refused()), None);
    let second = groups.written(&first, true).unwrap();
    assert_eq!(second.condition["status"], "True");
    assert_eq!(groups.report(&key("g"), scheduled()), None);
    assert_eq!(groups.written(&second, true), None, "the condition is written once");
    assert_eq!(groups.report(&key("g"), refused()), None);
    let third = groups.report(&key("g"), scheduled()).unwrap();
    assert_eq!(groups.written(&third, false), None);
    assert!(groups.report(&key("g"), refused()).is_some(), "the success could not be written");
}

#[test]
fn a_group_that_is_created_again_gets_its_own_condition_and_keeps_its_back_off() {
    let mut groups = Groups::default();
    let refused = || Verdict::refused(UNSCHEDULABLE);
    groups.put_pod(&pod("a", "g", "1"), false);
    groups.put(gang("g", 1));
    let until = tokio::time::Instant::now();
    groups.set_backoff(&key("g"), until);
    let first = groups.report(&key("g"), refused()).unwrap();
    groups.remove(&key("g"));
    let mut again = gang("g", 1);
    again.metadata.uid = Some("again".to_owned());
    groups.put(again);
    assert_eq!(groups.report(&key("g"), refused()), None, "a write is in flight");
    let second = groups.written(&first, false).unwrap();
    assert_eq!(second.uid, "again");
    assert_eq!(groups.backoff_until(&key("g")), Some(until));
    groups.remove(&key("g"));
    groups.remove_pod("a");
    assert_eq!(groups.written(&second, false), None);
    assert_eq!(groups.backoff_until(&key("g")), None);
    assert!(groups.is_empty());
}

#[test]
fn no_further_pod_is_tried_once_a_gang_cannot_fit() {
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
    let gang = [pod("p", "g", "9"), pod("q", "g", "8"), pod("r", "g", "1")];
    let tried = |outcome: &Outcome| -> Vec<bool> {
        let messages = outcome.decisions.iter().map(message);
        messages.map(|message| message.starts_with("0/1 nodes are available")).collect()
    };
    let outcome = placed(&gang, &mut snapshot, 3);
    assert_eq!(tried(&outcome), [true, false, false]);
    assert!(message(&outcome.decisions[2]).starts_with("pod group is unschedulable, waiting for minCount"));
    assert_eq!(outcome.helped_by, Changes::GROUP | Changes::NODE | Changes::POD_GONE);
    let outcome = placed(&gang, &mut snapshot, 2);
    assert_eq!(tried(&outcome), [true, true, false]);
    assert_eq!(texts(&placed(&gang, &mut snapshot, 1)), ["refused", "refused", "bound"]);
    // The gang needs one more pod, which is not ready to be scheduled.
    assert_eq!(tried(&placed(&gang, &mut snapshot, 4)), [false, false, false]);
    assert_eq!(used(&snapshot), [0]);
}

#[test]
fn a_gang_is_placed_as_a_whole_or_not_at_all() {
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
    let gang = [pod("p", "g", "3"), pod("q", "g", "3"), pod("r", "g", "3")];
    let outcome = placed(&gang, &mut snapshot, 3);
    assert_eq!(texts(&outcome), ["refused", "refused", "refused"]);
    assert_eq!(outcome.verdict, Verdict::refused(UNSCHEDULABLE));
    let full = "0/2 nodes are available: 2 Insufficient cpu. no new claims to deallocate, preemption: \
                0/2 nodes are available: 2 No preemption victims found for incoming pod.";
    assert!(message(&outcome.decisions[0]).starts_with("pod group is unschedulable, waiting for minCount"));
    assert_eq!(message(&outcome.decisions[2]), full);
    assert_eq!(outcome.helped_by, Changes::GROUP | Changes::NODE | Changes::POD_GONE);
    assert_eq!(used(&snapshot), [0, 0], "a gang that does not fit holds no resources");
    let outcome = placed(&gang, &mut snapshot, 2);
    assert_eq!(texts(&outcome), ["bound", "bound", "refused"]);
    assert_eq!(outcome.verdict, Verdict::scheduled());
    assert_eq!(used(&snapshot), [0, 0], "the caller places the pods");
}

#[test]
fn of_two_gangs_that_fit_alone_the_first_is_placed() {
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
    let one = [pod("p", "one", "3"), pod("q", "one", "3")];
    let other = [pod("r", "other", "2"), pod("s", "other", "3")];
    for (pod, decision) in one.iter().zip(placed(&one, &mut snapshot, 2).decisions) {
        let Decision::Bind(node, _) = decision else { panic!("the first gang fits") };
        snapshot.place(pod, &node);
    }
    assert_eq!(texts(&placed(&other, &mut snapshot, 2)), ["refused", "refused"]);
    assert_eq!(used(&snapshot), [3000, 3000]);
    for pod in &one {
        snapshot.remove(pod.uid());
    }
    assert_eq!(texts(&placed(&other, &mut snapshot, 2)), ["bound", "bound"]);
}

#[test]
fn pods_are_preempted_only_for_a_gang_that_fits_afterwards() {
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({})), fixture::node("b", json!({}))]);
    snapshot
        .place(&fixture::pod("low", json!({"containers": [{"resources": {"requests": {"cpu": "3"}}}]})), "a");
    let gang: Vec<Pod> = ["p", "q", "r"].map(|name| prioritized(name, "g", "3", 10)).into();
    let outcome = placed(&gang, &mut snapshot, 3);
    assert_eq!(texts(&outcome), ["refused", "refused", "refused"]);
    let evicted = |outcome: &Outcome| -> Vec<(Option<String>, Vec<String>)> {
        let refused = outcome.decisions.iter().filter_map(|decision| match decision {
            Decision::Bind(..) => None,
            Decision::Refuse { nominated, victims, .. } => {
                Some((nominated.clone(), victims.iter().map(|victim| victim.name.clone()).collect()))
            }
        });
        refused.collect()
    };
    assert_eq!(evicted(&outcome), [(None, vec![]), (None, vec![]), (None, vec![])]);
    assert_eq!(used(&snapshot), [3000, 0], "the victim stays");
    let outcome = placed(&gang[..2], &mut snapshot, 2);
    let expected = [(Some("b".to_owned()), vec![]), (Some("a".to_owned()), vec!["low".to_owned()])];
    assert_eq!(evicted(&outcome), expected);
    let waits = "pod group is unschedulable, pod group is waiting for preemption to complete";
    assert_eq!((message(&outcome.decisions[0]), outcome.verdict.message.as_str()), (waits, waits));
    assert_eq!(used(&snapshot), [3000, 0]);
    // The victim terminates: the gang keeps its nodes, and no other pod is evicted.
    let mut low = fixture::pod("low", json!({"containers": [{"resources": {"requests": {"cpu": "3"}}}]}));
    low.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    let target = json!([{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]);
    low.status.conditions = serde_json::from_value(target).unwrap();
    snapshot.place(&low, "a");
    let mut gang = gang[..2].to_vec();
    for (pod, node) in gang.iter_mut().zip(["b", "a"]) {
        snapshot.nominate(pod, node);
        pod.status.nominated_node_name = Some(node.to_owned());
    }
    let outcome = placed(&gang, &mut snapshot, 2);
    assert_eq!(evicted(&outcome), [(Some("b".to_owned()), vec![]), (Some("a".to_owned()), vec![])]);
    snapshot.remove("low");
    assert_eq!(texts(&placed(&gang, &mut snapshot, 2)), ["bound", "bound"]);
}

#[test]
fn equal_pods_are_checked_once_unless_they_have_own_claims() {
    let own = |name: &str| {
        let mut pod = pod(name, "g", "1");
        pod.spec.volumes = serde_json::from_value(json!([{"name": "v", "ephemeral": {}}])).unwrap();
        pod
    };
    assert!(is_alike(&pod("p", "g", "1"), &pod("q", "g", "1")));
    assert!(!is_alike(&pod("p", "g", "1"), &pod("q", "g", "2")));
    assert!(!is_alike(&pod("p", "g", "1"), &prioritized("q", "g", "1", 5)));
    assert!(!is_alike(&own("p"), &own("q")));
    let mut nominated = pod("q", "g", "1");
    nominated.status.nominated_node_name = Some("a".to_owned());
    assert!(!is_alike(&pod("p", "g", "1"), &nominated));
}

#[test]
fn pods_of_a_gang_are_not_victims_of_each_other() {
    let mut snapshot = fixture::snapshot(&[fixture::node("a", json!({}))]);
    let gang = [prioritized("low", "g", "3", 0), prioritized("high", "g", "3", 10)];
    let outcome = placed(&gang, &mut snapshot, 2);
    assert_eq!(texts(&outcome), ["refused", "refused"]);
    assert!(!outcome.verdict.is_scheduled());
    assert_eq!(used(&snapshot), [0]);
    let outcome = placed(&gang, &mut snapshot, 1);
    assert_eq!(texts(&outcome), ["bound", "refused"]);
}
