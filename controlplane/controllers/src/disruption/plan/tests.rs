//! Plans of pod disruption budgets.

use serde_json::{Value, json};

use super::*;

const NOW: &str = "2026-01-01T00:10:00Z";

fn budget(spec: Value, status: Value) -> PodDisruptionBudget {
    let metadata = json!({"name": "b", "namespace": "n", "generation": 2});
    serde_json::from_value(json!({"metadata": metadata, "spec": spec, "status": status})).unwrap()
}

fn pod(name: &str, ready: bool) -> Arc<Pod> {
    let status = if ready { "True" } else { "False" };
    let pod = json!({"metadata": {"name": name, "labels": {"app": "a"}},
        "status": {"phase": "Running", "conditions": [{"type": "Ready", "status": status}]}});
    Arc::new(serde_json::from_value(pod).unwrap())
}

fn of(uid: &str, scale: i32) -> Controller {
    Controller::Known { uid: uid.to_owned(), scale }
}

fn pods(ready: usize, unready: usize, controller: &Controller) -> Vec<SelectedPod> {
    let all = (0..ready + unready).map(|number| pod(&format!("p{number}"), number < ready));
    all.map(|pod| SelectedPod { pod, controller: controller.clone() }).collect()
}

fn look(budget: &PodDisruptionBudget, pods: &[SelectedPod]) -> Verdict {
    verdict(budget, pods, NOW.parse().unwrap())
}

/// The numbers of the status: healthy, desired, expected, allowed.
fn numbers(verdict: &Verdict) -> [i32; 4] {
    let status = &verdict.status;
    [status.current_healthy, status.desired_healthy, status.expected_pods, status.disruptions_allowed]
        .map(Option::unwrap)
}

#[test]
fn healthy_pods_above_the_number_or_percentage_may_be_disrupted() {
    for (spec, pods, expect) in [
        (json!({"minAvailable": 2}), pods(3, 0, &Controller::None), [3, 2, 3, 1]),
        (json!({"minAvailable": 2}), pods(2, 1, &Controller::Unknown), [2, 2, 3, 0]),
        (json!({"minAvailable": 5}), pods(3, 0, &Controller::None), [3, 5, 3, 0]),
        (json!({"minAvailable": 0}), Vec::new(), [0, 0, 0, 0]),
        (json!({"minAvailable": "50%"}), pods(4, 0, &of("x", 5)), [4, 3, 5, 1]),
        (json!({"maxUnavailable": 1}), pods(3, 0, &of("x", 3)), [3, 2, 3, 1]),
        (json!({"maxUnavailable": 1}), pods(3, 0, &of("x", 4)), [3, 3, 4, 0]),
        (json!({"maxUnavailable": "30%"}), pods(10, 0, &of("x", 10)), [10, 7, 10, 3]),
        (json!({"maxUnavailable": "25%"}), pods(3, 0, &of("x", 3)), [3, 2, 3, 1]),
        (json!({"maxUnavailable": 9}), pods(1, 2, &of("x", 3)), [1, 0, 3, 1]),
        (json!({}), pods(3, 0, &of("x", 3)), [3, 0, 0, 0]),
    ] {
        let found = look(&budget(spec.clone(), json!({})), &pods);
        assert_eq!(numbers(&found), expect, "{spec}");
        assert_eq!(found.status.observed_generation, Some(2));
        let condition = &found.status.conditions.unwrap()[0];
        let reason = if expect[3] > 0 { "SufficientPods" } else { "InsufficientPods" };
        assert_eq!((condition.type_.as_str(), condition.reason.as_str()), ("DisruptionAllowed", reason));
    }
}

#[test]
fn scales_add_up_and_pods_without_a_controller_are_reported() {
    let mut mixed = pods(2, 0, &of("x", 2));
    mixed.extend(pods(3, 0, &of("y", 3)));
    let share = budget(json!({"maxUnavailable": "20%"}), json!({}));
    assert_eq!(numbers(&look(&share, &mixed)), [5, 4, 5, 1]);
    mixed.push(SelectedPod { pod: pod("alone", true), controller: Controller::None });
    let found = look(&share, &mixed);
    assert!(found.unmanaged && found.failure.is_none());
    assert!(!look(&budget(json!({"minAvailable": 1}), json!({})), &mixed).unmanaged);
}

#[test]
fn an_unknown_number_allows_no_disruption() {
    let before = json!({"disruptionsAllowed": 3, "observedGeneration": 1, "currentHealthy": 4});
    let found = look(&budget(json!({"maxUnavailable": 1}), before), &pods(1, 0, &Controller::Unknown));
    assert_eq!(found.failure.as_deref(), Some("found no controllers for pod \"p0\""));
    assert_eq!((found.status.disruptions_allowed, found.status.current_healthy), (Some(0), Some(4)));
    let condition = &found.status.conditions.unwrap()[0];
    assert_eq!((condition.reason.as_str(), condition.observed_generation), ("SyncFailed", Some(1)));
}

#[test]
fn an_evicted_pod_does_not_count_until_its_time_has_passed() {
    let at = |since: &str| {
        let status = json!({"disruptedPods": {"p0": since, "gone": since}});
        look(&budget(json!({"minAvailable": 1}), status), &pods(3, 0, &Controller::None))
    };
    let soon = at("2026-01-01T00:09:30Z");
    assert_eq!(numbers(&soon), [2, 1, 3, 1]);
    assert_eq!(soon.status.disrupted_pods.as_ref().unwrap().keys().collect::<Vec<_>>(), ["p0"]);
    assert_eq!(soon.recheck, Some("2026-01-01T00:11:31Z".parse().unwrap()));
    let late = at("2026-01-01T00:07:59Z");
    assert_eq!(numbers(&late), [3, 1, 3, 2]);
    assert_eq!((late.status.disrupted_pods, late.overdue.len(), late.recheck), (None, 1, None));
}

#[test]
fn a_pod_that_is_being_deleted_is_not_healthy() {
    let mut all = pods(2, 0, &Controller::None);
    let pod = Arc::make_mut(&mut all[0].pod);
    pod.metadata.deletion_timestamp = Some(Time(NOW.parse().unwrap()));
    let status = json!({"disruptedPods": {"p0": NOW}});
    let found = look(&budget(json!({"minAvailable": 1}), status), &all);
    assert_eq!((numbers(&found), found.status.disrupted_pods), ([1, 1, 2, 0], None));
}

#[test]
fn a_second_reconcile_changes_nothing() {
    let spec = json!({"minAvailable": 1});
    let mut own = budget(
        spec,
        json!({"conditions": [{"type": "Other", "status": "True", "reason": "X",
        "message": "", "lastTransitionTime": "2025-01-01T00:00:00Z"}]}),
    );
    own.status = look(&own, &pods(2, 0, &Controller::None)).status;
    assert_eq!(own.status.conditions.as_ref().unwrap().len(), 2);
    let later = verdict(&own, &pods(2, 0, &Controller::None), "2026-01-01T00:20:00.5Z".parse().unwrap());
    assert_eq!(later.status, own.status);
}

#[test]
fn no_selector_selects_nothing_and_an_empty_one_all() {
    let selects = |spec: Value| selects(&budget(spec, json!({})), &pod("p", true));
    assert!(!selects(json!({})));
    assert!(selects(json!({"selector": {}})));
    assert!(selects(json!({"selector": {"matchLabels": {"app": "a"}}})));
    assert!(!selects(json!({"selector": {"matchLabels": {"app": "b"}}})));
}
