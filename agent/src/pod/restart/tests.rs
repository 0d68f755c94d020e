use serde_json::{Value, json};

use super::*;
use crate::pod::state::ObservedSandbox;
use crate::pod::state::fixture::{at, container, exited, running};

fn spec(spec: Value) -> PodSpec {
    serde_json::from_value(spec).unwrap()
}

/// A container with the policy Never and a rule for exit code 42.
fn ruled(name: &str, action: &str) -> Value {
    let rule = json!({"action": action, "exitCodes": {"operator": "In", "values": [42]}});
    json!({"name": name, "restartPolicy": "Never", "restartPolicyRules": [rule]})
}

fn observed(containers: Vec<ObservedContainer>) -> ObservedPod {
    let sandbox = ObservedSandbox { id: "s".into(), ready: true, ..ObservedSandbox::default() };
    ObservedPod { sandboxes: vec![sandbox], containers }
}

fn triggers(spec: &PodSpec, containers: Vec<ObservedContainer>) -> Vec<String> {
    let (observed, state) = (observed(containers), WorkerState::default());
    let exits = Exits { spec, observed: &observed, state: &state };
    exits.triggers().iter().map(|c| c.id.clone()).collect()
}

#[test]
fn rules_go_before_policies_and_own_policies_before_that_of_the_pod() {
    let of = |container: Value| -> Container { serde_json::from_value(container).unwrap() };
    let rule = |operator: &str| {
        let rule = json!({"action": "Restart", "exitCodes": {"operator": operator, "values": [42]}});
        json!({"name": "a", "restartPolicy": "Never", "restartPolicyRules": [rule]})
    };
    let own = |policy: &str| json!({"name": "a", "restartPolicy": policy});
    let plain = || json!({"name": "a"});
    for (pod, one, code, restarts) in [
        ("Always", plain(), 0, true),
        ("OnFailure", plain(), 0, false),
        ("OnFailure", plain(), 1, true),
        ("Never", plain(), 1, false),
        ("Always", own("Never"), 1, false),
        ("Never", own("Always"), 0, true),
        ("Never", own("OnFailure"), 1, true),
        ("Never", own("OnFailure"), 0, false),
        ("Always", rule("In"), 1, false),
        ("Never", rule("In"), 42, true),
        ("Never", rule("NotIn"), 1, true),
        ("Never", rule("NotIn"), 42, false),
        ("Never", ruled("a", "RestartAllContainers"), 42, true),
    ] {
        let pod_spec = spec(json!({"restartPolicy": pod, "containers": []}));
        assert_eq!(restarts_after(&pod_spec, &of(one.clone()), code), restarts, "{pod} {one} {code}");
    }
}

#[test]
fn the_newest_exit_of_any_container_can_trigger_a_restart_of_all() {
    let all = "RestartAllContainers";
    let pod = |inits: Value, mains: Value| {
        spec(json!({"restartPolicy": "Never", "initContainers": inits, "containers": mains}))
    };
    let main = pod(json!([]), json!([ruled("a", all), {"name": "b"}]));
    let other = || container("b", 0, running());
    assert_eq!(triggers(&main, vec![container("a", 0, exited(42, 5)), other()]), ["a0"]);
    assert_eq!(triggers(&main, vec![container("a", 0, exited(1, 5)), other()]), Vec::<String>::new());
    let again = vec![container("a", 0, exited(42, 5)), container("a", 1, running()), other()];
    assert_eq!(triggers(&main, again), Vec::<String>::new());
    let init = pod(json!([ruled("i", all)]), json!([{"name": "b"}]));
    assert_eq!(triggers(&init, vec![container("i", 0, exited(42, 5))]), ["i0"]);
    let restart = pod(json!([]), json!([ruled("a", "Restart"), {"name": "b"}]));
    assert_eq!(triggers(&restart, vec![container("a", 0, exited(42, 5)), other()]), Vec::<String>::new());
    assert!(may_restart_all(&main) && may_restart_all(&init) && !may_restart_all(&restart));
}

