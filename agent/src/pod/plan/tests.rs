//! Actions for pods in each state.

use serde_json::json;

use super::*;
use crate::pod::state::fixture::{self, at, exited, running};
use crate::pod::state::{EVICTED, KillRequest, ObservedSandbox, RESIZE};

fn pod(spec: serde_json::Value) -> DesiredPod {
    let pod: Pod = serde_json::from_value(
        json!({"metadata": {"name": "p", "namespace": "n", "uid": "u"}, "spec": spec}),
    )
    .unwrap();
    DesiredPod::Run(std::sync::Arc::new(pod))
}

fn deleted(grace: i64) -> DesiredPod {
    let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u",
        "deletionTimestamp": "2026-01-01T00:00:00Z", "deletionGracePeriodSeconds": grace},
        "spec": {"containers": [{"name": "a", "image": "i"}]}}))
    .unwrap();
    DesiredPod::Run(std::sync::Arc::new(pod))
}

fn one() -> serde_json::Value {
    json!({"containers": [{"name": "a", "image": "i"}]})
}

fn sandbox(ready: bool) -> ObservedSandbox {
    ObservedSandbox { id: "s".into(), ready, ..ObservedSandbox::default() }
}

fn container(name: &str, attempt: u32, run: ContainerRun) -> ObservedContainer {
    ObservedContainer { requested_image: Some("i".into()), ..fixture::container(name, attempt, run) }
}

fn observed(containers: Vec<ObservedContainer>) -> ObservedPod {
    ObservedPod { sandboxes: vec![sandbox(true)], containers }
}

fn ready_worker_state() -> WorkerState {
    WorkerState { prepared: true, start_time: Some(at(0)), ..WorkerState::default() }
}

fn decide(desired: &DesiredPod, observed: &ObservedPod, state: &WorkerState, now: i64) -> Plan {
    plan(&PlanInput { desired, observed, state, now: at(now) })
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
    let got = decide(&pod(one()), &ObservedPod::default(), &WorkerState::default(), 0);
    assert_eq!(got.actions, [Action::MakeSandbox { attempt: 0, first: vec!["a".into()] }]);
}

#[test]
fn a_running_desired_pod_needs_no_action() {
    let observed = observed(vec![container("a", 0, running())]);
    let got = decide(&pod(one()), &observed, &ready_worker_state(), 0);
    assert_eq!(got, Plan::default());
    // A new agent adopts volumes and cgroup, and does nothing else.
    assert_eq!(decide(&pod(one()), &observed, &WorkerState::default(), 0).actions, [Action::Prepare]);
}

#[test]
fn init_containers_run_one_by_one_before_the_others() {
    let desired =
        pod(json!({"initContainers": [{"name": "i"}, {"name": "j"}], "containers": [{"name": "a"}]}));
    let state = ready_worker_state();
    assert_eq!(started(&decide(&desired, &observed(vec![]), &state, 0)), [("i", 0)]);
    let busy = observed(vec![container("i", 0, running())]);
    assert_eq!(decide(&desired, &busy, &state, 0), Plan::default());
    let second = observed(vec![container("i", 0, exited(0, 0))]);
    assert_eq!(started(&decide(&desired, &second, &state, 0)), [("j", 0)]);
    let failed = observed(vec![container("i", 0, exited(1, 0))]);
    assert_eq!(started(&decide(&desired, &failed, &state, 0)), [("i", 1)]);
    let done = observed(vec![container("i", 0, exited(0, 0)), container("j", 0, exited(0, 0))]);
    assert_eq!(started(&decide(&desired, &done, &state, 0)), [("a", 0)]);
}

