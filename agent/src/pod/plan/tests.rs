use serde_json::json;

use super::*;
use crate::pod::state::{Condemned, Exit, SandboxSeen};

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_000_000 + seconds).unwrap()
}

fn pod(spec: serde_json::Value) -> Wish {
    let pod: Pod = serde_json::from_value(
        json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec}),
    )
    .unwrap();
    Wish::Run(std::sync::Arc::new(pod))
}

fn deleted(grace: i64) -> Wish {
    let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u",
        "deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace},
        "spec": {"containers": [{"name": "a", "image": "i"}]}}))
    .unwrap();
    Wish::Run(std::sync::Arc::new(pod))
}

fn one() -> serde_json::Value {
    json!({"containers": [{"name": "a", "image": "i"}]})
}

fn sandbox(ready: bool) -> SandboxSeen {
    SandboxSeen { id: "s".into(), ready, ..SandboxSeen::default() }
}

fn container(name: &str, attempt: u32, run: ContainerRun) -> ContainerSeen {
    ContainerSeen {
        id: format!("{name}{attempt}"),
        sandbox: "s".into(),
        name: name.into(),
        attempt,
        asked: Some("i".into()),
        image: "i".into(),
        image_id: "sha".into(),
        user: None,
        run,
    }
}

fn running() -> ContainerRun {
    ContainerRun::Running { started: at(0) }
}

fn exited(code: i32, finished: i64) -> ContainerRun {
    ContainerRun::Exited(Exit { finished: at(finished), code, ..Exit::default() })
}

fn seen(containers: Vec<ContainerSeen>) -> Seen {
    Seen { sandboxes: vec![sandbox(true)], containers }
}

fn ready_memory() -> Memory {
    Memory { prepared: true, start_time: Some(at(0)), ..Memory::default() }
}

fn decide(wish: &Wish, seen: &Seen, memory: &Memory, now: i64) -> Plan {
    plan(&Facts { wish, seen, memory, now: at(now) })
}

fn started(plan: &Plan) -> Vec<(&str, u32)> {
    plan.actions
        .iter()
        .flat_map(|action| match action {
            Action::Start(list) => list.as_slice(),
            _ => &[],
        })
        .map(|start| (start.name.as_str(), start.attempt))
        .collect()
}

#[test]
fn a_new_pod_gets_a_sandbox_first_and_its_images_meanwhile() {
    let got = decide(&pod(one()), &Seen::default(), &Memory::default(), 0);
    assert_eq!(got.actions, [Action::MakeSandbox { attempt: 0, first: vec!["a".into()] }]);
}

#[test]
fn what_runs_and_is_wanted_is_left_alone() {
    let seen = seen(vec![container("a", 0, running())]);
    let got = decide(&pod(one()), &seen, &ready_memory(), 0);
    assert_eq!(got, Plan::default());
    // A new agent takes volumes and cgroup over and touches nothing else.
    assert_eq!(decide(&pod(one()), &seen, &Memory::default(), 0).actions, [Action::Prepare]);
}

#[test]
fn init_containers_run_one_by_one_before_the_others() {
    let wish = pod(json!({"initContainers": [{"name": "i"}, {"name": "j"}], "containers": [{"name": "a"}]}));
    let memory = ready_memory();
    assert_eq!(started(&decide(&wish, &seen(vec![]), &memory, 0)), [("i", 0)]);
    let busy = seen(vec![container("i", 0, running())]);
    assert_eq!(decide(&wish, &busy, &memory, 0), Plan::default());
    let second = seen(vec![container("i", 0, exited(0, 0))]);
    assert_eq!(started(&decide(&wish, &second, &memory, 0)), [("j", 0)]);
    let failed = seen(vec![container("i", 0, exited(1, 0))]);
    assert_eq!(started(&decide(&wish, &failed, &memory, 0)), [("i", 1)]);
    let done = seen(vec![container("i", 0, exited(0, 0)), container("j", 0, exited(0, 0))]);
    assert_eq!(started(&decide(&wish, &done, &memory, 0)), [("a", 0)]);
}

