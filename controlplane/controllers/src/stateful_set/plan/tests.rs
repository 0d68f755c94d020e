use serde_json::{Value, json};

use super::*;

fn now() -> Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn set(replicas: i32, spec: Value) -> StatefulSet {
    let mut whole = json!({"replicas": replicas, "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"partition": 0}}});
    whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
    serde_json::from_value(json!({"metadata": {"name": "db"}, "spec": whole})).unwrap()
}

/// A pod: `0` is ready, `0-` is not ready, `0x` is being deleted, `0!` has failed, `0$` has succeeded, `0~` has the old
/// revision.
fn pod(text: &str) -> Arc<Pod> {
    let digits: String = text.chars().filter(char::is_ascii_digit).collect();
    let has = |mark: char| text.contains(mark);
    let phase = match (has('!'), has('$')) {
        (true, _) => "Failed",
        (false, true) => "Succeeded",
        (false, false) => "Running",
    };
    let ready = if has('-') { "False" } else { "True" };
    let deleted = has('x').then_some("2026-01-01T11:00:00Z");
    let revision = if has('~') { "old" } else { "new" };
    Arc::new(
        serde_json::from_value(json!({
            "metadata": {"name": format!("db-{digits}"), "uid": text, "deletionTimestamp": deleted,
                "labels": {"controller-revision-hash": revision}},
            "status": {"phase": phase, "conditions": [{"type": "Ready", "status": ready}]},
        }))
        .unwrap(),
    )
}

fn decide(set: &StatefulSet, pods: &str) -> String {
    let pods: Vec<_> = pods.split_whitespace().map(pod).collect();
    let actions = plan(&Snapshot { set, pods: &pods, update: "new", stale: &|_| false, now: now() });
    let texts = actions.iter().map(|action| match action {
        Action::Create { ordinal, updated: true } => format!("+{ordinal}"),
        Action::Create { ordinal, updated: false } => format!("+{ordinal}~"),
        Action::Delete(pod) => format!("-{}", &pod.name()[3..]),
    });
    texts.collect::<Vec<_>>().join(" ")
}

#[test]
fn ordered_pods_are_created_one_by_one_and_deleted_in_reverse() {
    let three = set(3, json!({}));
    for (pods, expect) in [
        ("", "+0"),
        ("0-", ""),
        ("0", "+1"),
        ("0 1x", ""),
        ("0 1! 2", "-1"),
        ("0 1 2", ""),
        ("0 1 2 3 4", "-4"),
        ("0 1 2 3 4x", ""),
        ("0 1- 2 3", ""),
        ("0 1 2 3-", "-3"),
        ("0 1 2 3- 4", "-4"),
        ("0 1 2 3- 4-", ""),
    ] {
        assert_eq!(decide(&three, pods), expect, "for {pods}");
    }
}

#[test]
fn parallel_pods_are_created_and_deleted_together() {
    let three = set(3, json!({"podManagementPolicy": "Parallel"}));
    for (pods, expect) in [("", "+0 +1 +2"), ("1-", "+0 +2"), ("0 1 2 3 4-", "-4 -3")] {
        assert_eq!(decide(&three, pods), expect, "for {pods}");
    }
}

#[test]
fn parallel_pods_are_updated_and_removed_while_another_one_is_replaced() {
    let three = set(3, json!({"podManagementPolicy": "Parallel"}));
    for (pods, expect) in [
        ("0!x 1~ 2~", "-2"),
        ("0! 1~ 2~", "-0 -2"),
        ("0$ 1~ 2~", "-0 -2"),
        ("0!x 1 2 3", "-3"),
        ("0! 1 2 3", "-0 -3"),
        ("0 1~ 2~ 3", "-3 -2"),
        ("0 1~ 2~ 3x", "-2"),
        ("1~ 2~", "+0 -2"),
        ("0 1~ 2~", "-2"),
        // The replaced pod has a higher ordinal than the outdated ones.
        ("0~ 1~ 2!", "-2"),
        ("0~ 1~ 2!x", ""),
        ("0~ 1~ 2!~x", ""),
        ("0~ 1~ 2!~", "-2"),
        ("0~ 1!~ 2", "-1"),
        ("0~ 1~", "+2"),
        ("0~ 2", "+1"),
    ] {
        assert_eq!(decide(&three, pods), expect, "for {pods}");
    }
}

#[test]
fn a_pod_that_waits_for_the_deletion_of_its_claim_delays_only_pods_with_a_lower_ordinal() {
    let three = set(3, json!({"podManagementPolicy": "Parallel"}));
    let of = |waiting: i32, pods: [&str; 2]| {
        let pods = pods.map(pod);
        let stale = |ordinal: i32| ordinal == waiting;
        let snapshot = Snapshot { set: &three, pods: &pods, update: "new", stale: &stale, now: now() };
        plan(&snapshot).len()
    };
    assert_eq!(of(0, ["1~", "2~"]), 1);
    assert_eq!(of(2, ["0~", "1~"]), 0);
}

#[test]
fn outdated_pods_that_are_not_ready_are_replaced_with_parallel_management_only() {
    let ordered = set(3, json!({}));
    for pods in ["0~ 1~ 2~-", "0~- 1~ 2~", "0~ 1-", "0~ 1~ 2x"] {
        assert_eq!(decide(&ordered, pods), "", "for {pods}");
    }
    assert_eq!(decide(&ordered, "0~ 1~ 2!"), "-2");
    let parallel = set(3, json!({"podManagementPolicy": "Parallel"}));
    for (pods, expect) in [
        ("0~ 1~ 2~-", "-2"),
        ("0~ 1~- 2", "-1"),
        ("0~- 1~- 2~-", "-2"),
        ("0~- 1~ 2~", "-2"),
        ("0~ 1~- 2-", ""),
        ("0~ 1~- 2x", ""),
    ] {
        assert_eq!(decide(&parallel, pods), expect, "for {pods}");
    }
}

#[test]
fn an_update_with_a_maximum_counts_all_unavailable_pods() {
    for policy in ["OrderedReady", "Parallel"] {
        let rolling =
            json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 2, "partition": 1}});
        let four = set(4, json!({"podManagementPolicy": policy, "updateStrategy": rolling}));
        for (pods, expect) in [("0~ 1~ 2~ 3~", "-3 -2"), ("0~ 1~ 2 3", "-1"), ("0~ 1 2 3", "")] {
            assert_eq!(decide(&four, pods), expect, "for {pods}, {policy}");
        }
    }
    let rolling = json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 2, "partition": 1}});
    let four = set(4, json!({"podManagementPolicy": "Parallel", "updateStrategy": rolling}));
    for (pods, expect) in [
        ("0~- 1~ 2~ 3~", "-3"),
        ("0~x 1~ 2~ 3~", "-3"),
        ("0~- 1~ 2~ 3-", ""),
        ("0~ 1~ 2~- 3~-", ""),
        ("0~ 1~ 2~ 3x", "-2"),
        // A missing or failed pod is unavailable, too.
        ("0~ 1~ 2~", "+3 -2"),
        ("1~ 2~ 3~", "+0~ -3"),
        ("1~ 2~ 3-", "+0~"),
        ("0~ 1! 2~ 3~", "-1 -3"),
        // The failed pod is one of those that the update may delete.
        ("0~ 1~ 2~ 3!~", "-3"),
    ] {
        assert_eq!(decide(&four, pods), expect, "for {pods}");
    }
}

