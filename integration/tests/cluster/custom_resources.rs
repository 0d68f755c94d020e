//! Custom resources with kubectl: definition, objects, validation, versions, scale, apply, restart, deletion.

use std::process::Output;

use coracle_integration::{Nodes, on_a_machine};
use coracle_testing::eventually;
use serde_json::{Value, json};

const CIDRS: &str = "10.42.0.0/16";

/// The cluster and the file that holds the sent object.
struct Sender<'a> {
    nodes: &'a Nodes,
    path: String,
}

impl Sender<'_> {
    fn send(&self, verb: &[&str], object: &Value) -> Output {
        std::fs::write(&self.path, object.to_string()).unwrap();
        self.nodes.try_kubectl(&[verb, &["-f", &self.path]].concat())
    }

    fn succeed(&self, verb: &[&str], object: &Value) {
        let output = self.send(verb, object);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }

    /// The error of a request that must fail.
    fn refused(&self, verb: &[&str], object: &Value) -> String {
        let output = self.send(verb, object);
        assert!(!output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

fn version(name: &str, storage: bool) -> Value {
    json!({
        "name": name, "served": true, "storage": storage,
        "subresources": {"status": {}, "scale": {
            "specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas"}},
        "additionalPrinterColumns": [{"name": "Size", "type": "string", "jsonPath": ".spec.size"}],
        "selectableFields": [{"jsonPath": ".spec.size"}],
        "schema": {"openAPIV3Schema": {"type": "object", "properties": {
            "spec": {
                "type": "object",
                "description": "What the widget should be.",
                "properties": {
                    "size": {"type": "string", "default": "S", "enum": ["S", "M", "L"]},
                    "replicas": {"type": "integer", "default": 1, "maximum": 10},
                },
                "x-kubernetes-validations": [
                    {"rule": "self.size != 'L' || self.replicas == 1", "message": "a large widget is alone"}],
            },
            "status": {"type": "object", "properties": {"replicas": {"type": "integer"}}},
        }}},
    })
}

fn definition() -> Value {
    json!({
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "widgets.example.com"},
        "spec": {
            "group": "example.com", "scope": "Namespaced",
            "names": {"plural": "widgets", "kind": "Widget", "shortNames": ["wd"]},
            "versions": [version("v1", true), version("v2", false)],
        },
    })
}

fn widget(name: &str, spec: &Value) -> Value {
    json!({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": name}, "spec": spec})
}

#[test]
fn a_custom_resource_is_served_while_its_definition_exists() {
    on_a_machine(|machine| {
        let nodes = Nodes::control_plane_only(machine, CIDRS, &[]);
        let sender = Sender { nodes: &nodes, path: machine.path("object.json").to_str().unwrap().to_owned() };
        sender.succeed(&["create"], &definition());
        nodes.kubectl(&["wait", "--for=condition=Established", "--timeout=60s", "crd/widgets.example.com"]);
        objects(&sender);
        refused_objects(&sender);
        documents(&sender);
        deletion(&sender);
    });
}

fn objects(sender: &Sender<'_>) {
    sender.succeed(&["create"], &widget("a", &json!({})));
    assert_eq!(sender.nodes.get(&["wd/a"])["spec"], json!({"size": "S", "replicas": 1}));
    let table = sender.nodes.kubectl(&["get", "widgets"]);
    assert!(table.contains("SIZE"), "{table}");
    let other = sender.nodes.get(&["widgets.v2.example.com/a"]);
    assert_eq!(other["apiVersion"], "example.com/v2");
    sender.nodes.kubectl(&["scale", "widget/a", "--replicas=3"]);
    sender.nodes.kubectl(&["patch", "widget", "a", "--type=merge", "-p", r#"{"spec": {"size": "M"}}"#]);
    assert_eq!(sender.nodes.get(&["widget/a"])["spec"], json!({"size": "M", "replicas": 3}));
    sender.succeed(&["apply", "--server-side"], &widget("b", &json!({"size": "L"})));
    sender.succeed(&["apply"], &widget("c", &json!({"size": "M"})));
    let selected = sender.nodes.kubectl(&["get", "widgets", "--field-selector=spec.size=L", "-o", "name"]);
    assert_eq!(selected.trim(), "widget.example.com/b");
}

fn refused_objects(sender: &Sender<'_>) {
    for (spec, expected) in [
        (
            json!({"size": "XL"}),
            "spec.size: Unsupported value: \"XL\": supported values: \"S\", \"M\", \"L\"",
        ),
        (
            json!({"replicas": 11}),
            "spec.replicas: Invalid value: 11: spec.replicas in body should be less than or equal to 10",
        ),
        (
            json!({"replicas": "x"}),
            "spec.replicas: Invalid value: \"string\": spec.replicas in body must be of type integer: \"string\"",
        ),
        (json!({"size": "L", "replicas": 2}), "spec: Invalid value: a large widget is alone"),
        (json!({"colour": "red"}), "unknown field \"spec.colour\""),
    ] {
        let message = sender.refused(&["create"], &widget("bad", &spec));
        assert!(message.contains(expected), "{message}");
    }
    let mut bad = definition();
    bad["metadata"]["name"] = "others.example.com".into();
    let message = sender.refused(&["create"], &bad);
    assert!(message.contains("must be spec.names.plural+\".\"+spec.group"), "{message}");
}

fn documents(sender: &Sender<'_>) {
    let text = sender.nodes.kubectl(&["explain", "widgets.spec"]);
    assert!(text.contains("What the widget should be."), "{text}");
    let listed = sender.nodes.kubectl(&["api-resources", "--api-group=example.com", "-o", "name"]);
    assert_eq!(listed.trim(), "widgets.example.com");
}

fn deletion(sender: &Sender<'_>) {
    sender.nodes.kubectl(&["delete", "crd", "widgets.example.com", "--timeout=60s"]);
    eventually("the resource to be no longer served", 10, || {
        !sender.nodes.try_kubectl(&["get", "--raw", "/apis/example.com/v1"]).status.success()
    });
    sender.succeed(&["create"], &definition());
    sender.nodes.kubectl(&[
        "wait",
        "--for=condition=Established",
        "--timeout=60s",
        "crd/widgets.example.com",
    ]);
    assert_eq!(sender.nodes.kubectl(&["get", "widgets", "-o", "name"]), "");
}
