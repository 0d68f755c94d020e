use serde_json::{Value, json};

use super::super::status;
use super::*;
use crate::object::{Job, ObjectExt};

fn now() -> jiff::Timestamp {
    "2026-01-01T12:00:00Z".parse().unwrap()
}

fn job(spec: Value, status: Value) -> Job {
    serde_json::from_value(json!({"metadata": {"name": "j", "uid": "j"}, "spec": spec, "status": status}))
        .unwrap()
}

/// A pod: `1` is active, `1+` has succeeded, `1!` has failed, `1x` is being deleted; `1:2` has index 2; `1.` is
/// counted.
fn pod(text: &str) -> Arc<Pod> {
    let has = |mark: char| text.contains(mark);
    let phase = if has('+') {
        "Succeeded"
    } else if has('!') {
        "Failed"
    } else {
        "Running"
    };
    let (uid, index) = text.trim_end_matches(['+', '!', 'x', '.']).split_once(':').unwrap_or((text, ""));
    let uid = uid.trim_end_matches(['+', '!', 'x', '.']);
    let finalizers = if has('.') { json!([]) } else { json!([super::super::FINALIZER]) };
    let annotations =
        if index.is_empty() { json!({}) } else { json!({(crate::annotation::JOB_INDEX): index}) };
    let code = i32::from(has('!')) * 3;
    Arc::new(
        serde_json::from_value(json!({
            "metadata": {"name": uid, "uid": uid, "namespace": "n", "finalizers": finalizers, "annotations": annotations,
                "creationTimestamp": "2026-01-01T10:00:00Z", "deletionTimestamp": has('x').then_some("2026-01-01T11:00:00Z")},
            "status": {"phase": phase, "containerStatuses": [{"name": "c", "ready": false, "restartCount": 0, "image": "i",
                "imageID": "i", "state": {"terminated": {"exitCode": code, "finishedAt": "2026-01-01T10:30:00Z"}}}]},
        }))
        .unwrap(),
    )
}

fn pods(texts: &str) -> Vec<Arc<Pod>> {
    texts.split_whitespace().map(pod).collect()
}

fn decide(job: &Job, texts: &str) -> String {
    let pods = pods(texts);
    match plan(&ObservedJob::of(job, &pods, now())) {
        Change::Nothing => String::new(),
        Change::Wait(_) => "wait".to_owned(),
        Change::Create(new) => {
            let texts = new.iter().map(|new| new.index.map_or("+".to_owned(), |index| format!("+{index}")));
            texts.collect::<Vec<_>>().join(" ")
        }
        Change::Delete(pods) | Change::Discard(pods) => {
            pods.iter().map(|pod| format!("-{}", pod.name())).collect::<Vec<_>>().join(" ")
        }
    }
}

fn updated(job: &Job, texts: &str) -> (Value, String) {
    let pods = pods(texts);
    let update = status::update(&ObservedJob::of(job, &pods, now()));
    let finalize: Vec<&str> = update.finalize.iter().map(|pod| pod.name()).collect();
    (serde_json::to_value(update.status).unwrap(), finalize.join(" "))
}