#[test]
fn a_container_to_debug_with_is_started_once_whatever_the_others_do() {
    let mut spec = json!({"initContainers": [{"name": "i"}], "containers": [{"name": "a"}]});
    spec["ephemeralContainers"] = json!([{"name": "look", "image": "busybox"}]);
    let (wish, memory) = (pod(spec), ready_memory());
    let busy = container("i", 0, running());
    assert_eq!(started(&decide(&wish, &seen(vec![busy.clone()]), &memory, 0)), [("look", 0)]);
    for (run, again) in [(ContainerRun::Created, true), (running(), false), (exited(1, 0), false)] {
        let seen = seen(vec![busy.clone(), container("look", 0, run.clone())]);
        assert_eq!(!started(&decide(&wish, &seen, &memory, 99)).is_empty(), again, "{run:?}");
    }
    // A boot: the runtime has nothing of before.
    let mut told = (**wish.pod()).clone();
    let status = json!({"ephemeralContainerStatuses": [{"name": "look", "containerID": "coracle://l",
        "image": "busybox", "imageID": "", "ready": false, "restartCount": 0}]});
    told.status = Some(serde_json::from_value(status).unwrap());
    let wish = Wish::Run(std::sync::Arc::new(told));
    assert_eq!(started(&decide(&wish, &seen(vec![]), &memory, 0)), [("i", 0)]);
}

#[test]
fn a_sidecar_is_started_in_its_turn_and_again_later_without_holding_anything_back() {
    let wish = pod(json!({"initContainers": [{"name": "s", "restartPolicy": "Always"}, {"name": "i"}],
        "containers": [{"name": "a"}]}));
    let memory = ready_memory();
    assert_eq!(started(&decide(&wish, &seen(vec![]), &memory, 0)), [("s", 0)]);
    assert_eq!(started(&decide(&wish, &seen(vec![container("s", 0, running())]), &memory, 0)), [("i", 0)]);
    let later = seen(vec![
        container("s", 0, exited(1, 0)),
        container("i", 0, exited(0, 0)),
        container("a", 0, running()),
    ]);
    assert_eq!(started(&decide(&wish, &later, &memory, 0)), [("s", 1)]);
}

#[test]
fn a_crash_is_restarted_at_once_and_then_waits_longer_each_time() {
    let wish = pod(one());
    let mut memory = ready_memory();
    let crashed = |attempt, when| seen(vec![container("a", attempt, exited(1, when))]);
    assert_eq!(started(&decide(&wish, &crashed(0, 5), &memory, 5)), [("a", 1)]);
    memory.crashes.fail("a", at(5), at(5));
    let waits = decide(&wish, &crashed(1, 6), &memory, 6);
    assert_eq!((started(&waits), waits.wake), (vec![], Some(at(16))));
    assert_eq!(waits.waiting[0].1.reason, "CrashLoopBackOff");
    assert!(waits.waiting[0].1.message.starts_with("back-off 10s restarting failed container=a pod=p_n(u)"));
    assert_eq!(started(&decide(&wish, &crashed(1, 6), &memory, 16)), [("a", 2)]);
}

