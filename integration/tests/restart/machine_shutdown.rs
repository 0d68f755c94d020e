//! Shutdown of the machine: the node ends its pods by priority, with their grace periods, before it stops.

use std::fs;

use coracle_integration::{Cluster, ResourceSnapshot, eventually, on_a_machine};
use serde_json::{Value, json};

const FLAGS: [&str; 6] = [
    "--image-gc-high-threshold",
    "100",
    "--shutdown-grace-period",
    "40s",
    "--shutdown-grace-period-critical-pods",
    "20s",
];

/// A pod that writes its name to the file `order` when it gets SIGTERM. `pause` is a command before that.
fn pod(name: &str, pause: &str, directory: &str) -> Value {
    let script = format!(
        "trap '{pause}; echo {name} >>/out/order; exit 0' TERM; echo >/out/started-{name}; sleep 100000 & wait"
    );
    let hook = format!("echo hook-of-{name} >>/out/order");
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            "containers": [{
                "name": "c",
                "image": "busybox",
                "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", script],
                "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", hook]}}},
                "volumeMounts": [{"name": "out", "mountPath": "/out"}],
            }],
            "volumes": [{"name": "out", "hostPath": {"path": directory}}],
        },
    })
}

#[test]
fn pods_end_by_priority_before_the_node_stops_when_the_machine_shuts_down() {
    on_a_machine(|machine| {
        let before = ResourceSnapshot::of(machine);
        let mirrors = machine.start_registry();
        let mut cluster = Cluster::up_with(machine, &mirrors, &FLAGS);
        let out = machine.path("out");
        fs::create_dir(&out).unwrap();
        let directory = out.to_str().unwrap();
        let mut critical = pod("critical", "true", directory);
        critical["spec"]["priorityClassName"] = json!("system-node-critical");
        // The critical pod must not end in this second.
        let items = [critical, pod("ordinary", "sleep 1", directory)];
        cluster.apply(&json!({"apiVersion": "v1", "kind": "List", "items": items}).to_string());
        eventually("the pods to run", 300, || {
            ["critical", "ordinary"].iter().all(|name| out.join(format!("started-{name}")).exists())
        });
        // The service script of OpenRC makes this file when the machine shuts down.
        let file = machine.path("run/machine-shutdown");
        fs::write(&file, "").unwrap();
        cluster.stop();
        let order = fs::read_to_string(out.join("order")).unwrap();
        assert_eq!(order, "hook-of-ordinary\nordinary\nhook-of-critical\ncritical\n");
        cluster.start();
        assert!(!file.exists(), "the file of the former shutdown still exists");
        for name in ["critical", "ordinary"] {
            let status = cluster.get(&["pod", name])["status"].clone();
            assert_eq!(
                (&status["phase"], &status["reason"]),
                (&json!("Failed"), &json!("Terminated")),
                "{status}"
            );
            let message = "Pod was terminated in response to imminent node shutdown.";
            assert_eq!(status["message"], message);
            let conditions = status["conditions"].as_array().unwrap();
            let disruption =
                conditions.iter().find(|condition| condition["type"] == "DisruptionTarget").unwrap();
            assert_eq!(disruption["reason"], "TerminationByKubelet");
            let terminated = &status["containerStatuses"][0]["state"]["terminated"];
            assert_eq!(terminated["exitCode"], 0, "{status}");
        }
        // The pods do not run again.
        assert_eq!(fs::read_to_string(out.join("order")).unwrap(), order);
        cluster.down();
        assert_eq!(ResourceSnapshot::of(machine).added_since(&before), Vec::<&str>::new());
    });
}