#[test]
fn an_ephemeral_container_is_started_once() {
    let mut spec = json!({"initContainers": [{"name": "i"}], "containers": [{"name": "a"}]});
    spec["ephemeralContainers"] = json!([{"name": "look", "image": "busybox"}]);
    let (desired, state) = (pod(spec), ready_worker_state());
    let busy = container("i", 0, running());
    assert_eq!(started(&decide(&desired, &observed(vec![busy.clone()]), &state, 0)), [("look", 0)]);
    for (run, again) in [(ContainerRun::Created, true), (running(), false), (exited(1, 0), false)] {
        let observed = observed(vec![busy.clone(), container("look", 0, run.clone())]);
        assert_eq!(!started(&decide(&desired, &observed, &state, 99)).is_empty(), again, "{run:?}");
    }
    // After a boot the runtime has no containers.
    let mut reported = (**desired.pod()).clone();
    let status = json!({"ephemeralContainerStatuses": [{"name": "look", "containerID": "coracle://l",
        "image": "busybox", "imageID": "", "ready": false, "restartCount": 0}]});
    reported.status = Some(serde_json::from_value(status).unwrap());
    let desired = DesiredPod::Run(std::sync::Arc::new(reported));
    assert_eq!(started(&decide(&desired, &observed(vec![]), &state, 0)), [("i", 0)]);
}

#[test]
fn a_sidecar_starts_in_its_order_and_its_restart_delays_nothing() {
    let desired = pod(json!({"initContainers": [{"name": "s", "restartPolicy": "Always"}, {"name": "i"}],
        "containers": [{"name": "a"}]}));
    let state = ready_worker_state();
    assert_eq!(started(&decide(&desired, &observed(vec![]), &state, 0)), [("s", 0)]);
    assert_eq!(
        started(&decide(&desired, &observed(vec![container("s", 0, running())]), &state, 0)),
        [("i", 0)]
    );
    let later = observed(vec![
        container("s", 0, exited(1, 0)),
        container("i", 0, exited(0, 0)),
        container("a", 0, running()),
    ]);
    assert_eq!(started(&decide(&desired, &later, &state, 0)), [("s", 1)]);
}

#[test]
fn a_crash_is_restarted_at_once_and_then_waits_longer_each_time() {
    let desired = pod(one());
    let mut state = ready_worker_state();
    let crashed = |attempt, when| observed(vec![container("a", attempt, exited(1, when))]);
    assert_eq!(started(&decide(&desired, &crashed(0, 5), &state, 5)), [("a", 1)]);
    state.crashes.fail("a", at(5), at(5));
    let waits = decide(&desired, &crashed(1, 6), &state, 6);
    assert_eq!((started(&waits), waits.wake), (vec![], Some(at(16))));
    assert_eq!(waits.waiting[0].1.reason, "CrashLoopBackOff");
    assert!(waits.waiting[0].1.message.starts_with("back-off 10s restarting failed container=a pod=p_n(u)"));
    assert_eq!(started(&decide(&desired, &crashed(1, 6), &state, 16)), [("a", 2)]);
}

#[test]
fn another_image_starts_without_the_back_off_of_the_former_one() {
    let mut state = ready_worker_state();
    state.crashes.fail("a", at(5), at(5));
    let crashed = observed(vec![container("a", 1, exited(1, 6))]);
    state.forget_crashes(&pod(one()), &crashed);
    assert_eq!(started(&decide(&pod(one()), &crashed, &state, 6)), []);
    let changed = pod(json!({"containers": [{"name": "a", "image": "j"}]}));
    state.forget_crashes(&changed, &crashed);
    assert_eq!(started(&decide(&changed, &crashed, &state, 6)), [("a", 2)]);
}

