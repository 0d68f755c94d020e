use k8s_openapi::api::core::v1::{ContainerState, Pod, PodCondition};
use serde_json::json;

use super::*;
use crate::pod::state::fixture::{self, at, running};
use crate::pod::state::{
    ContainerRun, Exit, KillRequest, ObservedContainer, ObservedSandbox, Probed, Verdict, Waiting,
    WorkerState,
};

fn pod(spec: serde_json::Value) -> Pod {
    serde_json::from_value(json!({"metadata": {"name": "p", "uid": "u", "generation": 1}, "spec": spec}))
        .unwrap()
}

fn container(name: &str, attempt: u32, run: ContainerRun) -> ObservedContainer {
    let (image, image_id) = ("nginx".into(), "sha256:1".into());
    ObservedContainer { image, image_id, ..fixture::container(name, attempt, run) }
}

fn exited(code: i32) -> ContainerRun {
    ContainerRun::Exited(Exit { started: at(0), finished: at(1), code, ..Exit::default() })
}

fn observed(containers: Vec<ObservedContainer>) -> ObservedPod {
    let sandbox = ObservedSandbox { id: "s".into(), ready: true, attempt: 0, ips: vec!["10.42.0.2".into()] };
    ObservedPod { sandboxes: vec![sandbox], containers }
}

struct Case {
    pod: Pod,
    observed: ObservedPod,
    state: WorkerState,
    last: Option<PodStatus>,
    finished: bool,
    holds_resources: bool,
}

impl Case {
    fn new(spec: serde_json::Value, observed: ObservedPod) -> Self {
        let state = WorkerState { start_time: Some(at(0)), ..WorkerState::default() };
        Self { pod: pod(spec), observed, state, last: None, finished: false, holds_resources: false }
    }

    fn status(&self, now: i64) -> PodStatus {
        status(&StatusInput {
            runtime_name: "coracle",
            pod: &self.pod,
            observed: &self.observed,
            state: &self.state,
            last: self.last.as_ref(),
            host_ips: &["192.0.2.1".to_owned()],
            now: at(now),
            finished: self.finished,
            holds_resources: self.holds_resources,
        })
    }

    fn phase(&self) -> String {
        self.status(5).phase.unwrap()
    }
}

fn one() -> serde_json::Value {
    json!({"containers": [{"name": "a", "image": "nginx"}]})
}

fn condition<'a>(status: &'a PodStatus, kind: &str) -> &'a PodCondition {
    status.conditions.iter().flatten().find(|c| c.type_ == kind).unwrap()
}

fn waiting_reason(state: Option<&ContainerState>) -> Option<String> {
    state?.waiting.as_ref()?.reason.clone()
}

#[test]
fn a_running_pod_is_ready_and_has_its_addresses() {
    let case = Case::new(one(), observed(vec![container("a", 0, running())]));
    let status = case.status(5);
    assert_eq!(status.phase.as_deref(), Some("Running"));
    assert_eq!(status.pod_ip.as_deref(), Some("10.42.0.2"));
    assert_eq!(status.host_ip.as_deref(), Some("192.0.2.1"));
    assert_eq!(status.observed_generation, Some(1));
    for kind in ["PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled"] {
        assert_eq!(condition(&status, kind).status, "True", "{kind}");
    }
    let container = &status.container_statuses.unwrap()[0];
    assert_eq!(container.container_id.as_deref(), Some("coracle://a0"));
    assert!(container.ready && container.started == Some(true));
}

#[test]
fn a_pod_is_ready_without_its_ephemeral_container_and_a_lost_one_has_ended() {
    let mut spec = one();
    spec["ephemeralContainers"] = json!([{"name": "look", "image": "busybox"}]);
    let reported = |status: PodStatus| status.ephemeral_container_statuses.unwrap()[0].clone();
    let mut case = Case::new(spec, observed(vec![container("a", 0, running())]));
    let status = case.status(5);
    assert_eq!(condition(&status, "Ready").status, "True");
    assert_eq!(waiting_reason(reported(status).state.as_ref()).as_deref(), Some("ContainerCreating"));
    case.observed.containers.push(container("look", 0, running()));
    let status = case.status(6);
    let looks = reported(status.clone());
    assert!(looks.state.as_ref().is_some_and(|state| state.running.is_some()));
    assert_eq!((looks.ready, looks.started), (false, None));
    // After a boot the runtime has no containers.
    case.observed.containers.pop();
    case.last = Some(status);
    let ended = reported(case.status(7)).state.unwrap().terminated.unwrap();
    assert_eq!(ended.reason.as_deref(), Some("ContainerStatusUnknown"));
}