#[test]
fn the_partition_protects_pods_and_determines_the_revision_of_new_pods() {
    for policy in ["OrderedReady", "Parallel"] {
        let rolling = json!({"type": "RollingUpdate", "rollingUpdate": {"partition": 2}});
        let of = |spec: Value| {
            let mut whole = json!({"podManagementPolicy": policy, "updateStrategy": rolling});
            whole.as_object_mut().unwrap().extend(spec.as_object().unwrap().clone());
            set(3, whole)
        };
        for (pods, expect) in [("0~ 1~ 2~", "-2"), ("0~ 1~ 2", ""), ("0 1 2~", "-2"), ("0~ 2", "+1~")] {
            assert_eq!(decide(&of(json!({})), pods), expect, "for {pods}, {policy}");
        }
        let shifted = of(json!({"ordinals": {"start": 4}}));
        for (pods, expect) in [("4~ 5~ 6~", "-6"), ("4~ 5~ 6", ""), ("4~ 5~", "+6"), ("4~ 6", "+5~")] {
            assert_eq!(decide(&shifted, pods), expect, "for {pods}, {policy}");
        }
    }
    let above = json!({"type": "RollingUpdate", "rollingUpdate": {"partition": i32::MAX}});
    assert_eq!(decide(&set(2, json!({"updateStrategy": above})), "0~ 1~"), "");
}