#[test]
fn the_restart_policy_decides_after_an_exit() {
    for (policy, code, restarts) in [
        ("Always", 0, true),
        ("OnFailure", 0, false),
        ("OnFailure", 1, true),
        ("Never", 0, false),
        ("Never", 1, false),
    ] {
        let desired = pod(json!({"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]}));
        let observed = observed(vec![container("a", 0, exited(code, 0)), container("b", 0, running())]);
        let got = decide(&desired, &observed, &ready_worker_state(), 0);
        assert_eq!(!started(&got).is_empty(), restarts, "{policy} {code}");
    }
}

#[test]
fn a_pod_whose_containers_are_done_is_stopped_then_released() {
    let desired = pod(json!({"restartPolicy": "Never", "containers": [{"name": "a"}]}));
    let mut observed = observed(vec![container("a", 0, exited(0, 0))]);
    let mut state = ready_worker_state();
    assert_eq!(decide(&desired, &observed, &state, 0).actions, [Action::StopPod { grace: 30 }]);
    observed.sandboxes[0].ready = false;
    let release = |unstopped: &[&str]| {
        [Action::Release { unstopped: unstopped.iter().map(|id| (*id).to_owned()).collect() }]
    };
    // A sandbox whose stop has failed, or that an earlier agent stopped, is not ready but may have its network.
    assert_eq!(decide(&desired, &observed, &state, 0).actions, release(&["s"]));
    state.stopped = ["s", "removed"].map(str::to_owned).into();
    assert_eq!(decide(&desired, &observed, &state, 0).actions, release(&[]));
    state.released = true;
    assert_eq!(decide(&desired, &observed, &state, 0), Plan::default());
}

#[test]
fn a_lost_sandbox_is_replaced_and_its_containers_start_again_in_the_new_one() {
    let desired = pod(one());
    let old = ObservedSandbox { id: "old".into(), attempt: 3, ..ObservedSandbox::default() };
    let mut dead = container("a", 2, exited(137, 0));
    dead.sandbox = "old".into();
    let lost = ObservedPod { sandboxes: vec![old.clone()], containers: vec![dead.clone()] };
    let got = decide(&desired, &lost, &ready_worker_state(), 0);
    assert_eq!(got.actions, [Action::MakeSandbox { attempt: 4, first: vec!["a".into()] }]);
    let next = ObservedSandbox { attempt: 4, ..sandbox(true) };
    let replaced = ObservedPod { sandboxes: vec![next, old], containers: vec![dead] };
    assert_eq!(started(&decide(&desired, &replaced, &ready_worker_state(), 0)), [("a", 3)]);
}

#[test]
fn deletion_stops_with_its_grace_and_then_finishes() {
    let mut observed = observed(vec![container("a", 0, running())]);
    let state = ready_worker_state();
    assert_eq!(decide(&deleted(5), &observed, &state, 0).actions, [Action::StopPod { grace: 5 }]);
    observed.sandboxes[0].ready = false;
    observed.containers[0].run = exited(0, 1);
    assert_eq!(decide(&deleted(5), &observed, &state, 0).actions, [Action::Finish]);
    let DesiredPod::Run(pod) = pod(one()) else { unreachable!() };
    assert_eq!(decide(&DesiredPod::Gone(pod), &ObservedPod::default(), &state, 0).actions, [Action::Finish]);
}

#[test]
fn a_pod_fails_at_its_deadline_and_the_next_pass_is_due_then() {
    let desired = pod(json!({"activeDeadlineSeconds": 10, "containers": [{"name": "a"}]}));
    let observed = observed(vec![container("a", 0, running())]);
    assert_eq!(decide(&desired, &observed, &ready_worker_state(), 9).wake, Some(at(10)));
    let due = decide(&desired, &observed, &ready_worker_state(), 10);
    assert!(matches!(due.actions.as_slice(), [Action::FailPod(v)] if v.reason == "DeadlineExceeded"));
    let state = WorkerState {
        verdict: Some(Verdict { reason: "x".into(), message: "y".into() }),
        ..ready_worker_state()
    };
    assert_eq!(decide(&desired, &observed, &state, 10).actions, [Action::StopPod { grace: 30 }]);
}

#[test]
fn an_evicted_pod_is_stopped_without_its_grace_period() {
    let desired = pod(json!({"terminationGracePeriodSeconds": 600, "containers": [{"name": "a"}]}));
    let observed = observed(vec![container("a", 0, running())]);
    let verdict = Some(Verdict { reason: EVICTED.into(), message: "full".into() });
    let state = WorkerState { verdict, ..ready_worker_state() };
    assert_eq!(decide(&desired, &observed, &state, 10).actions, [Action::StopPod { grace: 1 }]);
    let state = WorkerState { eviction_grace: Some(20), ..state };
    assert_eq!(decide(&desired, &observed, &state, 10).actions, [Action::StopPod { grace: 20 }]);
    assert_eq!(decide(&deleted(600), &observed, &state, 10).actions, [Action::StopPod { grace: 20 }]);
    assert_eq!(decide(&deleted(5), &observed, &state, 10).actions, [Action::StopPod { grace: 5 }]);
}

#[test]
fn a_failed_pull_is_shown_then_backs_off() {
    let mut state = ready_worker_state();
    state.pulls.fail("i", at(0), at(0));
    let why = Waiting { reason: "ErrImagePull".into(), message: "no such host".into() };
    state.waiting.insert("a".into(), why);
    let fresh = decide(&pod(one()), &observed(vec![]), &state, 0);
    assert_eq!((fresh.waiting.len(), fresh.wake), (0, Some(at(1))));
    let waits = decide(&pod(one()), &observed(vec![]), &state, 2);
    assert_eq!(waits.wake, Some(at(10)));
    assert_eq!(waits.waiting[0].1.reason, "ImagePullBackOff");
    assert_eq!(waits.waiting[0].1.message, "Back-off pulling image \"i\": ErrImagePull: no such host");
    assert_eq!(started(&decide(&pod(one()), &observed(vec![]), &state, 10)), [("a", 0)]);
}

#[test]
fn a_created_container_that_never_started_is_created_again_with_its_attempt() {
    let observed = observed(vec![container("a", 4, ContainerRun::Created)]);
    let got = decide(&pod(one()), &observed, &ready_worker_state(), 0);
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
    let got = decide(&pod(one()), &observed(ends), &ready_worker_state(), 2);
    assert_eq!(got.actions, [Action::RemoveContainers(vec!["a0".into(), "stranger0".into()])]);
}

#[test]
fn only_an_unhealthy_container_is_stopped() {
    let mut state = ready_worker_state();
    for (own, wanted) in [(None, 30), (Some(2), 2)] {
        let why = KillRequest { why: "failed liveness probe".into(), grace: own, restarts: true };
        state.kill_requests.insert("a0".into(), why);
        let got = decide(&pod(one()), &observed(vec![container("a", 0, running())]), &state, 0);
        assert!(
            matches!(got.actions.as_slice(), [Action::Stop { id, grace, .. }] if id == "a0" && *grace == wanted),
            "{got:?}"
        );
    }
}

#[test]
fn the_message_of_a_stop_tells_of_a_restart_only_if_there_is_one() {
    let message = |policy: &str, why: &str, restarts: bool| {
        let desired = pod(json!({"restartPolicy": policy, "containers": [{"name": "a"}]}));
        let request = KillRequest { why: why.into(), grace: None, restarts };
        let kill_requests = [("a0".to_owned(), request)].into();
        let state = WorkerState { kill_requests, ..ready_worker_state() };
        match decide(&desired, &observed(vec![container("a", 0, running())]), &state, 0).actions.as_slice() {
            [Action::Stop { message, .. }] => message.clone(),
            other => panic!("{other:?}"),
        }
    };
    let unhealthy = "failed liveness probe";
    let restarted = "Container a failed liveness probe, will be restarted";
    assert_eq!(message("Always", unhealthy, true), restarted);
    assert_eq!(message("OnFailure", unhealthy, true), restarted);
    assert_eq!(message("Never", unhealthy, true), "Container a failed liveness probe");
    assert_eq!(message("Always", "FailedPostStartHook", false), "FailedPostStartHook");
}

#[test]
fn the_messages_about_sidecars_and_unknown_states_are_those_of_the_kubelet() {
    let sidecar = json!({"name": "s", "restartPolicy": "Always"});
    let desired = pod(json!({"initContainers": [sidecar], "containers": [{"name": "a"}]}));
    let messages = |state: &WorkerState, run: &ContainerRun| -> Vec<String> {
        let observed = observed(vec![container("s", 0, run.clone()), container("a", 0, run.clone())]);
        let actions = decide(&desired, &observed, state, 0).actions.into_iter();
        let message =
            |action: Action| if let Action::Stop { message, .. } = action { Some(message) } else { None };
        actions.filter_map(message).collect()
    };
    let request = KillRequest { why: "failed liveness probe".into(), grace: None, restarts: true };
    let state = WorkerState { kill_requests: [("s0".to_owned(), request)].into(), ..ready_worker_state() };
    assert_eq!(messages(&state, &running()), ["Init container s failed liveness probe"]);
    let unknown = "is in \"unknown\" state, try killing it before restart";
    let wanted = [format!("Init container {unknown}"), format!("Container {unknown}")];
    assert_eq!(messages(&ready_worker_state(), &ContainerRun::Unknown), wanted);
}

#[test]
fn a_changed_image_restarts_its_container() {
    let desired = pod(json!({"containers": [{"name": "a", "image": "i:2"}]}));
    let got = decide(&desired, &observed(vec![container("a", 0, running())]), &ready_worker_state(), 0);
    let changed = "Container a definition changed, will be restarted";
    assert!(matches!(got.actions.as_slice(), [Action::Stop { message, .. }] if message == changed));
}

#[test]
fn a_container_with_a_changed_image_starts_again_whatever_its_policy_and_rules() {
    let rules =
        json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "NotIn", "values": [0]}}]);
    let own = json!({"name": "a", "image": "i:2", "restartPolicy": "Never"});
    let mut ruled = own.clone();
    ruled["restartPolicyRules"] = rules;
    for own in [own, ruled] {
        let desired = pod(json!({"restartPolicy": "Never", "containers": [own]}));
        let got = decide(&desired, &observed(vec![container("a", 0, running())]), &ready_worker_state(), 0);
        assert_eq!(got.redefined, ["a0"]);
        let mut state = ready_worker_state();
        state.redefined.extend(got.redefined);
        let ended = observed(vec![container("a", 0, exited(143, 5))]);
        assert_eq!(started(&decide(&desired, &ended, &state, 5)), [("a", 1)]);
    }
}

