//! Restart policies and restart rules of containers: own policies, rules for exit codes, restarts of all containers.

use coracle_integration::{Cluster, eventually, on_a_machine};
use serde_json::{Value, json};

/// A container that can write to the pod's volume.
fn container(name: &str, script: &str) -> Value {
    json!({"name": name, "image": "busybox", "command": ["sh", "-c", script],
        "volumeMounts": [{"name": "work", "mountPath": "/work"}]})
}

/// The container with this policy and a rule for exit code 42.
fn with_rule(mut container: Value, policy: &str, action: &str) -> Value {
    container["restartPolicy"] = policy.into();
    container["restartPolicyRules"] =
        json!([{"action": action, "exitCodes": {"operator": "In", "values": [42]}}]);
    container
}

fn create(cluster: &Cluster, name: &str, inits: &[Value], mains: &[Value]) {
    let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 0, "initContainers": inits,
            "containers": mains, "volumes": [{"name": "work", "emptyDir": {}}]}});
    cluster.apply(&pod.to_string());
}

fn statuses(pod: &Value) -> Vec<Value> {
    let lists = ["initContainerStatuses", "containerStatuses"];
    let of = |list: &str| pod["status"][list].as_array().cloned().unwrap_or_default();
    lists.iter().flat_map(|list| of(list)).collect()
}

fn has_restarted_once(status: &Value) -> bool {
    status["restartCount"] == 1 && status["lastState"]["terminated"].is_object() && status["ready"] == true
}

#[test]
fn an_exit_restarts_its_container_or_all_containers_as_its_rules_say() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up(machine, &mirrors);

        let once = |code: i32| format!("[ -e /work/again ] && exit 0; touch /work/again; exit {code}");
        create(&cluster, "rule", &[], &[with_rule(container("c", &once(42)), "Never", "Restart")]);
        create(&cluster, "other", &[], &[with_rule(container("c", &once(1)), "Never", "Restart")]);
        for (name, phase, restarts) in [("rule", "Succeeded", 1), ("other", "Failed", 0)] {
            let pod = eventually(&format!("{name} to be {phase}"), 120, || {
                let pod = cluster.get(&["pod", name]);
                (pod["status"]["phase"] == phase).then_some(pod)
            });
            assert_eq!(pod["status"]["containerStatuses"][0]["restartCount"], restarts, "{name}");
        }

        let mut sidecar = container("sidecar", "sleep 100000");
        sidecar["restartPolicy"] = "Always".into();
        let script = "[ -e /work/again ] && sleep 100000; touch /work/again; exit 42";
        let trigger = with_rule(container("trigger", script), "Never", "RestartAllContainers");
        let inits = [container("init", "echo run >> /work/runs"), sidecar];
        create(&cluster, "all", &inits, &[trigger, container("plain", "sleep 100000")]);
        let pod = eventually("all containers to restart", 120, || {
            let pod = cluster.get(&["pod", "all"]);
            let statuses = statuses(&pod);
            (statuses.len() == 4 && statuses.iter().all(has_restarted_once)).then_some(pod)
        });
        assert_eq!(pod["status"]["phase"], "Running");
        let conditions = pod["status"]["conditions"].as_array().unwrap();
        let condition = conditions.iter().find(|condition| condition["type"] == "AllContainersRestarting");
        assert_eq!(condition.unwrap()["status"], "False");
        let runs = cluster.kubectl(&["exec", "all", "-c", "plain", "--", "cat", "/work/runs"]);
        assert_eq!(runs.lines().count(), 2, "runs of the init container");

        // A restarted agent keeps the containers and their counts. It may have lost the terminations of removed
        // containers.
        cluster.kill();
        cluster.start();
        cluster.kubectl(&["wait", "pod/all", "--for=condition=Ready", "--timeout=60s"]);
        let pod = cluster.get(&["pod", "all"]);
        let kept = statuses(&pod).iter().all(|status| status["restartCount"] == 1 && status["ready"] == true);
        assert!(kept, "{}", pod["status"]);
    });
}
