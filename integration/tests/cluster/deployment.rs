//! `kubectl create deployment nginx --image=nginx --replicas=3`: three pods that respond, and their removal.

use coracle_integration::{Cluster, Machine, ResourceSnapshot, eventually, http_get, on_a_machine};
use serde_json::Value;

/// The pods of the nginx deployment that are Ready.
fn ready_pods(cluster: &Cluster) -> Vec<Value> {
    cluster.ready_pods(&["-l", "app=nginx"])
}

fn no_pods(cluster: &Cluster) {
    eventually("the pods to be removed", 60, || {
        cluster.get(&["pods"])["items"].as_array().unwrap().is_empty()
    });
}

fn with_nginx(machine: &mut Machine, versions: &str) -> Cluster {
    let mirrors = machine.start_registry();
    let cluster = Cluster::up(machine, &mirrors);
    let arguments = ["create", "deployment", "nginx", "--image=nginx", "--replicas=3"];
    let output = cluster.kubectl_of(versions, &arguments, "");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    cluster.kubectl(&["rollout", "status", "deployment/nginx", "--timeout=300s"]);
    cluster
}

#[test]
fn three_pods_run_respond_and_leave_nothing() {
    on_a_machine(|machine| {
        let before = ResourceSnapshot::of(machine);
        let mut cluster = with_nginx(machine, "1.37");
        let pods = ready_pods(&cluster);
        assert_eq!(pods.len(), 3);
        for pod in &pods {
            let address = pod["status"]["podIP"].as_str().unwrap();
            let text = eventually("a page", 5, || http_get((address, 80), "/"));
            assert!(text.contains("Welcome to nginx"), "{text}");
        }
        let name = pods[0]["metadata"]["name"].as_str().unwrap();
        let log = eventually("the access log", 5, || {
            let log = cluster.kubectl(&["logs", name]);
            log.contains("GET / HTTP/1.0").then_some(log)
        });
        assert!(log.contains("200"), "{log}");
        assert_eq!(cluster.kubectl(&["exec", name, "--", "cat", "/etc/hostname"]).trim(), name);
        let failing = cluster.try_kubectl(&["exec", name, "--", "sh", "-c", "exit 7"]);
        assert_eq!(failing.status.code(), Some(7));

        cluster.kubectl(&["delete", "deployment", "nginx"]);
        no_pods(&cluster);
        cluster.down();
        let after = ResourceSnapshot::of(machine);
        assert_eq!(after.added_since(&before), Vec::<&str>::new());
    });
}

#[test]
fn supported_kubectl_versions_create_scale_update_and_roll_back() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        for version in ["1.32", "1.35", "1.37"] {
            let run = |arguments: &[&str]| {
                let output = cluster.kubectl_of(version, arguments, "");
                let errors = String::from_utf8_lossy(&output.stderr);
                assert!(output.status.success(), "kubectl {version} {arguments:?}: {errors}");
                String::from_utf8(output.stdout).unwrap()
            };
            run(&["create", "deployment", "nginx", "--image=nginx", "--replicas=1"]);
            run(&["rollout", "status", "deployment/nginx", "--timeout=300s"]);
            run(&["scale", "deployment/nginx", "--replicas=2"]);
            run(&["set", "env", "deployment/nginx", "COLOUR=blue"]);
            run(&["rollout", "status", "deployment/nginx", "--timeout=300s"]);
            assert!(run(&["set", "env", "deployment/nginx", "--list"]).contains("COLOUR=blue"));
            run(&["rollout", "undo", "deployment/nginx"]);
            run(&["rollout", "status", "deployment/nginx", "--timeout=300s"]);
            assert!(!run(&["set", "env", "deployment/nginx", "--list"]).contains("COLOUR"));
            assert!(run(&["describe", "deployment", "nginx"]).contains("2 desired | 2 updated"));
            assert!(run(&["explain", "deployment.spec.replicas"]).contains("integer"));
            run(&["delete", "deployment", "nginx"]);
            no_pods(&cluster);
        }
    });
}