fn sized(cpu: &str, policy: &str, restart: &str) -> DesiredPod {
    pod(
        json!({"restartPolicy": restart, "terminationGracePeriodSeconds": 0, "containers": [{"name": "a", "image": "i",
        "resizePolicy": [{"resourceName": "cpu", "restartPolicy": policy}],
        "resources": {"requests": {"cpu": cpu}}}]}),
    )
}

fn made_with(cpu: &str, run: ContainerRun) -> ObservedContainer {
    let created_with = serde_json::from_value(json!({"requests": {"cpu": cpu}})).unwrap();
    ObservedContainer { created_with: Some(created_with), ..container("a", 0, run) }
}

#[test]
fn a_running_container_gets_other_resources_and_a_failed_resize_waits() {
    let seen = observed(vec![made_with("1", running())]);
    let mut state = ready_worker_state();
    assert_eq!(decide(&sized("1", "NotRequired", "Always"), &seen, &state, 0), Plan::default());
    let wanted = sized("2", "NotRequired", "Always");
    let got = decide(&wanted, &seen, &state, 0);
    let [Action::Resize { before, containers }] = got.actions.as_slice() else { panic!("{got:?}") };
    assert_eq!(before, sized("1", "NotRequired", "Always").pod());
    assert_eq!((containers[0].id.as_str(), containers.len()), ("a0", 1));
    state.pod_retries.fail(RESIZE, at(0), at(0));
    let later = decide(&wanted, &seen, &state, 0);
    assert_eq!((later.actions, later.wake), (vec![], Some(at(1))));
    // After the update the recorded resources count, not the resources at the creation.
    let after = serde_json::from_value(json!({"requests": {"cpu": "2"}})).unwrap();
    state.resize.actuated.insert("a0".into(), after);
    assert_eq!(decide(&wanted, &seen, &state, 5), Plan::default());
    // An accepted resize always changes the pod's cgroup, because resources of the pod and of stopped containers count
    // there.
    state.resize.is_cgroup_due = true;
    let got = decide(&wanted, &seen, &state, 5).actions;
    assert!(
        matches!(got.as_slice(), [Action::Resize { containers, .. }] if containers.is_empty()),
        "{got:?}"
    );
}

