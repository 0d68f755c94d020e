//! Tests of the decision about an eviction, without a server. `server/tests/disruption.rs` tests requests.

use super::*;

const NOW: &str = "2026-01-01T00:00:00Z";

fn pod(phase: &str, ready: bool) -> Value {
    let ready = if ready { "True" } else { "False" };
    json!({"metadata": {"name": "p", "labels": {"app": "a"}}, "status": {"phase": phase,
        "conditions": [{"type": "Ready", "status": ready}]}})
}

fn budget(allowed: i64) -> Value {
    json!({"metadata": {"name": "b", "generation": 2}, "spec": {"selector": {"matchLabels": {"app": "a"}}},
        "status": {"observedGeneration": 2, "disruptionsAllowed": allowed, "currentHealthy": 3, "desiredHealthy": 2,
            "conditions": [{"type": "DisruptionAllowed", "status": "True", "reason": "SufficientPods"}]}})
}

fn decide(pod: &Value, budgets: &[Value]) -> Result<Verdict> {
    verdict(by_resource("policy", "v1", "poddisruptionbudgets").unwrap(), pod, budgets, NOW)
}

/// The HTTP code of an error with the message of its cause. Without a cause, the message of the error.
fn error(pod: &Value, budgets: &[Value]) -> (u16, String) {
    let error = decide(pod, budgets).unwrap_err();
    let cause = error.details["causes"][0]["message"].as_str();
    (error.code, cause.unwrap_or(&error.message).to_owned())
}

#[test]
fn dry_runs_of_query_and_body_must_be_equal() {
    let check = |query: &[&str], body: Value| {
        let query: Vec<String> = query.iter().map(|one| (*one).to_owned()).collect();
        check_dry_runs(&query, &body).map_err(|error| (error.code, error.message))
    };
    assert_eq!(check(&["All"], Value::Null), Ok(()));
    assert_eq!(check(&[], json!(["All"])), Ok(()));
    assert_eq!(check(&["All"], json!(["All"])), Ok(()));
    let message = "Non-matching dry-run options in request and content: [All] and [All All]".to_owned();
    assert_eq!(check(&["All"], json!(["All", "All"])), Err((500, message)));
}

#[test]
fn pods_that_do_not_run_or_have_no_budget_are_deleted() {
    let none = [budget(0)];
    for phase in ["Succeeded", "Failed"] {
        assert_eq!(decide(&pod(phase, false), &none).unwrap(), Verdict::Delete);
    }
    assert_eq!(decide(&pod("Pending", false), &none).unwrap(), Verdict::DeleteUnchanged(None));
    let mut deleted = pod("Running", true);
    deleted["metadata"]["deletionTimestamp"] = NOW.into();
    assert_eq!(decide(&deleted, &none).unwrap(), Verdict::Delete);
    assert_eq!(decide(&pod("Running", true), &[]).unwrap(), Verdict::Delete);
}

#[test]
fn each_eviction_uses_one_allowed_disruption() {
    let Verdict::Disrupt(left) = decide(&pod("Running", true), &[budget(2)]).unwrap() else {
        panic!("no disruption")
    };
    assert_eq!(left["status"]["disruptionsAllowed"], 1);
    assert_eq!(left["status"]["disruptedPods"], json!({"p": NOW}));
    assert_eq!(left["status"]["conditions"][0]["status"], "True");
    let Verdict::Disrupt(left) = decide(&pod("Running", true), &[left]).unwrap() else {
        panic!("no disruption")
    };
    assert_eq!(left["status"]["conditions"][0]["reason"], "InsufficientPods");
    let needs = "The disruption budget b needs 2 healthy pods and has 3 currently".to_owned();
    assert_eq!(error(&pod("Running", true), &[left]), (429, needs));
}

#[test]
fn a_budget_whose_status_is_not_up_to_date_allows_no_disruption() {
    let mut old = budget(1);
    old["metadata"]["generation"] = 3.into();
    let (code, cause) = error(&pod("Running", true), &[old.clone()]);
    assert!(code == 429 && cause.contains("still being processed"), "{cause}");
    assert_eq!(decide(&pod("Running", true), &[old]).unwrap_err().details["retryAfterSeconds"], 10);
    let mut failed = budget(0);
    failed["status"]["conditions"][0]["reason"] = "SyncFailed".into();
    failed["status"]["conditions"][0]["message"] = "no controllers".into();
    let (code, cause) = error(&pod("Running", true), &[failed]);
    assert!(code == 429 && cause.ends_with("because it failed sync: no controllers"), "{cause}");
    assert_eq!(error(&pod("Running", true), &[budget(-1)]).0, 403);
}

#[test]
fn several_budgets_are_too_many() {
    let failure = decide(&pod("Running", true), &[budget(1), budget(1)]).unwrap_err();
    let status = failure.status();
    assert_eq!((status["code"].as_u64(), status.get("reason")), (Some(500), None));
}

#[test]
fn an_unhealthy_pod_is_deleted_if_enough_pods_are_healthy_or_the_policy_is_always_allow() {
    let unready = pod("Running", false);
    let unchanged = Verdict::DeleteUnchanged(Some("b".to_owned()));
    assert_eq!(decide(&unready, &[budget(0)]).unwrap(), unchanged);
    let mut short = budget(0);
    short["status"]["currentHealthy"] = 1.into();
    assert_eq!(error(&unready, &[short.clone()]).0, 429);
    short["spec"]["unhealthyPodEvictionPolicy"] = "IfHealthyBudget".into();
    assert_eq!(error(&unready, &[short.clone()]).0, 429);
    short["spec"]["unhealthyPodEvictionPolicy"] = "AlwaysAllow".into();
    assert_eq!(decide(&unready, &[short]).unwrap(), unchanged);
    let mut none = budget(0);
    none["status"]["desiredHealthy"] = 0.into();
    assert_eq!(error(&unready, &[none]).0, 429);
}

#[test]
fn a_pod_is_marked_once() {
    let marked = targeted(&pod("Running", true), NOW);
    assert_eq!(marked["status"]["conditions"][1]["reason"], "EvictionByEvictionAPI");
    assert_eq!(targeted(&marked, "later"), marked);
    let mut stale = marked.clone();
    stale["status"]["conditions"][1]["status"] = "False".into();
    assert_eq!(targeted(&stale, NOW), marked);
}