fn conditions(status: &Value) -> String {
    let list = status["conditions"].as_array().cloned().unwrap_or_default();
    list.iter()
        .map(|condition| condition["type"].as_str().unwrap_or_default().to_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

#[test]
fn pods_are_created_up_to_parallelism_and_completions() {
    let three = job(json!({"parallelism": 2, "completions": 3}), json!({"succeeded": 0}));
    for (pods, expect) in
        [("", "+ +"), ("1", "+"), ("1 2", ""), ("1+ 2", "+"), ("1+ 2+", "+"), ("1 2 3", "-1")]
    {
        assert_eq!(decide(&three, pods), expect, "for {pods}");
    }
    let queue = job(json!({"parallelism": 2}), json!({}));
    assert_eq!(decide(&queue, "1+ 2"), "");
    // As upstream, after the first success the other pods run to their end, even if the parallelism is reduced.
    assert_eq!(decide(&queue, "1+ 2 3 4"), "");
    assert_eq!(decide(&job(json!({"suspend": true}), json!({})), "1 2"), "-1 -2");
}

#[test]
fn a_job_with_an_enormous_parallelism_creates_at_most_a_burst_in_a_second() {
    let pause = |parallelism: i32| {
        let job = job(json!({"parallelism": parallelism, "completions": i32::MAX}), json!({}));
        let change = plan(&ObservedJob::of(&job, &[], now()));
        let Change::Create(pods) = &change else { panic!("{change:?}") };
        (pods.len(), change.pause().map(|pause| pause.as_millis()))
    };
    assert_eq!(pause(i32::MAX), (500, Some(1000)));
    assert_eq!(pause(500), (500, Some(1000)));
    assert_eq!(pause(10), (10, Some(20)), "a small job waits for a short time");
    assert_eq!(Change::Discard(pods("1 2")).pause(), Some(Duration::from_millis(4)));
    assert_eq!(Change::Nothing.pause(), None);
}

#[test]
fn a_failed_pod_is_replaced_after_its_back_off() {
    let job = job(json!({"completions": 1}), json!({}));
    assert_eq!(decide(&job, "1!"), "+");
    let mut fresh = (*pod("1!")).clone();
    fresh.status.container_statuses.finished_at =
        Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time("2026-01-01T11:59:55Z".parse().unwrap()));
    let pods = [Arc::new(fresh)];
    assert!(matches!(plan(&ObservedJob::of(&job, &pods, now())), Change::Wait(wait) if wait.as_secs() == 5));
}

#[test]
fn failed_pods_that_are_gone_delay_the_next_pod() {
    let ended = |text: &str, at: &str| {
        let mut pod = (*pod(text)).clone();
        pod.status.container_statuses.finished_at =
            Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(at.parse().unwrap()));
        Arc::new(pod)
    };
    let job = job(json!({"completions": 2}), json!({}));
    let own = [ended("1!", "2026-01-01T11:59:40Z"), ended("2!", "2026-01-01T11:59:55Z")];
    let known = ObservedJob::of(&job, &own, now()).failures;
    let after = |pods: &[Arc<Pod>]| plan(&ObservedJob::of(&job, pods, now()).with_failures(&known));
    // The second back-off is 20 seconds.
    assert!(matches!(after(&[]), Change::Wait(wait) if wait.as_secs() == 15));
    assert!(matches!(after(&own), Change::Wait(wait) if wait.as_secs() == 15));
    assert!(matches!(after(&[ended("3+", "2026-01-01T11:59:58Z")]), Change::Create(_)));
}

#[test]
fn superfluous_pods_do_not_count_as_failed() {
    let spec = |more: Value| {
        let mut spec = json!({"parallelism": 1, "completions": 9, "backoffLimit": 0});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        spec
    };
    let started = json!({"startTime": "2026-01-01T10:00:00Z"});
    for more in [json!({"suspend": true}), json!({})] {
        let job = job(spec(more.clone()), started.clone());
        let own = pods("1 2");
        assert!(matches!(plan(&ObservedJob::of(&job, &own, now())), Change::Discard(_)), "{more}");
        // The pods have lost their finalizer and are being deleted.
        let (status, _) = updated(&job, "1x. 2x.");
        assert_eq!(status["uncountedTerminatedPods"], json!({}), "{more}");
        let expected = if more["suspend"] == true { "Suspended" } else { "" };
        assert_eq!(conditions(&status), expected);
        assert_eq!(status["startTime"].is_null(), more["suspend"] == true);
    }
    // The deleted pods do not delay new pods after the job is resumed.
    assert_eq!(decide(&job(spec(json!({})), started.clone()), "1x. 2x."), "+");
    // The pods of a job that fails keep their finalizer and count.
    let failing = job(spec(json!({})), json!({"failed": 1}));
    let own = pods("1");
    assert!(matches!(plan(&ObservedJob::of(&failing, &own, now())), Change::Delete(_)));
}

#[test]
fn ignored_failures_and_deletions_delay_the_next_pod() {
    let time = |text: &str| k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(text.parse().unwrap());
    let rule = json!({"action": "Ignore", "onExitCodes": {"operator": "In", "values": [3]}});
    let ignoring = job(json!({"completions": 1, "podFailurePolicy": {"rules": [rule]}}), json!({}));
    let mut failed = (*pod("1!")).clone();
    failed.status.container_statuses.finished_at = Some(time("2026-01-01T11:59:55Z"));
    let own = [Arc::new(failed)];
    assert!(matches!(plan(&ObservedJob::of(&ignoring, &own, now())), Change::Wait(_)));
    // The delay begins with the request to delete a pod, not with the end of its grace period.
    let mut deleted = (*pod("1x")).clone();
    deleted.metadata.deletion_timestamp = Some(time("2026-01-01T12:00:25Z"));
    deleted.metadata.deletion_grace_period_seconds = Some(30);
    let own = [Arc::new(deleted)];
    let plain = job(json!({"completions": 1}), json!({}));
    assert!(matches!(plan(&ObservedJob::of(&plain, &own, now())), Change::Wait(wait) if wait.as_secs() == 5));
}

#[test]
fn more_successes_than_completions_are_reported() {
    let job = job(json!({"completions": 1}), json!({"succeeded": 2}));
    let update = status::update(&ObservedJob::of(&job, &[], now()));
    let reasons: Vec<_> = update.events.iter().map(|event| event.reason).collect();
    assert_eq!(reasons, ["TooManySucceededPods", "Completed"]);
}