#[test]
fn a_resize_starts_from_the_former_pod_level_resources() {
    let sized = |cpu: &str| {
        pod(json!({"resources": {"limits": {"cpu": cpu}}, "containers": [{"name": "a", "image": "i"}]}))
    };
    let whole = |cpu: &str| serde_json::from_value(json!({"limits": {"cpu": cpu}})).unwrap();
    let made = ObservedContainer { created_with: Some(whole("2")), ..container("a", 0, running()) };
    let seen = observed(vec![made]);
    let mut state = ready_worker_state();
    assert_eq!(decide(&sized("2"), &seen, &state, 0), Plan::default());
    state.resize.pod_before = Some(Box::new(whole("2")));
    let got = decide(&sized("1"), &seen, &state, 0);
    let [Action::Resize { before, containers }] = got.actions.as_slice() else { panic!("{got:?}") };
    assert_eq!(before.spec.as_ref().unwrap().resources, Some(whole("2")));
    assert_eq!(containers[0].before, whole("2"));
}

#[test]
fn a_container_that_starts_while_a_resize_waits_keeps_the_limits_of_the_others() {
    let desired = pod(json!({"resources": {"limits": {"cpu": "1"}},
        "containers": [{"name": "a", "image": "i"}, {"name": "b", "image": "i"}]}));
    let whole: ResourceRequirements = serde_json::from_value(json!({"limits": {"cpu": "2"}})).unwrap();
    let seen = observed(vec![ObservedContainer {
        created_with: Some(whole.clone()),
        ..container("a", 0, running())
    }]);
    let mut state = ready_worker_state();
    state.resize.is_cgroup_due = true;
    state.resize.pod_before = Some(Box::new(whole.clone()));
    let got = decide(&desired, &seen, &state, 0);
    assert!(matches!(got.actions.as_slice(), [Action::Resize { .. }]), "first the resize: {got:?}");
    state.pod_retries.fail(RESIZE, at(0), at(0));
    let got = decide(&desired, &seen, &state, 0);
    let [Action::Start(starts)] = got.actions.as_slice() else { panic!("{got:?}") };
    let before = starts[0].pod_before.as_ref().and_then(|pod| pod.spec.as_ref()).unwrap();
    assert_eq!(before.resources, Some(whole));
}

