//! Validation cases: a valid object, one change, and the expected causes.

mod batch;
mod pod;
mod pod_rules;
mod upstream;
mod workload;

use serde_json::json;

use super::*;
use crate::kind::by_kind;
use crate::{defaults, strategy};

fn kind(name: &str) -> &'static Resource {
    let versions = ["v1", "apps/v1", "coordination.k8s.io/v1", "storage.k8s.io/v1", "batch/v1"];
    versions.iter().find_map(|version| by_kind(version, name)).unwrap()
}

/// A good object of each kind.
fn good(name: &str) -> Value {
    let pod = || json!({"containers": [{"name": "a", "image": "x:1"}]});
    let mut object = match name {
        "Pod" => json!({"metadata": {"namespace": "n"}, "spec": pod()}),
        "Deployment" | "ReplicaSet" | "StatefulSet" | "DaemonSet" => {
            json!({"metadata": {"namespace": "n"}, "spec": {"selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": pod()}}})
        }
        "ReplicationController" => {
            json!({"metadata": {"namespace": "n"}, "spec": {
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": pod()}}})
        }
        "PodTemplate" => json!({"metadata": {"namespace": "n"}, "template": {"spec": pod()}}),
        "Job" | "CronJob" => {
            let mut pod = pod();
            pod["restartPolicy"] = "Never".into();
            let job = json!({"template": {"metadata": {"labels": {}}, "spec": pod}});
            match name {
                "Job" => json!({"metadata": {"namespace": "n", "uid": "u"}, "spec": job}),
                _ => json!({"metadata": {"namespace": "n"},
                    "spec": {"schedule": "* * * * *", "jobTemplate": {"spec": job}}}),
            }
        }
        "PersistentVolume" => json!({"metadata": {}, "spec": {"accessModes": ["ReadWriteOnce"],
            "capacity": {"storage": "1Gi"}, "hostPath": {"path": "/x"}}}),
        "PersistentVolumeClaim" => json!({"metadata": {"namespace": "n"}, "spec": {
            "accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}),
        "StorageClass" => json!({"metadata": {}, "provisioner": "x.io/y"}),
        "Service" => json!({"metadata": {"namespace": "n"}, "spec": {"ports": [{"port": 80}]}}),
        "Namespace" | "Node" | "CSINode" => json!({"metadata": {}}),
        "Event" => json!({"metadata": {"namespace": "n"}, "involvedObject": {"namespace": "n"}}),
        _ => json!({"metadata": {"namespace": "n"}}),
    };
    object["metadata"]["name"] = "x".into();
    object
}

/// The causes that a check adds: field and message.
pub(super) fn found(check: impl FnOnce(&mut Causes)) -> Vec<String> {
    let mut causes = Causes::default();
    check(&mut causes);
    causes.into_list().iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
}

fn set(object: &mut Value, pointer: &str, value: Value) {
    let (parent, name) = pointer.rsplit_once('/').unwrap();
    let parent = match object.pointer_mut(parent) {
        Some(parent) => parent,
        None => {
            set(object, parent, json!({}));
            object.pointer_mut(parent).unwrap()
        }
    };
    match (parent, name.parse::<usize>()) {
        (Value::Array(list), Ok(index)) if index == list.len() => list.push(value),
        (Value::Array(list), Ok(index)) => list[index] = value,
        (parent, _) => parent[name] = value,
    }
}

fn texts(causes: Vec<Cause>) -> Vec<String> {
    causes.into_iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
}

/// Sets one value in a valid object and compares the causes by the start of their texts.
fn check(name: &str, pointer: &str, value: Value, expect: &[&str]) {
    let mut object = good(name);
    set(&mut object, pointer, value);
    strategy::prepare_for_create(kind(name), &mut object);
    strategy::prepare_named(kind(name), &mut object);
    defaults::apply(kind(name), &mut object);
    let actual = texts(create(kind(name), &object));
    let fits = actual.len() == expect.len() && actual.iter().zip(expect).all(|(a, e)| a.starts_with(e));
    assert!(fits, "{name} {pointer}: {actual:#?}");
}

#[test]
fn good_objects_pass() {
    for name in [
        "Pod",
        "Deployment",
        "ReplicaSet",
        "Service",
        "Namespace",
        "Node",
        "ConfigMap",
        "Secret",
        "Event",
        "Lease",
        "CSINode",
        "ServiceAccount",
        "StatefulSet",
        "DaemonSet",
        "ReplicationController",
        "PodTemplate",
        "Job",
        "CronJob",
        "PersistentVolume",
        "PersistentVolumeClaim",
        "StorageClass",
    ] {
        check(name, "/metadata/labels", json!({"a.b/c": "d"}), &[]);
    }
}

#[test]
fn finalizers_can_be_removed_from_objects_that_are_invalid_today() {
    let mut old = good("Service");
    set(&mut old, "/metadata/name", json!("a"));
    set(&mut old, "/spec/externalIPs", json!(["127.0.0.1"]));
    defaults::apply(kind("Service"), &mut old);
    old["metadata"]["finalizers"] = json!(["plain"]);
    let problems = |new: &Value| texts(ratcheted(kind("Service"), new, &old, update));
    let mut new = old.clone();
    new["metadata"]["labels"] = json!({"a": "b"});
    assert_eq!(problems(&new), Vec::<String>::new());
    assert!(!update(kind("Service"), &new, &old).is_empty(), "the stored object is invalid");
    new["metadata"]["finalizers"] = Value::Null;
    assert_eq!(problems(&new), Vec::<String>::new());
    new["spec"]["externalIPs"] = json!(["127.0.0.2"]);
    let problems = problems(&new);
    assert!(problems.len() == 1 && problems[0].starts_with("spec.externalIPs[0]: "), "{problems:?}");
}

#[test]
fn an_address_in_an_old_form_may_move_in_its_list() {
    let policy = |ranges: &[&str]| {
        let peers: Vec<Value> = ranges.iter().map(|range| json!({"ipBlock": {"cidr": range}})).collect();
        json!({"metadata": {"name": "a", "namespace": "n"},
            "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": peers}]}})
    };
    let policies = by_kind("networking.k8s.io/v1", "NetworkPolicy").unwrap();
    let old = policy(&["10.0.0.1/8"]);
    let problems = |ranges: &[&str]| texts(ratcheted(policies, &policy(ranges), &old, update));
    assert_eq!(problems(&["192.168.0.0/16", "10.0.0.1/8"]), Vec::<String>::new());
    assert_eq!(problems(&["10.0.0.2/8", "10.0.0.1/8"]).len(), 1);
}

#[test]
fn a_default_of_this_version_is_not_a_change_of_an_immutable_field() {
    let devices = |toleration: Value| {
        let exactly = json!({"deviceClassName": "c", "allocationMode": "All", "tolerations": [toleration]});
        json!({"devices": {"requests": [{"name": "a", "exactly": exactly}]}})
    };
    let claim = |spec: Value| json!({"metadata": {"name": "a", "namespace": "n"}, "spec": spec});
    let claims = by_kind("resource.k8s.io/v1", "ResourceClaim").unwrap();
    let old = claim(devices(json!({"key": "a"})));
    let mut new = old.clone();
    new["metadata"]["labels"] = json!({"a": "b"});
    defaults::apply(claims, &mut new);
    assert_eq!(texts(ratcheted(claims, &new, &old, update)), Vec::<String>::new());
    let other = claim(devices(json!({"key": "a", "operator": "Exists"})));
    let causes = texts(ratcheted(claims, &other, &old, update));
    assert!(causes.len() == 1 && causes[0].starts_with("spec: Invalid value"), "{causes:?}");
}

#[test]
fn an_object_with_more_violations_than_the_limit_can_only_change_its_metadata() {
    let mut old = good("ConfigMap");
    let keys = (0..400).map(|number| (format!("a/{number:03}"), json!("")));
    old["data"] = Value::Object(keys.collect());
    let problems = |new: &Value| ratcheted(kind("ConfigMap"), new, &old, update).len();
    let mut new = old.clone();
    new["metadata"]["labels"] = json!({"a": "b"});
    assert_eq!(problems(&new), 0);
    new["data"]["b/"] = json!("");
    assert_eq!(problems(&new), 300, "the violation of the new key may be cut");
}

#[test]
fn reviews_need_no_name() {
    let review = by_kind("authorization.k8s.io/v1", "SelfSubjectAccessReview").unwrap();
    assert_eq!(texts(create(review, &json!({"metadata": {}, "spec": {}}))), Vec::<String>::new());
}

#[test]
fn metadata_is_checked_on_every_kind() {
    check(
        "Pod",
        "/metadata/name",
        json!("A"),
        &["metadata.name: Invalid value: \"A\": a lowercase RFC 1123 subdomain must"],
    );
    check(
        "Pod",
        "/metadata/name",
        json!(""),
        &["metadata.name: Required value: name or generateName is required"],
    );
    check(
        "Namespace",
        "/metadata/name",
        json!("a.b"),
        &["metadata.name: Invalid value: \"a.b\": must not contain dots"],
    );
    check("Service", "/metadata/name", json!("1a"), &[]);
    check(
        "Service",
        "/metadata/name",
        json!("a.b"),
        &["metadata.name: Invalid value: \"a.b\": must not contain dots"],
    );
    check(
        "Node",
        "/metadata/namespace",
        json!("x"),
        &["metadata.namespace: Forbidden: not allowed on this type"],
    );
    check("Pod", "/metadata/namespace", json!(""), &["metadata.namespace: Required value"]);
    check(
        "ConfigMap",
        "/metadata/labels",
        json!({"a": "b c"}),
        &["metadata.labels: Invalid value: \"b c\": a valid label must"],
    );
    check(
        "ConfigMap",
        "/metadata/labels",
        json!({"a b": ""}),
        &["metadata.labels: Invalid value: \"a b\": name part must consist"],
    );
}

#[test]
fn large_and_wrong_metadata_is_refused() {
    let big = json!({"a": "x".repeat(256 * 1024)});
    check(
        "ConfigMap",
        "/metadata/annotations",
        big,
        &["metadata.annotations: Too long: may not be more than 262144 bytes"],
    );
    check(
        "ConfigMap",
        "/metadata/finalizers",
        json!(["/"]),
        &[
            "metadata.finalizers: Invalid value: \"/\": prefix part",
            "metadata.finalizers: Invalid value: \"/\": name part must be",
            "metadata.finalizers: Invalid value: \"/\": name part must con",
        ],
    );
    let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "", "controller": true});
    check(
        "ConfigMap",
        "/metadata/ownerReferences",
        json!([owner]),
        &["metadata.ownerReferences.uid: Invalid value: \"\": must not be empty"],
    );
}