#[test]
fn a_pod_that_is_being_made_is_pending() {
    let case = Case::new(one(), ObservedPod::default());
    let status = case.status(5);
    assert_eq!(status.phase.as_deref(), Some("Pending"));
    assert_eq!(condition(&status, "Initialized").status, "True");
    let ready = condition(&status, "Ready");
    assert_eq!(ready.reason.as_deref(), Some("ContainersNotReady"));
    assert_eq!(ready.message.as_deref(), Some("containers with unready status: [a]"));
    let state = status.container_statuses.unwrap()[0].state.clone();
    assert_eq!(waiting_reason(state.as_ref()).as_deref(), Some("ContainerCreating"));
}

#[test]
fn main_containers_wait_for_initialization() {
    let spec = json!({"initContainers": [{"name": "i"}], "containers": [{"name": "a"}]});
    let case = Case::new(spec, observed(vec![container("i", 0, running())]));
    let status = case.status(5);
    assert_eq!(status.phase.as_deref(), Some("Pending"));
    assert_eq!(condition(&status, "Initialized").reason.as_deref(), Some("ContainersNotInitialized"));
    let state = status.container_statuses.unwrap()[0].state.clone();
    assert_eq!(waiting_reason(state.as_ref()).as_deref(), Some("PodInitializing"));
}

#[test]
fn a_crash_loop_shows_the_back_off_and_the_last_termination() {
    let mut case = Case::new(one(), observed(vec![container("a", 2, exited(1))]));
    let why = Waiting { reason: "CrashLoopBackOff".into(), message: "back-off".into() };
    case.state.waiting.insert("a".into(), why);
    let status = case.status(5);
    assert_eq!(status.phase.as_deref(), Some("Running"));
    let container = &status.container_statuses.unwrap()[0];
    assert_eq!(waiting_reason(container.state.as_ref()).as_deref(), Some("CrashLoopBackOff"));
    let last = container.last_state.as_ref().unwrap().terminated.as_ref().unwrap();
    assert_eq!((last.exit_code, last.reason.as_deref()), (1, Some("Error")));
    assert_eq!(container.restart_count, 2);
}

#[test]
fn the_end_of_a_pod_is_reported_after_its_resources_are_free() {
    let spec = json!({"restartPolicy": "Never", "containers": [{"name": "a"}],
        "initContainers": [{"name": "i"}]});
    for (code, ends, expected) in [
        (0, [("i", 0), ("a", 0)].as_slice(), ["Running", "Succeeded"]),
        (1, [("i", 0), ("a", 1)].as_slice(), ["Running", "Failed"]),
        (2, [("i", 2)].as_slice(), ["Pending", "Failed"]),
    ] {
        let ends = ends.iter().map(|(name, code)| container(name, 0, exited(*code)));
        let mut case = Case::new(spec.clone(), observed(ends.collect()));
        case.holds_resources = true;
        let held = case.phase();
        case.holds_resources = false;
        assert_eq!([held, case.phase()], expected, "{code}");
    }
}

#[test]
fn phases_of_pods_that_end() {
    for (policy, codes, finished, expected) in [
        ("Never", [0, 0], false, "Succeeded"),
        ("Never", [0, 1], false, "Failed"),
        ("OnFailure", [0, 0], false, "Succeeded"),
        ("OnFailure", [0, 1], false, "Running"),
        ("Always", [0, 0], false, "Running"),
        ("Always", [0, 0], true, "Succeeded"),
        ("Always", [0, 137], true, "Failed"),
    ] {
        let spec = json!({"restartPolicy": policy, "containers": [{"name": "a"}, {"name": "b"}]});
        let ends = vec![container("a", 0, exited(codes[0])), container("b", 0, exited(codes[1]))];
        let case = Case { finished, ..Case::new(spec, observed(ends)) };
        assert_eq!(case.phase(), expected, "{policy} {codes:?} {finished}");
    }
}

