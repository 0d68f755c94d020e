use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};

use super::allocation::{Candidate, check_resize, differs, is_in_progress, reported, with_resources};
use super::*;
use crate::cgroup::resources::Amount;
use crate::cgroup::{Machine, container_resources};
use crate::pod::state::{ContainerRun, ObservedSandbox};

fn pod(cpu: &str, memory: &str) -> Pod {
    let resources = json!({"requests": {"cpu": cpu, "memory": memory}});
    serde_json::from_value(json!({"metadata": {"uid": "u", "generation": 2},
        "spec": {"containers": [{"name": "c", "resources": resources}]}}))
    .unwrap()
}

fn resources(value: Value) -> ResourceRequirements {
    serde_json::from_value(value).unwrap()
}

fn container(resources: Value, policies: Value) -> Container {
    serde_json::from_value(json!({"name": "c", "resources": resources, "resizePolicy": policies})).unwrap()
}

#[test]
fn a_changed_resource_with_a_restart_policy_restarts_the_container() {
    let actual = resources(json!({"requests": {"cpu": "100m", "memory": "1Mi"}, "limits": {"cpu": "200m"}}));
    let policies = json!([{"resourceName": "memory", "restartPolicy": "RestartContainer"},
        {"resourceName": "cpu", "restartPolicy": "NotRequired"}]);
    let whole = |limits: Value| -> Pod {
        serde_json::from_value(json!({"spec": {"resources": {"limits": limits}, "containers": []}})).unwrap()
    };
    let alone = Pod::default();
    let of = |wanted| change(&alone, &container(wanted, policies.clone()), &actual);
    let same = json!({"requests": {"cpu": "0.1", "memory": "1024Ki"}, "limits": {"cpu": "200m"}});
    assert_eq!(of(same), None);
    let cpu = json!({"requests": {"cpu": "100m", "memory": "1Mi"}, "limits": {"cpu": "300m"}});
    assert_eq!(of(cpu), Some(Change::Update));
    let memory = json!({"requests": {"cpu": "100m", "memory": "2Mi"}, "limits": {"cpu": "300m"}});
    assert_eq!(of(memory), Some(Change::Restart));
    // A limit of the pod as a whole applies to containers without a limit of their own.
    let same = json!({"requests": {"cpu": "100m", "memory": "1Mi"}});
    let of = |limits| change(&whole(limits), &container(same.clone(), policies.clone()), &actual);
    assert_eq!(of(json!({"cpu": "200m"})), None);
    assert_eq!(of(json!({"cpu": "300m"})), Some(Change::Update));
    assert_eq!(of(json!({"cpu": "200m", "memory": "2Mi"})), Some(Change::Restart));
}

#[test]
fn requested_changes_are_those_of_amounts() {
    let change = |resource, old, new| RequestedChange { resource, requirement: "requests", old, new };
    assert!(requested_changes(&pod("1", "1Mi"), &pod("1000m", "1024Ki")).is_empty());
    let changes = requested_changes(&pod("1", "1Mi"), &pod("1500m", "0"));
    assert_eq!(changes, [change("cpu", 1000, 1500), change("memory", 1 << 20, 0)]);
    let mut other = pod("2", "2Mi");
    other.spec.as_mut().unwrap().containers[0].name = "other".into();
    assert!(requested_changes(&pod("1", "1Mi"), &other).is_empty());
}

#[test]
fn a_resize_waits_for_room_and_only_what_grows_is_checked() {
    let amount = |cpu_millis, memory| Amount { cpu_millis, memory };
    let old = pod("1", "1Mi");
    let evaluated = |cpu: &str, memory: &str| {
        check_resize(&pod(cpu, memory), &old, amount(2500, 4 << 20), amount(4000, 4 << 20))
    };
    assert_eq!(evaluated("1500m", "1Mi"), Ok(()));
    // The node's memory is overcommitted, and the resize requests no more memory.
    assert_eq!(evaluated("500m", "512Ki"), Ok(()));
    let deferred = evaluated("1501m", "1Mi").unwrap_err();
    assert_eq!(deferred.reason, "Deferred");
    assert_eq!(
        deferred.message,
        "Node didn't have enough resource: cpu, requested: 1501, used: 2500, capacity: 4000"
    );
    assert_eq!(deferred.generation, Some(2));
    let infeasible = evaluated("4001m", "1Mi").unwrap_err();
    assert_eq!(infeasible.reason, "Infeasible");
    assert_eq!(infeasible.message, "Node didn't have enough capacity: cpu, requested: 4001, capacity: 4000");
}