#[test]
fn one_reconcile_creates_a_limited_number_of_parallel_pods() {
    let huge = set(i32::MAX, json!({"podManagementPolicy": "Parallel"}));
    let pods = [pod("1"), pod("2147483000!")];
    let actions = plan(&Snapshot { set: &huge, pods: &pods, update: "new", stale: &|_| false, now: now() });
    let created: Vec<i32> = actions
        .iter()
        .filter_map(|action| match action {
            Action::Create { ordinal, .. } => Some(*ordinal),
            Action::Delete(_) => None,
        })
        .collect();
    assert_eq!((created.len(), created[0], created[1], created[BURST - 1]), (BURST, 0, 2, 500));
    assert_eq!(actions.len(), BURST + 1, "the failed pod is deleted, too");
}

#[test]
fn an_update_replaces_the_highest_old_pod_above_the_partition() {
    let three = set(3, json!({}));
    for (pods, expect) in [("0~ 1~ 2~", "-2"), ("0~ 1~ 2-", ""), ("0~ 1~ 2", "-1"), ("0 1 2", "")] {
        assert_eq!(decide(&three, pods), expect, "for {pods}");
    }
    let rolling = |rolling: Value| {
        set(
            3,
            json!({"podManagementPolicy": "Parallel", "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": rolling}}),
        )
    };
    assert_eq!(decide(&rolling(json!({"partition": 2})), "0~ 1~ 2~"), "-2");
    assert_eq!(decide(&rolling(json!({"partition": 2})), "0~ 1~ 2"), "");
    assert_eq!(decide(&rolling(json!({"partition": 2})), ""), "+0~ +1~ +2");
    assert_eq!(decide(&rolling(json!({"maxUnavailable": 2})), "0~ 1~ 2~"), "-2 -1");
    assert_eq!(decide(&rolling(json!({"maxUnavailable": "50%"})), "0~ 1~- 2~"), "");
    // Without maxUnavailable only pods with a higher ordinal hold up the update.
    assert_eq!(decide(&rolling(json!({})), "0~ 1x 2~"), "-2");
    assert_eq!(decide(&rolling(json!({})), "0~ 1x 2"), "");
    assert_eq!(decide(&rolling(json!({"maxUnavailable": 1})), "0~ 1x 2~"), "");
    let on_delete = set(2, json!({"updateStrategy": {"type": "OnDelete"}}));
    assert_eq!(decide(&on_delete, "0~ 1~"), "");
}

#[test]
fn ordinals_begin_at_the_configured_start_and_pods_wait_for_min_ready_seconds() {
    let shifted = set(2, json!({"ordinals": {"start": 5}}));
    assert_eq!(decide(&shifted, "5"), "+6");
    assert_eq!(decide(&shifted, "5 6 0"), "-0");
    let slow = set(2, json!({"minReadySeconds": 60}));
    assert_eq!(decide(&slow, "0"), "");
}

#[test]
fn an_action_is_above_the_size_only_if_it_deletes_a_pod_outside_of_the_ordinals() {
    let two = set(2, json!({"ordinals": {"start": 1}}));
    assert!(is_above_size(&two, &Action::Delete(pod("3"))) && is_above_size(&two, &Action::Delete(pod("0"))));
    assert!(!is_above_size(&two, &Action::Delete(pod("2!"))));
    assert!(!is_above_size(&two, &Action::Create { ordinal: 1, updated: true }));
}

#[test]
fn the_creation_and_replacement_of_pods_is_the_first_step() {
    let two = set(2, json!({}));
    for (pod_text, expect) in [("1!", false), ("1$", false), ("1~", true), ("2", true), ("2!", true)] {
        assert_eq!(is_later_step(&two, &Action::Delete(pod(pod_text))), expect, "for {pod_text}");
    }
    assert!(!is_later_step(&two, &Action::Create { ordinal: 1, updated: true }));
}

#[test]
fn missing_and_unready_pods_are_unavailable() {
    let of = |set: &StatefulSet, pods: &str| {
        let pods: Vec<_> = pods.split_whitespace().map(pod).collect();
        availability(set, &pods, now()).map(|found| (found.max_unavailable, found.unavailable))
    };
    let three = set(3, json!({}));
    for (pods, unavailable) in [("", 3), ("0 1 2", 0), ("0 1- 2x", 2), ("0 1 2 3-", 0), ("0 3", 2)] {
        assert_eq!(of(&three, pods), Some((1, unavailable)), "{pods}");
    }
    let rolling = json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 2}});
    let parallel = set(3, json!({"updateStrategy": rolling, "podManagementPolicy": "Parallel"}));
    let expect = SetAvailability { is_parallel: true, max_unavailable: 2, unavailable: 3 };
    assert_eq!(availability(&parallel, &[], now()), Some(expect));
    assert_eq!(of(&set(3, json!({"updateStrategy": {"type": "OnDelete"}})), ""), None);
}