#[test]
fn a_verdict_fails_the_pod_with_its_reason() {
    let mut case = Case::new(one(), ObservedPod::default());
    case.state.verdict = Some(Verdict { reason: "OutOfcpu".into(), message: "m".into() });
    let status = case.status(5);
    assert_eq!((status.phase.as_deref(), status.reason.as_deref()), (Some("Failed"), Some("OutOfcpu")));
    assert_eq!(status.container_statuses, None);
}

#[test]
fn a_verdict_fails_a_running_pod_after_its_containers_have_ended() {
    let mut case = Case::new(one(), observed(vec![container("a", 0, running())]));
    let former = case.status(5);
    assert_eq!(former.phase.as_deref(), Some("Running"));
    case.last = Some(former);
    case.state.verdict = Some(Verdict { reason: "Evicted".into(), message: "m".into() });
    let stopping = case.status(6);
    assert_eq!((stopping.phase.as_deref(), stopping.reason.as_deref()), (Some("Running"), None));
    assert_eq!(stopping.message, None);
    assert_eq!(condition(&stopping, "Ready").status, "False", "the pod gets no more requests");
    case.last = Some(stopping);
    case.observed = observed(vec![container("a", 0, exited(137))]);
    case.observed.sandboxes[0].ready = false;
    case.holds_resources = true;
    assert_eq!(case.phase(), "Running", "its devices are not free for another pod yet");
    case.holds_resources = false;
    let ended = case.status(7);
    assert_eq!((ended.phase.as_deref(), ended.reason.as_deref()), (Some("Failed"), Some("Evicted")));
    assert_eq!(ended.message.as_deref(), Some("m"));
    // A final phase that another client has set stays.
    let mut overruled = Case::new(one(), observed(vec![container("a", 0, running())]));
    overruled.state.verdict = Some(Verdict { reason: "Evicted".into(), message: "m".into() });
    overruled.last = case.last;
    overruled.pod.status = Some(PodStatus { phase: Some("Failed".into()), ..PodStatus::default() });
    assert_eq!(overruled.phase(), "Failed");
}

#[test]
fn a_pod_that_is_evicted_under_pressure_has_the_condition_of_a_disruption() {
    let mut case = Case::new(one(), observed(vec![container("a", 0, running())]));
    case.state.verdict = Some(Verdict { reason: "Evicted".into(), message: "m".into() });
    let disruption = |status: &PodStatus| -> Option<PodCondition> {
        status.conditions.iter().flatten().find(|c| c.type_ == "DisruptionTarget").cloned()
    };
    assert_eq!(disruption(&case.status(5)), None, "it exceeded a limit of its own");
    case.state.disrupted = true;
    let condition = disruption(&case.status(5)).expect("a condition");
    assert_eq!((condition.status.as_str(), condition.message.as_deref()), ("True", Some("m")));
    assert_eq!(condition.reason.as_deref(), Some("TerminationByKubelet"));
    case.state.verdict = Some(Verdict { reason: "Preempting".into(), message: "m".into() });
    let condition = disruption(&case.status(5)).expect("a condition");
    let message = "Pod was preempted by Kubelet to accommodate a critical pod.";
    assert_eq!(condition.message.as_deref(), Some(message));
}

#[test]
fn readiness_and_startup_follow_their_probes() {
    let probe = json!({"exec": {"command": ["true"]}});
    let spec = json!({"containers": [{"name": "a", "readinessProbe": probe, "startupProbe": probe}]});
    let mut case = Case::new(spec, observed(vec![container("a", 0, running())]));
    let unready = case.status(5).container_statuses.unwrap().remove(0);
    assert_eq!((unready.started, unready.ready), (Some(false), false));
    case.state.probed.insert("a0".into(), Probed { started: true, ready: true });
    let ready = case.status(5).container_statuses.unwrap().remove(0);
    assert_eq!((ready.started, ready.ready), (Some(true), true));
}