#[test]
fn resizes_are_evaluated_by_growth_priority_class_and_age() {
    let at = |second| Timestamp::from_second(second).unwrap();
    let old = pod("1", "1Mi");
    let mut important = pod("2", "1Mi");
    important.spec.as_mut().unwrap().priority = Some(9);
    let full = json!({"requests": {"cpu": "2", "memory": "1Mi"}, "limits": {"cpu": "2", "memory": "1Mi"}});
    let mut guaranteed = pod("2", "1Mi");
    guaranteed.spec.as_mut().unwrap().containers[0].resources = Some(resources(full));
    let mut list = [
        ("young", Candidate::of(&pod("2", "1Mi"), &old, at(9))),
        ("old", Candidate::of(&pod("2", "1Mi"), &old, at(1))),
        ("guaranteed", Candidate::of(&guaranteed, &old, at(8))),
        ("important", Candidate::of(&important, &old, at(8))),
        ("smaller", Candidate::of(&pod("1", "1Ki"), &old, at(9))),
    ];
    list.sort_by(|a, b| a.1.cmp(&b.1));
    let names: Vec<&str> = list.iter().map(|(name, _)| *name).collect();
    assert_eq!(names, ["smaller", "important", "guaranteed", "old", "young"]);
}

#[test]
fn a_pod_keeps_its_allocated_resources_until_a_resize_is_accepted() {
    let (old, mut new) = (pod("1", "1Mi"), pod("2", "1Mi"));
    new.metadata.labels = Some([("a".to_owned(), "b".to_owned())].into());
    assert!(differs(&new, &old) && !differs(&old, &old));
    let kept = with_resources(&new, &old);
    assert_eq!(kept.spec, old.spec);
    assert_eq!(kept.metadata, new.metadata);
}

#[test]
fn the_status_has_the_allocated_resources_of_a_pending_resize() {
    let mut new = pod("2", "1Mi");
    let status = json!({"containerStatuses": [{"name": "c", "image": "", "imageID": "", "ready": true,
        "restartCount": 0, "resources": {"requests": {"cpu": "1", "memory": "1Mi"}}}]});
    new.status = serde_json::from_value(status).unwrap();
    assert_eq!(reported(&new), None);
    let condition = json!([{"type": "PodResizePending", "status": "True", "reason": "Deferred"}]);
    new.status.as_mut().unwrap().conditions = serde_json::from_value(condition).unwrap();
    assert_eq!(reported(&new).unwrap().spec, pod("1", "1Mi").spec);
    new.spec.as_mut().unwrap().resources = Some(resources(json!({"requests": {"cpu": "4"}})));
    let whole = Some(resources(json!({"requests": {"cpu": "3"}})));
    new.status.as_mut().unwrap().resources.clone_from(&whole);
    assert_eq!(reported(&new).unwrap().spec.unwrap().resources, whole);
}

#[test]
fn decisions_reach_the_worker_once() {
    let resizes = Resizes::default();
    let pending = |generation| PendingResize {
        reason: "Deferred",
        message: "m".to_owned(),
        generation: Some(generation),
    };
    assert!(resizes.defer("u", pending(2)));
    assert!(!resizes.defer("u", pending(2)));
    assert!(resizes.defer("u", pending(3)));
    assert_eq!(resizes.pending("u"), Some(pending(3)));
    let (old, new) = (pod("1", "1Mi"), Arc::new(pod("2", "1Mi")));
    resizes.accept("u", &new);
    resizes.remove("u");
    assert_eq!(resizes.pending("u"), None);
    assert!(resizes.take_accepted("u", &old).is_none(), "the worker has not received the new resources");
    assert!(resizes.take_accepted("u", &new).is_some());
    assert!(resizes.take_accepted("u", &new).is_none());
    resizes.remove("u");
    assert!(resizes.lock().is_empty());
}