#[test]
fn a_restart_for_a_resize_is_not_a_crash_and_needs_no_restart_policy() {
    let wanted = sized("2", "RestartContainer", "OnFailure");
    let mut state = ready_worker_state();
    let got = decide(&wanted, &observed(vec![made_with("1", running())]), &state, 0);
    assert!(
        matches!(got.actions.as_slice(), [Action::Stop { id, grace: 0, .. }, Action::Resize { containers, .. }]
            if id == "a0" && containers.is_empty()),
        "{got:?}"
    );
    assert_eq!(got.resize_restarts, ["a0"]);
    let ended = observed(vec![made_with("1", exited(0, 5))]);
    state.crashes.fail("a", at(5), at(5));
    assert_eq!(started(&decide(&wanted, &ended, &state, 6)), []);
    state.resize.restarts.insert("a0".into());
    let got = decide(&wanted, &ended, &state, 6);
    assert_eq!(started(&got), [("a", 1)]);
    assert!(matches!(got.actions.as_slice(), [Action::Start(list)] if list[0].crashed.is_none()));
}

/// Rules that restart all containers after exit code 42.
fn restart_all_rules() -> serde_json::Value {
    json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}])
}

#[test]
fn an_own_policy_or_a_rule_restarts_a_container_of_a_pod_that_never_restarts() {
    let rules = json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]);
    for (policy, code, restarts) in [
        ("Always", 0, true),
        ("OnFailure", 1, true),
        ("OnFailure", 0, false),
        ("Never", 42, true),
        ("Never", 1, false),
    ] {
        let own = json!({"name": "a", "restartPolicy": policy, "restartPolicyRules": rules});
        let desired = pod(json!({"restartPolicy": "Never", "containers": [own]}));
        let got =
            decide(&desired, &observed(vec![container("a", 0, exited(code, 0))]), &ready_worker_state(), 0);
        if restarts {
            assert_eq!(started(&got), [("a", 1)], "{policy} {code}");
        } else {
            assert_eq!(got.actions, [Action::StopPod { grace: 30 }], "{policy} {code}");
        }
        let init = json!({"name": "a", "restartPolicy": policy, "restartPolicyRules": rules});
        let desired =
            pod(json!({"restartPolicy": "Never", "initContainers": [init], "containers": [{"name": "m"}]}));
        if policy != "Always" && code != 0 {
            let got = decide(
                &desired,
                &observed(vec![container("a", 0, exited(code, 0))]),
                &ready_worker_state(),
                0,
            );
            assert_eq!(!started(&got).is_empty(), restarts, "{policy} {code}");
        }
    }
}