#[test]
fn a_condition_keeps_its_transition_time_until_its_status_changes() {
    let mut case = Case::new(one(), ObservedPod::default());
    case.last = Some(case.status(5));
    case.observed = observed(vec![container("a", 0, running())]);
    let status = case.status(9);
    assert_eq!(condition(&status, "PodScheduled").last_transition_time, Some(Time(at(5))));
    assert_eq!(condition(&status, "Ready").last_transition_time, Some(Time(at(9))));
    case.last = Some(status.clone());
    assert_eq!(case.status(60), status);
}

#[test]
fn readiness_gates_prevent_readiness_and_foreign_conditions_stay() {
    let mut spec = one();
    spec["readinessGates"] = json!([{"conditionType": "x.io/up"}]);
    let mut case = Case::new(spec, observed(vec![container("a", 0, running())]));
    assert_eq!(condition(&case.status(5), "Ready").reason.as_deref(), Some("ReadinessGatesNotReady"));
    let mut foreign =
        PodCondition { type_: "x.io/up".into(), status: "Unknown".into(), ..PodCondition::default() };
    case.pod.status = Some(PodStatus { conditions: Some(vec![foreign.clone()]), ..PodStatus::default() });
    let message = "the status of pod readiness gate \"x.io/up\" is not \"True\", but Unknown";
    assert_eq!(condition(&case.status(5), "Ready").message.as_deref(), Some(message));
    foreign.status = "True".into();
    case.pod.status = Some(PodStatus { conditions: Some(vec![foreign.clone()]), ..PodStatus::default() });
    let status = case.status(5);
    assert_eq!(condition(&status, "Ready").status, "True");
    assert_eq!(condition(&status, "x.io/up"), &foreign);
}

#[test]
fn a_container_status_has_user_resources_and_volume_mounts() {
    let mut spec = one();
    spec["containers"][0]["resources"] = json!({"requests": {"cpu": "1"}, "limits": {"cpu": "2"}});
    spec["containers"][0]["volumeMounts"] = json!([
        {"name": "rw", "mountPath": "/rw"},
        {"name": "ro", "mountPath": "/ro", "readOnly": true},
        {"name": "deep", "mountPath": "/deep", "readOnly": true, "recursiveReadOnly": "IfPossible"},
    ]);
    let mut ended = container("a", 0, exited(0));
    ended.user = Some(k8s_openapi::api::core::v1::LinuxContainerUser {
        uid: 1000,
        gid: 0,
        supplemental_groups: Some(vec![0, 5]),
    });
    let status = Case::new(spec, observed(vec![ended])).status(5);
    let reported = json!(status.container_statuses.unwrap()[0]);
    assert_eq!(reported["user"], json!({"linux": {"uid": 1000, "gid": 0, "supplementalGroups": [0, 5]}}));
    assert_eq!(reported["resources"]["limits"]["cpu"], "2", "a container that does not run has limits, too");
    assert_eq!(reported["allocatedResources"], json!({"cpu": "1"}));
    let mounts = json!([
        {"name": "rw", "mountPath": "/rw"},
        {"name": "ro", "mountPath": "/ro", "readOnly": true, "recursiveReadOnly": "Disabled"},
        {"name": "deep", "mountPath": "/deep", "readOnly": true, "recursiveReadOnly": "Enabled"},
    ]);
    assert_eq!(reported["volumeMounts"], mounts);
}

#[test]
fn an_ended_init_container_that_runs_again_keeps_its_status_until_it_ends() {
    let spec = |policy: &str| json!({"restartPolicy": policy, "initContainers": [{"name": "i"}], "containers": [{"name": "a"}]});
    let state =
        |status: &PodStatus| status.init_container_statuses.as_ref().unwrap()[0].state.clone().unwrap();
    for (policy, code, is_kept) in [("OnFailure", 0, true), ("OnFailure", 1, false), ("Always", 0, false)] {
        let mut case = Case::new(spec(policy), observed(vec![container("i", 0, exited(code))]));
        let ended = case.status(5);
        case.observed = observed(vec![container("i", 1, running())]);
        case.pod.status = Some(ended.clone());
        let again = case.status(6);
        assert_eq!(state(&again).running.is_none(), is_kept, "{policy} {code}");
        assert!(!again.init_container_statuses.as_ref().unwrap()[0].ready, "{policy} {code}");
        case.last = Some(again);
        case.observed = observed(vec![container("i", 1, exited(0))]);
        let status = case.status(7);
        let end = &status.init_container_statuses.as_ref().unwrap()[0];
        assert_eq!((end.container_id.as_deref(), end.restart_count), (Some("coracle://i1"), 1));
    }
}

