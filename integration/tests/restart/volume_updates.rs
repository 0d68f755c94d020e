//! Files in volumes are updated after changes in the API; a container does not wait for another container's image.

use coracle_integration::{Cluster, eventually, on_a_machine};
use serde_json::json;

#[test]
fn files_of_downward_api_and_projected_volumes_are_updated() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        let field = |path: &str| json!({"path": path, "fieldRef": {"fieldPath": format!("metadata.{path}")}});
        let own = json!([field("labels"), field("annotations")]);
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "labels": {"a": "1"}, "annotations": {"b": "1"}},
            "spec": {"terminationGracePeriodSeconds": 1,
                "containers": [{"name": "c", "image": "busybox", "command": ["sleep", "100000"], "volumeMounts": [
                    {"name": "own", "mountPath": "/own"}, {"name": "all", "mountPath": "/all"}]}],
                "volumes": [{"name": "own", "downwardAPI": {"items": own}}, {"name": "all", "projected": {"sources": [
                    {"downwardAPI": {"items": own}}, {"configMap": {"name": "map"}}, {"secret": {"name": "secret"}}]}}]}});
        cluster.kubectl(&["create", "configmap", "map", "--from-literal=map=1"]);
        cluster.kubectl(&["create", "secret", "generic", "secret", "--from-literal=secret=1"]);
        cluster.apply(&pod.to_string());
        cluster.kubectl(&["wait", "--for=condition=Ready", "--timeout=60s", "pod/p"]);
        let shown = || {
            let files = "cat /own/labels /own/annotations /all/labels /all/annotations /all/map /all/secret";
            let output = cluster.try_kubectl(&["exec", "p", "--", "sh", "-c", files]);
            String::from_utf8(output.stdout).unwrap()
        };
        assert!(shown().contains("a=\"1\""), "{}", shown());
        let link = || cluster.kubectl(&["exec", "p", "--", "readlink", "/own/..data"]);
        let before = link();
        cluster.kubectl(&["label", "pod", "p", "a=2", "--overwrite"]);
        eventually("the label", 10, || shown().matches("a=\"2\"").count() == 2);
        assert_ne!(link(), before, "..data still links to the old directory");
        cluster.kubectl(&["annotate", "pod", "p", "b=2", "--overwrite"]);
        eventually("the annotation", 10, || shown().matches("b=\"2\"").count() == 2);
        cluster.kubectl(&["patch", "configmap", "map", "-p", r#"{"data":{"map":"map-2"}}"#]);
        cluster.kubectl(&["patch", "secret", "secret", "-p", r#"{"stringData":{"secret":"secret-2"}}"#]);
        eventually("the objects", 10, || shown().contains("map-2") && shown().contains("secret-2"));
    });
}

#[test]
fn a_container_does_not_wait_for_images_of_others() {
    on_a_machine(|machine| {
        let mirrors = machine.start_registry();
        let cluster = Cluster::up(machine, &mirrors);
        // A registry that accepts connections and never responds.
        let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let image = format!("{}/slow:1", silent.local_addr().unwrap());
        let container =
            |name: &str, image: &str| json!({"name": name, "image": image, "command": ["sleep", "100000"]});
        let pod = json!({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": {
            "terminationGracePeriodSeconds": 1,
            "containers": [container("slow", &image), container("fast", "busybox")]}});
        cluster.apply(&pod.to_string());
        eventually("the second container", 10, || {
            let pod = cluster.get(&["pod", "p"]);
            let statuses = pod["status"]["containerStatuses"].as_array().cloned().unwrap_or_default();
            let slow = statuses.iter().find(|one| one["name"] == "slow");
            let reason =
                slow.and_then(|slow| slow["state"]["waiting"]["reason"].as_str()).unwrap_or_default();
            assert!(!reason.contains("Pull"), "the pull of the first image failed too early: {statuses:?}");
            statuses.iter().any(|one| one["name"] == "fast" && one["state"]["running"].is_object())
        });
        cluster.kubectl(&["delete", "pod", "p", "--timeout=30s"]);
        drop(silent);
    });
}