#[test]
fn a_rule_removes_all_containers_and_then_the_init_containers_run_again() {
    let trigger = json!({"name": "a", "restartPolicy": "Never", "restartPolicyRules": restart_all_rules()});
    let desired = pod(json!({"restartPolicy": "Never", "initContainers": [{"name": "i"}],
        "containers": [trigger, {"name": "b", "image": "i"}],
        "ephemeralContainers": [{"name": "debug", "image": "i"}]}));
    let debug = container("debug", 0, running());
    let mut state = ready_worker_state();
    let triggered = observed(vec![
        container("i", 0, exited(0, 1)),
        container("a", 0, exited(42, 5)),
        container("b", 0, running()),
        debug.clone(),
    ]);
    let restart = Action::RestartAll { others: vec!["i0".into(), "b0".into()], triggers: vec!["a0".into()] };
    assert_eq!(decide(&desired, &triggered, &state, 5).actions, std::slice::from_ref(&restart));
    // An agent that starts after the other containers have ended continues the restart.
    let mut stopped = triggered.clone();
    stopped.containers[2].run = exited(137, 6);
    assert_eq!(decide(&desired, &stopped, &WorkerState::default(), 6).actions, [restart]);
    state.removed = crate::pod::restart::removed(&stopped, &["i0".into(), "b0".into()], &["a0".into()]);
    let removed = observed(vec![debug.clone()]);
    assert_eq!(started(&decide(&desired, &removed, &state, 7)), [("i", 1)]);
    // The container that triggered the restart has the back-off of a crash.
    state.crashes.fail("a", at(5), at(5));
    let initialized = observed(vec![debug, container("i", 1, exited(0, 8))]);
    let got = decide(&desired, &initialized, &state, 8);
    assert_eq!((started(&got), got.wake), (vec![("b", 1)], Some(at(15))));
    let got = decide(&desired, &initialized, &state, 15);
    assert_eq!(started(&got), [("a", 1), ("b", 1)]);
    assert!(matches!(got.actions.as_slice(), [Action::Start(list)] if list[0].crashed == Some(at(5))));
}