#[test]
fn a_container_that_is_made_waits_for_the_pod_to_be_initialized() {
    let spec = json!({"initContainers": [{"name": "i"}], "containers": [{"name": "a"}]});
    let made = ObservedContainer { run: ContainerRun::Created, ..container("i", 0, running()) };
    let status = Case::new(spec, observed(vec![made])).status(5);
    let init = &status.init_container_statuses.unwrap()[0];
    assert_eq!(waiting_reason(init.state.as_ref()).as_deref(), Some("PodInitializing"));
}

#[test]
fn termination_messages_share_the_size_limit_of_a_status() {
    let loud = |name: &str| {
        let mut ended = container(name, 0, exited(1));
        if let ContainerRun::Exited(exit) = &mut ended.run {
            exit.message = "é".repeat(2048);
        }
        ended
    };
    let lengths = |count: usize| -> Vec<usize> {
        let names: Vec<String> = (0..count).map(|n| format!("c{n}")).collect();
        let list: Vec<_> = names.iter().map(|name| json!({"name": name})).collect();
        let ends = names.iter().map(|name| loud(name)).collect();
        let status =
            Case::new(json!({"containers": list, "restartPolicy": "Never"}), observed(ends)).status(5);
        let ends = status.container_statuses.unwrap().into_iter();
        ends.map(|s| s.state.unwrap().terminated.unwrap().message.unwrap().len()).collect()
    };
    assert_eq!(lengths(1), [4096]);
    assert!(lengths(100).iter().all(|length| *length == 122), "12 KiB in all");
    let mut case = Case::new(one(), ObservedPod::default());
    let why =
        Waiting { reason: "CreateContainerError".into(), message: format!("\x1b{}", "x".repeat(1 << 20)) };
    case.state.waiting.insert("a".into(), why);
    let status = case.status(5).container_statuses.unwrap().remove(0);
    let message = status.state.unwrap().waiting.unwrap().message.unwrap();
    assert!(message.len() <= 2048 && !message.contains('\x1b'));
}

#[test]
fn pod_level_resources_are_reported_with_the_former_ones_during_a_resize() {
    let whole = |cpu: &str| json!({"requests": {"cpu": cpu}, "limits": {"cpu": cpu}});
    let spec = json!({"resources": whole("2"), "containers": [{"name": "a", "image": "nginx"}]});
    let mut case = Case::new(spec, observed(vec![container("a", 0, running())]));
    let inherited = serde_json::from_value(json!({"limits": {"cpu": "2"}})).unwrap();
    case.state.resize.actuated.insert("a0".into(), inherited);
    let status = case.status(5);
    assert_eq!(
        (json!(status.resources), json!(status.allocated_resources)),
        (whole("2"), json!({"cpu": "2"}))
    );
    assert_eq!(
        json!(status.container_statuses.unwrap()[0].resources),
        json!({}),
        "limits that the container inherits from the pod are not in its status"
    );
    case.state.resize.pod_before = serde_json::from_value(whole("1")).unwrap();
    let status = case.status(6);
    assert_eq!(
        (json!(status.resources), json!(status.allocated_resources)),
        (whole("1"), json!({"cpu": "2"}))
    );
}

