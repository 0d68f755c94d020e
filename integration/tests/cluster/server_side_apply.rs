//! Server-side apply with kubectl: ownership, conflicts, removal of omitted fields, migration from client-side apply.

use std::process::Output;

use coracle_integration::{Nodes, on_a_machine};
use serde_json::{Value, json};

const CIDRS: &str = "10.42.0.0/16";

/// The cluster and the file that holds the applied object.
struct Applier<'a> {
    nodes: &'a Nodes,
    path: String,
}

impl Applier<'_> {
    /// Applies an object as a manager, with more flags of kubectl.
    fn apply(&self, manager: &str, object: &Value, flags: &[&str]) -> Output {
        std::fs::write(&self.path, object.to_string()).unwrap();
        let manager = format!("--field-manager={manager}");
        let all = [&["apply", "--server-side", &manager, "-f", &self.path], flags].concat();
        self.nodes.try_kubectl(&all)
    }

    fn succeed(&self, manager: &str, object: &Value) {
        let output = self.apply(manager, object, &[]);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// The object in the API, with its managed fields.
    fn live(&self, name: &str) -> Value {
        self.nodes.get(&[name, "--show-managed-fields"])
    }
}

fn manager<'a>(object: &'a Value, name: &str) -> &'a Value {
    let entries = object["metadata"]["managedFields"].as_array().unwrap();
    entries.iter().find(|entry| entry["manager"] == name).unwrap_or(&Value::Null)
}

fn config_map(data: &Value) -> Value {
    json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": data})
}

fn deployment(spec: &Value) -> Value {
    let mut object = json!({
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "web"},
        "spec": {"replicas": 0, "selector": {"matchLabels": {"app": "web"}},
            "template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [
                {"name": "web", "image": "nginx", "ports": [{"containerPort": 80}], "env": [{"name": "A", "value": "1"}]}]}}},
    });
    for (field, value) in spec.as_object().unwrap() {
        object["spec"][field] = value.clone();
    }
    object
}

#[test]
fn managers_own_what_they_apply() {
    on_a_machine(|machine| {
        let nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        let applier =
            Applier { nodes: &nodes, path: machine.path("object.json").to_str().unwrap().to_owned() };
        config_maps(&applier);
        deployments(&applier);
        migration_from_client_side_apply(&applier);
        refused_requests(&applier);
    });
}

fn config_maps(applier: &Applier<'_>) {
    applier.succeed("one", &config_map(&json!({"a": "1", "b": "1"})));
    let live = applier.live("configmap/c");
    let entry = manager(&live, "one");
    assert_eq!(entry["operation"], "Apply");
    assert_eq!(entry["fieldsV1"], json!({"f:data": {"f:a": {}, "f:b": {}}}));
    // Another value for an owned key is a conflict that names the manager and the field.
    let refused = applier.apply("two", &config_map(&json!({"a": "2"})), &[]);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(message.contains("Apply failed with 1 conflict: conflict with \"one\": .data.a"), "{message}");
    let forced = applier.apply("two", &config_map(&json!({"a": "2"})), &["--force-conflicts"]);
    assert!(forced.status.success(), "{}", String::from_utf8_lossy(&forced.stderr));
    assert_eq!(manager(&applier.live("configmap/c"), "one")["fieldsV1"], json!({"f:data": {"f:b": {}}}));
    // An omitted key is removed, except when another manager owns it.
    applier.succeed("one", &config_map(&json!({})));
    assert_eq!(applier.live("configmap/c")["data"], json!({"a": "2"}));
    // The manager of any other write owns the fields that the write changes.
    applier.nodes.kubectl(&["patch", "configmap", "c", "--type=merge", "-p", r#"{"data": {"x": "y"}}"#]);
    let live = applier.live("configmap/c");
    let entry = manager(&live, "kubectl-patch");
    assert_eq!(
        (&entry["operation"], &entry["fieldsV1"]),
        (&json!("Update"), &json!({"f:data": {"f:x": {}}}))
    );
    // A repeated apply changes nothing.
    applier.succeed("two", &config_map(&json!({"a": "2"})));
    assert_eq!(applier.live("configmap/c"), live);
}

fn deployments(applier: &Applier<'_>) {
    applier.succeed("one", &deployment(&json!({})));
    let ports = r#"k:{"containerPort":80,"protocol":"TCP"}"#;
    let entry = manager(&applier.live("deployment/web"), "one").clone();
    let container =
        &entry["fieldsV1"]["f:spec"]["f:template"]["f:spec"]["f:containers"][r#"k:{"name":"web"}"#];
    assert_eq!(container["f:ports"][ports], json!({".": {}, "f:containerPort": {}}));
    // Another manager adds a container; both lists are merged by name.
    let sidecar = json!({"template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [
        {"name": "side", "image": "busybox"}]}}});
    applier.succeed("two", &deployment(&sidecar));
    let live = applier.live("deployment/web");
    let names: Vec<&Value> = live["spec"]["template"]["spec"]["containers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|each| &each["name"])
        .collect();
    assert_eq!(names.len(), 2, "{names:?}");
    // The scale subresource owns the replicas.
    applier.nodes.kubectl(&["scale", "deployment/web", "--replicas=1"]);
    let live = applier.live("deployment/web");
    let entries = live["metadata"]["managedFields"].as_array().unwrap();
    let scaled = entries.iter().find(|entry| entry["subresource"] == "scale").unwrap();
    assert_eq!(scaled["fieldsV1"], json!({"f:spec": {"f:replicas": {}}}));
    // The controller's status has its own entry.
    assert!(entries.iter().any(|entry| entry["subresource"] == "status"), "{entries:?}");
}

fn migration_from_client_side_apply(applier: &Applier<'_>) {
    let path = &applier.path;
    let object = |value: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "old"}, "data": {"a": value}});
    std::fs::write(path, object("1").to_string()).unwrap();
    applier.nodes.kubectl(&["apply", "-f", path]);
    std::fs::write(path, object("2").to_string()).unwrap();
    applier.nodes.kubectl(&["apply", "--server-side", "-f", path]);
    let live = applier.live("configmap/old");
    assert_eq!(live["data"], json!({"a": "2"}));
    assert!(manager(&live, "kubectl-client-side-apply").is_null(), "{live}");
}

fn refused_requests(applier: &Applier<'_>) {
    for (object, expect) in [
        (
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c", "managedFields": [{}]}}),
            "metadata.managedFields must be nil",
        ),
        (
            deployment(&json!({"template": {"metadata": {"labels": {"app": "web"}}, "spec": {"containers": [
            {"name": "x", "image": "i"}, {"name": "x", "image": "j"}]}}})),
            "duplicate entries for key [name=\"x\"]",
        ),
    ] {
        let output = applier.apply("three", &object, &[]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && message.contains(expect), "{message}");
    }
    // A dry run reports the result and stores nothing.
    let dry = applier.apply("dry", &config_map(&json!({"dry": "run"})), &["--dry-run=server"]);
    assert!(dry.status.success());
    assert!(applier.live("configmap/c")["data"]["dry"].is_null());
}