#[test]
fn the_status_restores_the_state_after_a_restart() {
    let status: PodStatus = serde_json::from_value(json!({
        "conditions": [{"type": "PodResizeInProgress", "status": "True", "reason": "Error", "message": "m",
            "observedGeneration": 4}],
        "containerStatuses": [{"name": "c", "containerID": "x://1", "image": "", "imageID": "", "ready": true,
            "restartCount": 0, "state": {"running": {}}, "resources": {"requests": {"cpu": "1"}}}]}))
    .unwrap();
    let with_status = Pod { status: Some(status), ..Pod::default() };
    let mut state = ResizeState::of(&with_status);
    assert!(state.is_cgroup_due, "the resize is not complete");
    state.is_cgroup_due = false;
    assert_eq!(state.in_progress, Some(InProgress { generation: Some(4), error: Some("m".to_owned()) }));
    let mut observed = ObservedContainer {
        id: "1".into(),
        sandbox: "s".into(),
        name: "c".into(),
        attempt: 0,
        requested_image: None,
        image: String::new(),
        image_id: String::new(),
        user: None,
        created_with: Some(resources(json!({"requests": {"cpu": "500m"}}))),
        limits: None,
        run: ContainerRun::Running { started: Timestamp::UNIX_EPOCH },
    };
    assert_eq!(state.actuated(&observed), Some(&resources(json!({"requests": {"cpu": "1"}}))));
    let pods = |observed: &ObservedContainer| ObservedPod {
        sandboxes: vec![ObservedSandbox { id: "s".into(), ready: true, ..ObservedSandbox::default() }],
        containers: vec![observed.clone()],
    };
    let wanted = pod("1", "0");
    assert!(!is_resizing(&wanted, &pods(&observed), &state));
    state.actuated.clear();
    assert!(is_resizing(&wanted, &pods(&observed), &state), "it was created with less");
    let machine = Machine { memory: 1 << 30, cgroup_v2: true, limits_swap: false, has_cpu_quota: true };
    let container = wanted.spec.as_ref().unwrap().containers[0].clone();
    observed.limits = Some(KernelLimits::of(&container_resources(&wanted, &container, machine)));
    state.adopt(&wanted, &pods(&observed), machine);
    assert!(!is_resizing(&wanted, &pods(&observed), &state), "the kernel has the new limits");
    state.actuated.clear();
    observed.created_with = None;
    assert!(!is_resizing(&wanted, &pods(&observed), &state), "an earlier agent made it");
}

#[test]
fn the_status_restores_inherited_limits() {
    let whole = |cpu: &str| json!({"limits": {"cpu": cpu}});
    let mut pod: Pod =
        serde_json::from_value(json!({"spec": {"resources": whole("2"), "containers": [{"name": "c"}]},
        "status": {"containerStatuses": [{"name": "c", "containerID": "x://1", "image": "", "imageID": "",
            "ready": true, "restartCount": 0, "state": {"running": {}}, "resources": {}}]}}))
        .unwrap();
    assert_eq!(
        ResizeState::of(&pod).actuated.get("1"),
        Some(&resources(whole("2"))),
        "an earlier agent made it"
    );
    let status = pod.status.as_mut().unwrap();
    status.resources = Some(resources(whole("1")));
    let state = ResizeState::of(&pod);
    assert_eq!(state.actuated.get("1"), Some(&resources(whole("1"))));
    assert!(!is_in_progress(&pod));
    let condition = json!([{"type": "PodResizeInProgress", "status": "True"}]);
    pod.status.as_mut().unwrap().conditions = serde_json::from_value(condition).unwrap();
    assert!(is_in_progress(&pod) && is_unfinished(&pod));
    assert_eq!(ResizeState::of(&pod).pod_before.as_deref(), Some(&resources(whole("1"))));
}

#[test]
fn a_resize_that_was_accepted_and_not_reported_is_continued() {
    let with = |of_status: &str, whole: Value| {
        let mut pod = pod("2", "1Mi");
        let status = json!({"resources": whole, "containerStatuses": [{"name": "c", "containerID": "x://1",
            "image": "", "imageID": "", "ready": true, "restartCount": 0, "state": {"running": {}},
            "resources": {"requests": {"cpu": of_status, "memory": "1Mi"}}}]});
        pod.status = serde_json::from_value(status).unwrap();
        pod
    };
    let whole = |cpu: &str| json!({"requests": {"cpu": cpu, "memory": "1Mi"}});
    let same = with("2", whole("2000m"));
    assert!(!is_unfinished(&same) && ResizeState::of(&same).in_progress.is_none());
    assert!(!is_unfinished(&with("2", Value::Null)), "an earlier agent has no resources of the whole pod");
    for interrupted in [with("1", whole("1")), with("2", whole("1")), with("1", Value::Null)] {
        assert!(is_unfinished(&interrupted) && !is_in_progress(&interrupted));
        let state = ResizeState::of(&interrupted);
        assert!(state.is_cgroup_due);
        assert_eq!(state.in_progress, Some(InProgress { generation: Some(2), error: None }));
        assert_eq!(state.pod_before.as_deref(), interrupted.status.as_ref().unwrap().resources.as_ref());
    }
}

#[test]
fn events_have_the_resources_in_upstreams_form() {
    let mut pod = pod("100m", "100");
    let spec = pod.spec.as_mut().unwrap();
    spec.init_containers = Some(vec![Container { name: "i".to_owned(), ..Container::default() }]);
    assert_eq!(
        event_message("Pod resize error", &pod, Some(3), Some("no")),
        r#"Pod resize error: {"initContainers":[{"name":"i","resources":{}}],"containers":[{"name":"c","resources":{"requests":{"cpu":"100m","memory":"100"}}}],"generation":3,"error":"no"}"#
    );
}