#[test]
fn a_resize_is_reported_with_its_conditions_and_the_actual_resources() {
    use crate::pod::resize_state::{InProgress, PendingResize};
    let wanted = json!({"requests": {"cpu": "2", "memory": "1Mi", "x.io/y": "1"}});
    let spec = json!({"containers": [{"name": "a", "image": "nginx", "resources": wanted}]});
    let mut case = Case::new(spec, observed(vec![container("a", 0, running())]));
    let actual =
        serde_json::from_value(json!({"requests": {"cpu": "1"}, "limits": {"memory": "4Mi"}})).unwrap();
    case.state.resize.actuated.insert("a0".into(), actual);
    case.state.resize.in_progress = Some(InProgress { generation: Some(2), error: Some("full".into()) });
    case.state.resize.pending =
        Some(PendingResize { reason: "Deferred", message: "busy".into(), generation: Some(3) });
    let status = case.status(5);
    let of = |kind: &str| {
        let found = condition(&status, kind);
        (found.status.clone(), found.reason.clone(), found.message.clone(), found.observed_generation)
    };
    let text = |text: &str| Some(text.to_owned());
    assert_eq!(of("PodResizeInProgress"), ("True".into(), text("Error"), text("full"), Some(2)));
    assert_eq!(of("PodResizePending"), ("True".into(), text("Deferred"), text("busy"), Some(3)));
    let first = &status.container_statuses.as_ref().unwrap()[0];
    let expect = json!({"requests": {"cpu": "1", "x.io/y": "1"}, "limits": {"memory": "4Mi"}});
    assert_eq!(serde_json::to_value(&first.resources).unwrap(), expect);
    assert_eq!(serde_json::to_value(&first.allocated_resources).unwrap(), wanted["requests"]);
    // The conditions end with the resize, including conditions of an earlier report.
    case.pod.status = Some(status);
    case.state.resize = crate::pod::resize_state::ResizeState::default();
    let kinds = case.status(6).conditions.unwrap();
    assert!(kinds.iter().any(|c| c.type_ == "Ready"), "{kinds:?}");
    assert!(kinds.iter().all(|c| !c.type_.starts_with("PodResize")), "{kinds:?}");
}

#[test]
fn restart_policies_and_rules_of_containers_decide_the_phase() {
    let rules = json!([{"action": "Restart", "exitCodes": {"operator": "In", "values": [42]}}]);
    for (pod, own, code, expected) in [
        ("Never", "OnFailure", 1, "Running"),
        ("Never", "OnFailure", 0, "Succeeded"),
        ("Never", "Never", 42, "Running"),
        ("Never", "Never", 1, "Failed"),
        ("Always", "Never", 1, "Failed"),
        ("Always", "Never", 0, "Succeeded"),
    ] {
        let one = json!({"name": "a", "restartPolicy": own, "restartPolicyRules": rules});
        let spec = json!({"restartPolicy": pod, "containers": [one]});
        let case = Case::new(spec, observed(vec![container("a", 0, exited(code))]));
        assert_eq!(case.phase(), expected, "{pod} {own} {code}");
        let one = json!({"name": "i", "restartPolicy": own, "restartPolicyRules": rules});
        let spec = json!({"restartPolicy": pod, "initContainers": [one], "containers": [{"name": "a"}]});
        let case = Case::new(spec, observed(vec![container("i", 0, exited(code))]));
        let expected = if expected == "Failed" { "Failed" } else { "Pending" };
        assert_eq!(case.phase(), expected, "init container: {pod} {own} {code}");
    }
}