#[test]
fn a_sidecar_that_exits_after_the_others_have_ended_triggers_nothing() {
    let mut sidecar = ruled("s", "RestartAllContainers");
    sidecar["restartPolicy"] = json!("Always");
    let inits = json!([{"name": "i"}, sidecar]);
    let pod = spec(json!({"restartPolicy": "Never", "initContainers": inits, "containers": [{"name": "a"}]}));
    let init = |code: i32, finished: i64| container("i", 0, exited(code, finished));
    let sidecar = |finished: i64| container("s", 0, exited(42, finished));
    let ended = vec![init(0, 1), sidecar(6), container("a", 0, exited(0, 5))];
    assert_eq!(triggers(&pod, ended), Vec::<String>::new());
    assert_eq!(triggers(&pod, vec![init(1, 5), sidecar(6)]), Vec::<String>::new());
    // The other containers end later because of the restart of all containers. An agent that starts meanwhile continues
    // the restart.
    let stopped = vec![init(0, 1), sidecar(6), container("a", 0, exited(137, 8))];
    assert_eq!(triggers(&pod, stopped), ["s0"]);
}

#[test]
fn removed_containers_keep_their_counts_and_those_that_crashed_their_ends() {
    let pod = observed(vec![
        container("a", 2, exited(1, 1)),
        container("a", 3, exited(42, 5)),
        container("b", 0, exited(1, 4)),
        container("c", 4, ContainerRun::Created),
        container("d", 0, running()),
        container("i", 0, exited(0, 1)),
        container("debug", 0, running()),
    ]);
    let ids = |ids: &[&str]| ids.iter().map(|id| (*id).to_owned()).collect::<Vec<_>>();
    let mut found = removed(&pod, &ids(&["a2", "b0", "c4", "d0", "i0"]), &ids(&["a3"]));
    let of = |attempt, crashed| Removed { attempt, crashed };
    let ended = [("a", of(4, Some(at(5)))), ("b", of(1, Some(at(4)))), ("i", of(1, None))];
    let expected = [("c", of(4, None)), ("d", of(1, None))].into_iter().chain(ended);
    let expected = expected.map(|(name, removed)| (name.to_owned(), removed));
    assert_eq!(found, expected.collect::<RemovedContainers>());
    forget_created(&mut found, &pod);
    assert_eq!(found.len(), 5, "they are not removed yet");
    forget_created(&mut found, &observed(vec![container("a", 4, running())]));
    assert_eq!(found.keys().collect::<Vec<_>>(), ["b", "c", "d", "i"]);
}

#[test]
fn a_restarted_agent_reads_the_counts_of_removed_containers_from_the_status() {
    let status = |is_restarting: &str| -> PodStatus {
        let one = |name: &str, id: Option<&str>, count: i32| {
            json!({"name": name, "containerID": id, "restartCount": count,
                "image": "i", "imageID": "", "ready": false})
        };
        serde_json::from_value(json!({
            "conditions": [{"type": ALL_RESTARTING, "status": is_restarting}],
            "initContainerStatuses": [one("new", None, 0)],
            "containerStatuses": [one("removed", None, 2), one("here", Some("x://1"), 5)],
        }))
        .unwrap()
    };
    let counts = |status: &PodStatus| -> Vec<(String, u32)> {
        let removed = removed_in_status(Some(status)).into_iter();
        removed.map(|(name, removed)| (name, removed.attempt)).collect()
    };
    assert_eq!(counts(&status("False")), [("removed".to_owned(), 2)]);
    assert_eq!(counts(&status("True")), [("here".to_owned(), 6), ("removed".to_owned(), 2)]);
    assert_eq!(removed_in_status(None), RemovedContainers::new());
}

#[test]
fn a_restarted_agent_reads_the_removed_containers_that_the_status_does_not_have_yet() {
    let dir = tempfile::tempdir().unwrap();
    let of = |name: &str, attempt, crashed| {
        RemovedContainers::from([(name.to_owned(), Removed { attempt, crashed })])
    };
    record::add(dir.path(), &of("a", 1, Some(at(5)))).unwrap();
    record::add(dir.path(), &of("b", 1, None)).unwrap();
    record::add(dir.path(), &of("b", 2, None)).unwrap();
    let running = json!([{"name": "a", "containerID": "x://1", "restartCount": 0, "image": "i", "imageID": "",
        "ready": true}]);
    let pod = |action: &str| -> Pod {
        serde_json::from_value(json!({"spec": {"containers": [ruled("a", action), {"name": "b"}]},
            "status": {"containerStatuses": running}}))
        .unwrap()
    };
    let mut expected = of("a", 1, Some(at(5)));
    expected.extend(of("b", 2, None));
    assert_eq!(removed_before(&pod("RestartAllContainers"), dir.path()), expected);
    assert_eq!(removed_before(&pod("Restart"), dir.path()), RemovedContainers::new());
    record::remove(dir.path());
    assert_eq!(removed_before(&pod("RestartAllContainers"), dir.path()), RemovedContainers::new());
    record::remove(dir.path());
}