#[test]
fn a_pod_is_counted_once_after_a_crash_at_any_step() {
    let spec = || json!({"parallelism": 2, "completions": 2});
    // First the uid is written, then the finalizer is removed. Then one write removes the uid and increments the
    // counter.
    let (first, finalize) = updated(&job(spec(), json!({})), "1+ 2");
    assert_eq!((&first["uncountedTerminatedPods"], finalize.as_str()), (&json!({"succeeded": ["1"]}), "1"));
    assert_eq!(first["succeeded"], Value::Null);
    let (again, finalize) = updated(&job(spec(), first.clone()), "1+ 2");
    assert_eq!((&again, finalize.as_str()), (&first, "1"));
    let (second, finalize) = updated(&job(spec(), first), "1+. 2");
    assert_eq!((&second["uncountedTerminatedPods"], finalize.as_str()), (&json!({}), ""));
    assert_eq!(second["succeeded"], 1);
    let (third, _) = updated(&job(spec(), second.clone()), "1+. 2");
    assert_eq!(third, second);
    // A pod that no longer exists counts, too.
    let lost = json!({"succeeded": 1, "uncountedTerminatedPods": {"failed": ["9"]}});
    assert_eq!(updated(&job(spec(), lost), "2").0["failed"], 1);
}

#[test]
fn a_job_ends_when_all_pods_are_counted() {
    let spec = || json!({"completions": 1});
    let (open, _) = updated(&job(spec(), json!({})), "1+");
    assert_eq!(conditions(&open), "SuccessCriteriaMet");
    let (complete, _) = updated(&job(spec(), open), "1+.");
    assert_eq!(conditions(&complete), "SuccessCriteriaMet Complete");
    assert_eq!((&complete["succeeded"], complete["completionTime"].is_string()), (&json!(1), true));
    assert_eq!(decide(&job(spec(), json!({"failed": 7})), "1"), "-1", "above the back-off limit");
    let (failing, _) = updated(&job(spec(), json!({"failed": 7})), "1x");
    assert_eq!(conditions(&failing), "FailureTarget");
    let (failed, _) = updated(&job(spec(), failing), "1!.");
    assert_eq!(conditions(&failed), "FailureTarget Failed");
    let mut late = job(
        json!({"completions": 1, "activeDeadlineSeconds": 60}),
        json!({"startTime": "2026-01-01T11:00:00Z"}),
    );
    assert_eq!(conditions(&updated(&late, "").0), "FailureTarget Failed");
    late.spec.active_deadline_seconds = Some(7200);
    assert_eq!(conditions(&updated(&late, "1").0), "");
}

#[test]
fn indexes_are_completed_once() {
    let spec = || json!({"completionMode": "Indexed", "parallelism": 3, "completions": 4});
    let job_at = |indexes: &str| job(spec(), json!({"completedIndexes": indexes}));
    for (done, pods, expect) in [
        ("", "", "+0 +1 +2"),
        ("0", "1:1", "+2 +3"),
        ("0,1", "1:0 2:2", "-1"),
        ("", "1:1+", "+0 +2 +3"),
        ("", "1:1 2:1", "-2"),
    ] {
        assert_eq!(decide(&job_at(done), pods), expect, "for {done}: {pods}");
    }
    let (status, finalize) = updated(&job_at("0"), "1:2+ 2:1!");
    assert_eq!((&status["completedIndexes"], &status["succeeded"]), (&json!("0,2"), &json!(2)));
    assert_eq!((&status["uncountedTerminatedPods"], finalize.as_str()), (&json!({"failed": ["2"]}), "1 2"));
}

#[test]
fn each_index_has_its_own_back_off_limit() {
    let spec = |most: Option<i32>| {
        json!({"completionMode": "Indexed", "parallelism": 2, "completions": 2, "backoffLimitPerIndex": 0,
            "backoffLimit": i32::MAX, "maxFailedIndexes": most})
    };
    let (status, _) = updated(&job(spec(None), json!({})), "1:0! 2:1");
    assert_eq!((&status["failedIndexes"], conditions(&status).as_str()), (&json!("0"), ""));
    let (status, _) = updated(&job(spec(None), json!({"failedIndexes": "0"})), "2:1+");
    assert_eq!(conditions(&status), "FailureTarget Failed");
    assert_eq!(status["conditions"][0]["reason"], "FailedIndexes");
    let (status, _) = updated(&job(spec(Some(0)), json!({})), "1:0! 2:1x");
    assert_eq!(status["conditions"][0]["reason"], "MaxFailedIndexesExceeded");
    // With a retry left the failed pod keeps its finalizer until its index has a new pod.
    let mut retry = job(spec(None), json!({}));
    retry.spec.backoff_limit_per_index = Some(1);
    assert_eq!(updated(&retry, "1:0! 2:1").1, "");
    assert_eq!(decide(&retry, "1:0! 2:1"), "+0");
    assert_eq!(updated(&retry, "1:0! 2:1 3:0").1, "1");
}