#[test]
fn a_restart_of_all_containers_has_a_condition_and_keeps_restart_counts_and_last_states() {
    let rules = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let trigger = json!({"name": "a", "restartPolicy": "Never", "restartPolicyRules": rules});
    let spec = json!({"restartPolicy": "Never", "initContainers": [{"name": "i"}],
        "containers": [trigger, {"name": "b"}]});
    let ends =
        vec![container("i", 0, exited(0)), container("a", 0, exited(42)), container("b", 0, running())];
    let mut case = Case::new(spec, observed(ends));
    let status = case.status(5);
    let restarting = condition(&status, "AllContainersRestarting").clone();
    assert_eq!((restarting.status.as_str(), status.phase.as_deref()), ("True", Some("Running")));
    assert_eq!(restarting.reason.as_deref(), Some("RestartAllContainersStarted"));
    // A container that the restart has stopped does not make the pod fail.
    case.observed.containers[2].run =
        ContainerRun::Exited(Exit { started: at(0), finished: at(6), code: 137, ..Exit::default() });
    assert_eq!(case.phase(), "Running");
    case.last = Some(status);
    case.last = Some(case.status(6));
    let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
    case.state.removed = crate::pod::restart::removed(&case.observed, &ids(&["i0", "b0"]), &ids(&["a0"]));
    case.observed.containers.clear();
    let status = case.status(7);
    let kinds =
        ["AllContainersRestarting", "Initialized"].map(|kind| condition(&status, kind).status.as_str());
    assert_eq!((status.phase.as_deref(), kinds), (Some("Pending"), ["False", "True"]));
    let statuses = status.container_statuses.clone().unwrap();
    let last_code = |status: &k8s_openapi::api::core::v1::ContainerStatus| {
        status.last_state.as_ref().and_then(|last| last.terminated.as_ref()).map(|end| end.exit_code)
    };
    assert_eq!(statuses.len(), 2);
    for (status, code) in statuses.iter().zip([42, 137]) {
        assert_eq!(waiting_reason(status.state.as_ref()).as_deref(), Some("RestartingAllContainers"));
        assert_eq!((status.restart_count, last_code(status)), (1, Some(code)));
    }
    // The containers run again. Their last states are the terminations before the restart.
    case.last = Some(status);
    case.state.removed.clear();
    case.observed.containers =
        vec![container("i", 1, exited(0)), container("a", 1, running()), container("b", 1, running())];
    let status = case.status(8);
    assert_eq!(status.phase.as_deref(), Some("Running"));
    let statuses = status.container_statuses.unwrap();
    let codes: Vec<_> = statuses.iter().map(|status| (status.restart_count, last_code(status))).collect();
    assert_eq!(codes, [(1, Some(42)), (1, Some(137))]);
}

#[test]
fn all_containers_of_a_pod_without_init_containers_restart_while_it_is_running() {
    let rules = json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [42]}}]);
    let trigger = json!({"name": "a", "restartPolicy": "Never", "restartPolicyRules": rules});
    let spec = json!({"restartPolicy": "Never", "containers": [trigger]});
    let mut case = Case::new(spec, observed(vec![container("a", 0, exited(42))]));
    case.last = Some(case.status(5));
    case.state.removed = crate::pod::restart::removed(&case.observed, &[], &["a0".to_owned()]);
    case.observed.containers.clear();
    assert_eq!(case.phase(), "Running");
    // The last status shows the container as running, so its exit is not known.
    case.last = None;
    let status = case.status(6).container_statuses.unwrap().remove(0);
    let end = status.last_state.unwrap().terminated.unwrap();
    assert_eq!((end.exit_code, end.reason.as_deref()), (137, Some("RestartingAllContainers")));
}

#[test]
fn a_container_that_is_restarted_against_its_policy_is_not_shown_as_terminated() {
    let spec = json!({"restartPolicy": "OnFailure", "containers": [{"name": "a"}]});
    let mut case = Case::new(spec, observed(vec![container("a", 0, exited(0))]));
    let request = KillRequest { why: "failed liveness probe".into(), grace: None, restarts: true };
    case.state.kill_requests.insert("a0".into(), request);
    let status = case.status(5);
    assert_eq!(status.phase.as_deref(), Some("Running"));
    let status = &status.container_statuses.unwrap()[0];
    assert_eq!(waiting_reason(status.state.as_ref()).as_deref(), Some("ContainerCreating"));
    assert!(status.last_state.as_ref().is_some_and(|last| last.terminated.is_some()));
    // After this exit code the policy allows a restart, so the termination is shown.
    case.observed.containers[0].run = exited(1);
    let status = &case.status(5).container_statuses.unwrap()[0];
    assert!(status.state.as_ref().is_some_and(|state| state.terminated.is_some()));
    // A failed pod does not start the container again.
    case.observed.containers[0].run = exited(0);
    case.finished = true;
    let status = &case.status(5).container_statuses.unwrap()[0];
    assert!(status.state.as_ref().is_some_and(|state| state.terminated.is_some()));
}