#[test]
fn a_pod_that_restarts_all_containers_again_waits_before_it_starts_any() {
    let trigger = |name: &str| json!({"name": name, "restartPolicy": "Never", "restartPolicyRules": restart_all_rules()});
    let desired = pod(json!({"restartPolicy": "Never", "containers": [trigger("a"), trigger("b")]}));
    let gone = observed(vec![]);
    let mut state = ready_worker_state();
    let mut restart = |attempt: u32, trigger: &str, other: &str, now: i64| {
        let before = observed(vec![
            container(trigger, attempt, exited(42, now)),
            container(other, attempt, exited(137, now)),
        ]);
        let (other, trigger) = (format!("{other}{attempt}"), format!("{trigger}{attempt}"));
        state.removed = crate::pod::restart::removed(&before, &[other], &[trigger]);
        state.count_restart_of_all(at(now));
        state.clone()
    };
    // The triggers differ, so no single container has a back-off.
    let first = restart(0, "a", "b", 5);
    assert_eq!(started(&decide(&desired, &gone, &first, 5)), [("a", 1), ("b", 1)]);
    let second = restart(1, "b", "a", 6);
    let got = decide(&desired, &gone, &second, 6);
    assert_eq!((started(&got), got.wake), (vec![], Some(at(16))));
    let reasons: Vec<&str> = got.waiting.iter().map(|(_, waiting)| waiting.reason.as_str()).collect();
    assert_eq!(reasons, ["CrashLoopBackOff", "CrashLoopBackOff"]);
    assert!(got.waiting[0].1.message.starts_with("back-off 10s "), "{}", got.waiting[0].1.message);
    assert_eq!(started(&decide(&desired, &gone, &second, 16)), [("a", 2), ("b", 2)]);
    let third = restart(2, "a", "b", 17);
    assert_eq!(decide(&desired, &gone, &third, 17).wake, Some(at(37)));
    assert_eq!(started(&decide(&desired, &gone, &third, -9)), [("a", 3), ("b", 3)], "the clock was set back");
    // After ten minutes without a restart the back-off is reset.
    let later = restart(3, "b", "a", 17 + 601);
    assert_eq!(started(&decide(&desired, &gone, &later, 17 + 601)), [("a", 4), ("b", 4)]);
}

#[test]
fn a_pod_that_is_deleted_or_has_failed_does_not_restart_its_containers() {
    let trigger = json!({"name": "a", "restartPolicy": "Never", "restartPolicyRules": restart_all_rules()});
    let desired = pod(json!({"restartPolicy": "Never", "containers": [trigger]}));
    let triggered = observed(vec![container("a", 0, exited(42, 5))]);
    let verdict = Some(Verdict { reason: "x".into(), message: "y".into() });
    let state = WorkerState { verdict, ..ready_worker_state() };
    assert_eq!(decide(&desired, &triggered, &state, 5).actions, [Action::StopPod { grace: 30 }]);
    let gone = DesiredPod::Gone(std::sync::Arc::clone(desired.pod()));
    let got = decide(&gone, &triggered, &ready_worker_state(), 5).actions;
    assert_eq!(got, [Action::StopPod { grace: 30 }]);
}

#[test]
fn a_container_that_failed_a_probe_starts_again_whatever_its_exit_code_unless_its_policy_is_never() {
    let killed = |restarts: bool| {
        let request = KillRequest { why: "failed liveness probe".into(), grace: None, restarts };
        WorkerState { kill_requests: [("a0".to_owned(), request)].into(), ..ready_worker_state() }
    };
    let on_failure = pod(json!({"restartPolicy": "OnFailure", "containers": [{"name": "a"}]}));
    let ended = |code: i32| observed(vec![container("a", 0, exited(code, 5))]);
    assert_eq!(started(&decide(&on_failure, &ended(0), &killed(true), 5)), [("a", 1)]);
    let stop = [Action::StopPod { grace: 30 }];
    assert_eq!(decide(&on_failure, &ended(0), &killed(false), 5).actions, stop);
    let ruled = |policy: &str| {
        let own = json!({"name": "a", "restartPolicy": policy, "restartPolicyRules": restart_all_rules()});
        pod(json!({"restartPolicy": "Never", "containers": [own]}))
    };
    assert_eq!(started(&decide(&ruled("Always"), &ended(42), &killed(true), 5)), [("a", 1)]);
    assert_eq!(decide(&ruled("Never"), &ended(143), &killed(true), 5).actions, stop);
    let got = decide(&ruled("Never"), &ended(42), &killed(true), 5).actions;
    assert!(matches!(got.as_slice(), [Action::RestartAll { .. }]), "{got:?}");
}