#[test]
fn restart_policies_decide_what_an_exit_means() {
    for (policy, code, restarts) in [
        ("Always", 0, true),
        ("OnFailure", 0, false),
        ("OnFailure", 1, true),
        ("Never", 0, false),
        ("Never", 1, false),
    ] {
        let wish = pod(json!({"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]}));
        let seen = seen(vec![container("a", 0, exited(code, 0)), container("b", 0, running())]);
        let got = decide(&wish, &seen, &ready_memory(), 0);
        assert_eq!(!started(&got).is_empty(), restarts, "{policy} {code}");
    }
}

#[test]
fn a_pod_whose_containers_are_done_is_stopped_then_released() {
    let wish = pod(json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}));
    let mut seen = seen(vec![container("a", 0, exited(0, 0))]);
    let mut memory = ready_memory();
    assert_eq!(decide(&wish, &seen, &memory, 0).actions, [Action::StopPod { grace: 30 }]);
    seen.sandboxes[0].ready = false;
    assert_eq!(decide(&wish, &seen, &memory, 0).actions, [Action::Release]);
    memory.released = true;
    assert_eq!(decide(&wish, &seen, &memory, 0), Plan::default());
}

#[test]
fn a_lost_sandbox_is_replaced_and_its_containers_start_again_in_the_new_one() {
    let wish = pod(one());
    let old = SandboxSeen { id: "old".into(), attempt: 3, ..SandboxSeen::default() };
    let mut dead = container("a", 2, exited(137, 0));
    dead.sandbox = "old".into();
    let lost = Seen { sandboxes: vec![old.clone()], containers: vec![dead.clone()] };
    let got = decide(&wish, &lost, &ready_memory(), 0);
    assert_eq!(got.actions, [Action::MakeSandbox { attempt: 4, first: vec!["a".into()] }]);
    let next = SandboxSeen { attempt: 4, ..sandbox(true) };
    let replaced = Seen { sandboxes: vec![next, old], containers: vec![dead] };
    assert_eq!(started(&decide(&wish, &replaced, &ready_memory(), 0)), [("a", 3)]);
}

#[test]
fn deletion_stops_with_its_grace_and_then_finishes() {
    let mut seen = seen(vec![container("a", 0, running())]);
    let memory = ready_memory();
    assert_eq!(decide(&deleted(5), &seen, &memory, 0).actions, [Action::StopPod { grace: 5 }]);
    seen.sandboxes[0].ready = false;
    seen.containers[0].run = exited(0, 1);
    assert_eq!(decide(&deleted(5), &seen, &memory, 0).actions, [Action::Finish]);
    let Wish::Run(pod) = pod(one()) else { unreachable!() };
    assert_eq!(decide(&Wish::Gone(pod), &Seen::default(), &memory, 0).actions, [Action::Finish]);
}

#[test]
fn a_deadline_condemns_when_it_is_due_and_wakes_before() {
    let wish = pod(json!({"activeDeadlineSeconds": 10, "containers": [{"name": "a"}]}));
    let seen = seen(vec![container("a", 0, running())]);
    assert_eq!(decide(&wish, &seen, &ready_memory(), 9).wake, Some(at(10)));
    let due = decide(&wish, &seen, &ready_memory(), 10);
    assert!(matches!(due.actions.as_slice(), [Action::Condemn(v)] if v.reason == "DeadlineExceeded"));
    let memory =
        Memory { verdict: Some(Verdict { reason: "x".into(), message: "y".into() }), ..ready_memory() };
    assert_eq!(decide(&wish, &seen, &memory, 10).actions, [Action::StopPod { grace: 30 }]);
}

#[test]
fn a_failed_pull_is_shown_then_backs_off() {
    let mut memory = ready_memory();
    memory.pulls.fail("i", at(0), at(0));
    let why = Waiting { reason: "ErrImagePull".into(), message: "no such host".into() };
    memory.waiting.insert("a".into(), why);
    let fresh = decide(&pod(one()), &seen(vec![]), &memory, 0);
    assert_eq!((fresh.waiting.len(), fresh.wake), (0, Some(at(1))));
    let waits = decide(&pod(one()), &seen(vec![]), &memory, 2);
    assert_eq!(waits.wake, Some(at(10)));
    assert_eq!(waits.waiting[0].1.reason, "ImagePullBackOff");
    assert_eq!(waits.waiting[0].1.message, "Back-off pulling image \"i\": ErrImagePull: no such host");
    assert_eq!(started(&decide(&pod(one()), &seen(vec![]), &memory, 10)), [("a", 0)]);
}

#[test]
fn a_container_that_was_made_but_never_started_is_made_again_under_its_number() {
    let seen = seen(vec![container("a", 4, ContainerRun::Created)]);
    let got = decide(&pod(one()), &seen, &ready_memory(), 0);
    let [Action::Start(starts)] = got.actions.as_slice() else { panic!("{got:?}") };
    assert_eq!((starts[0].attempt, starts[0].instead_of.as_deref()), (4, Some("a4")));
}

#[test]
fn only_the_last_end_of_each_container_is_kept() {
    let ends = vec![
        container("a", 0, exited(1, 0)),
        container("a", 1, exited(1, 1)),
        container("a", 2, running()),
        container("stranger", 0, exited(0, 0)),
    ];
    let got = decide(&pod(one()), &seen(ends), &ready_memory(), 2);
    assert_eq!(got.actions, [Action::RemoveContainers(vec!["a0".into(), "stranger0".into()])]);
}

#[test]
fn an_unhealthy_container_is_stopped_and_nothing_else() {
    let mut memory = ready_memory();
    for (own, wanted) in [(None, 30), (Some(2), 2)] {
        let why = Condemned { why: "failed liveness probe".into(), grace: own };
        memory.condemned.insert("a0".into(), why);
        let got = decide(&pod(one()), &seen(vec![container("a", 0, running())]), &memory, 0);
        assert!(
            matches!(got.actions.as_slice(), [Action::Stop { id, grace, .. }] if id == "a0" && *grace == wanted),
            "{got:?}"
        );
    }
}

#[test]
fn a_changed_image_restarts_its_container() {
    let wish = pod(json!({"containers": [{"name": "a", "image": "i:2"}]}));
    let got = decide(&wish, &seen(vec![container("a", 0, running())]), &ready_memory(), 0);
    assert!(matches!(got.actions.as_slice(), [Action::Stop { why, .. }] if why == "definition changed"));
}