/// Updates one value of a good object, and compares the causes.
fn check_update(name: &str, pointer: &str, value: Value, expect: &[&str]) {
    let mut old = good(name);
    strategy::prepare_for_create(kind(name), &mut old);
    defaults::apply(kind(name), &mut old);
    old["metadata"]["uid"] = "u".into();
    strategy::prepare_named(kind(name), &mut old);
    let mut new = old.clone();
    set(&mut new, pointer, value);
    strategy::prepare_for_update(kind(name), &mut new, &old);
    defaults::apply(kind(name), &mut new);
    let actual = texts(update(kind(name), &new, &old));
    let fits = actual.len() == expect.len() && actual.iter().zip(expect).all(|(a, e)| a.starts_with(e));
    assert!(fits, "{name} {pointer}: {actual:#?}");
}

#[test]
fn updates_change_only_mutable_fields() {
    check_update("Pod", "/spec/containers/0/image", json!("y"), &[]);
    check_update("Pod", "/spec/tolerations", json!([{"operator": "Exists"}]), &[]);
    check_update("Pod", "/spec/activeDeadlineSeconds", json!(5), &[]);
    check_update("Pod", "/metadata/labels", json!({"a": "b"}), &[]);
    check_update(
        "Pod",
        "/metadata/annotations",
        json!({"kubernetes.io/config.mirror": "x"}),
        &[
            "metadata.annotations[kubernetes.io/config.mirror]: Forbidden: may not add mirror pod annotation",
            "metadata.annotations[kubernetes.io/config.mirror]: Invalid value: \"x\": must set spec.nodeName",
        ],
    );
    check_update(
        "Pod",
        "/spec/nodeName",
        json!("n"),
        &["spec: Forbidden: pod updates may not change fields other than"],
    );
    check_update(
        "Pod",
        "/spec/containers/0/command",
        json!(["x"]),
        &["spec: Forbidden: pod updates may not change fields other than"],
    );
    check_update(
        "Pod",
        "/spec/containers/1",
        json!({"name": "b", "image": "y"}),
        &["spec.containers: Forbidden: pod updates may not add or remove containers"],
    );
    check_update(
        "Pod",
        "/metadata/uid",
        json!("v"),
        &["metadata.uid: Invalid value: \"v\": field is immutable"],
    );
    check_update(
        "Deployment",
        "/spec/selector",
        json!({"matchLabels": {"a": "b", "c": "d"}}),
        &[
            "spec.template.metadata.labels: Invalid",
            "spec.selector: Invalid value: {\"matchLabels\":{\"a\":\"b\",\"c\":\"d\"}}: field is immutable",
        ],
    );
    check_update("Secret", "/type", json!("x/y"), &["type: Invalid value: \"x/y\": field is immutable"]);
}

#[test]
fn the_message_lists_every_cause() {
    let cause = |field: &str| Cause {
        reason: "FieldValueRequired",
        field: field.into(),
        message: "Required value".into(),
    };
    let deployment = kind("Deployment");
    assert_eq!(
        message(deployment, "x", &[cause("a")]),
        "Deployment.apps \"x\" is invalid: a: Required value"
    );
    assert_eq!(
        message(kind("Pod"), "x", &[cause("a"), cause("b"), cause("a")]),
        "Pod \"x\" is invalid: [a: Required value, b: Required value]"
    );
}

#[test]
fn bindings_and_token_requests_are_checked() {
    assert_eq!(texts(binding(&json!({"target": {"kind": "Node", "name": "n"}}))), Vec::<String>::new());
    assert_eq!(texts(binding(&json!({"target": {}}))), ["target.name: Required value"]);
    let short = json!({"spec": {"expirationSeconds": 60}});
    assert_eq!(
        texts(token_request(&short)),
        ["spec.expirationSeconds: Invalid value: 60: may not specify a duration less than 10 minutes"]
    );
}