#[test]
fn policies_decide_on_failures_and_success() {
    let rule = |action: &str| {
        json!({"completions": 2, "podFailurePolicy": {"rules": [
            {"action": action, "onExitCodes": {"operator": "In", "values": [3]}}]}})
    };
    let (status, finalize) = updated(&job(rule("Ignore"), json!({})), "1!");
    assert_eq!((&status["uncountedTerminatedPods"], finalize.as_str()), (&json!({}), "1"));
    let (status, _) = updated(&job(rule("FailJob"), json!({})), "1!");
    assert_eq!(
        status["conditions"][0]["message"],
        "Container c for pod n/1 failed with exit code 3 matching FailJob rule at index 0"
    );
    let actions = |action: &str, status: Value, texts: &str| {
        let (job, pods) = (job(rule(action), status), pods(texts));
        status::update(&ObservedJob::of(&job, &pods, now())).policy_actions
    };
    for action in ["Ignore", "FailJob", "Count"] {
        assert_eq!(actions(action, json!({}), "1! 2 3+ 4!."), [action]);
    }
    let listed = json!({"uncountedTerminatedPods": {"failed": ["1"]}});
    assert!(actions("Count", listed, "1!").is_empty(), "the pod is counted once");
    let success = json!({"completionMode": "Indexed", "parallelism": 2, "completions": 3,
        "successPolicy": {"rules": [{"succeededIndexes": "1"}]}});
    let job = job(success, json!({}));
    assert_eq!(decide(&job, "1:0 2:1+"), "-1");
    let (status, _) = updated(&job, "1:0x 2:1+");
    assert_eq!(conditions(&status), "SuccessCriteriaMet");
    assert_eq!(status["conditions"][0]["reason"], "SuccessPolicy");
}

#[test]
fn the_work_does_not_grow_with_the_completions() {
    let spec = json!({"completionMode": "Indexed", "completions": i32::MAX, "parallelism": 3, "backoffLimitPerIndex": 1});
    let status = json!({"completedIndexes": "0-2147483639", "failedIndexes": "2147483641-2147483643"});
    let planning = std::thread::spawn(move || decide(&job(spec, status), ""));
    // A plan that does work for each completion takes longer, even on a fast machine.
    coracle_testing::eventually("a plan without work for each completion", 3, || planning.is_finished());
    assert_eq!(planning.join().unwrap(), "+2147483640 +2147483644 +2147483645");
}

#[test]
fn the_deletion_of_pods_does_not_change_the_verdict() {
    let started = json!({"startTime": "2026-01-01T10:00:00Z"});
    let job = job(json!({"completions": 1, "backoffLimit": 0, "activeDeadlineSeconds": 5}), started);
    let (before, after) = (pods("1"), pods("1x"));
    let decided = ObservedJob::of(&job, &before, now()).verdict;
    let update = status::update(&ObservedJob::of(&job, &after, now()).with_verdict(decided));
    let reasons =
        update.status.conditions.iter().flatten().filter_map(|condition| condition.reason.as_deref());
    assert!(reasons.clone().count() > 0 && reasons.clone().all(|reason| reason == "DeadlineExceeded"));
}

#[test]
fn active_pods_of_a_deleted_job_lose_their_finalizer_and_do_not_count() {
    let mut job = job(json!({"completions": 2, "parallelism": 2}), json!({}));
    job.metadata.deletion_timestamp = Some(k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(now()));
    let own = pods("1 2!");
    let update = status::update(&ObservedJob::of(&job, &own, now()));
    assert_eq!(update.finalize.iter().map(|pod| pod.name()).collect::<Vec<_>>(), ["1", "2"]);
    let lists = update.status.uncounted_terminated_pods.unwrap();
    assert_eq!(lists.failed.as_deref(), Some(&["2".to_owned()][..]));
}

#[test]
fn restart_counts_of_any_size_exceed_the_limit() {
    let spec = json!({"backoffLimit": 6, "template": {"spec": {"restartPolicy": "OnFailure"}}});
    let job = job(spec, json!({}));
    let mut one = pod("1");
    Arc::make_mut(&mut one).status.container_statuses.all_restarts = i32::MAX;
    let own = vec![one, pods("2").remove(0)];
    let mut other = own.clone();
    Arc::make_mut(&mut other[1]).status.container_statuses.all_restarts = 1;
    for own in [own, other] {
        let observed = ObservedJob::of(&job, &own, now());
        assert_eq!(status::update(&observed).status.conditions.unwrap()[0].type_, "FailureTarget");
    }
}
