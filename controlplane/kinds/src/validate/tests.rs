//! Cases for validation: an object that is good, one change, and what is said about it.

use serde_json::json;

use super::*;
use crate::kind::by_kind;
use crate::{defaults, strategy};

fn kind(name: &str) -> &'static Kind {
    ["v1", "apps/v1", "coordination.k8s.io/v1"].iter().find_map(|version| by_kind(version, name)).unwrap()
}

/// A good object of each kind.
fn good(name: &str) -> Value {
    let pod = || json!({"containers": [{"name": "a", "image": "x:1"}]});
    let mut object = match name {
        "Pod" => json!({"metadata": {"namespace": "n"}, "spec": pod()}),
        "Deployment" | "ReplicaSet" => {
            json!({"metadata": {"namespace": "n"}, "spec": {"selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": pod()}}})
        }
        "Service" => json!({"metadata": {"namespace": "n"}, "spec": {"ports": [{"port": 80}]}}),
        "Namespace" | "Node" => json!({"metadata": {}}),
        "Event" => json!({"metadata": {"namespace": "n"}, "involvedObject": {"namespace": "n"}}),
        _ => json!({"metadata": {"namespace": "n"}}),
    };
    object["metadata"]["name"] = "x".into();
    object
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

/// Sets one value in a good object and compares what is said; only the starts of the texts are given.
fn check(name: &str, pointer: &str, value: Value, expect: &[&str]) {
    let mut object = good(name);
    set(&mut object, pointer, value);
    strategy::prepare_for_create(kind(name), &mut object);
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
        "ServiceAccount",
    ] {
        check(name, "/metadata/labels", json!({"a.b/c": "d"}), &[]);
    }
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
        &["metadata.name: Invalid value: \"a.b\": a lowercase RFC 1123 label must"],
    );
    check(
        "Service",
        "/metadata/name",
        json!("1a"),
        &["metadata.name: Invalid value: \"1a\": a DNS-1035 label must"],
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
        &["metadata.ownerReferences[0].uid: Invalid value: \"\": uid must not be empty"],
    );
}

#[test]
fn pods_need_containers_names_and_images() {
    let at = "/spec/containers";
    check("Pod", at, json!([]), &["spec.containers: Required value"]);
    check(
        "Pod",
        "/spec/containers/0/name",
        json!("A"),
        &["spec.containers[0].name: Invalid value: \"A\": a lowercase RFC 1123 label"],
    );
    check("Pod", "/spec/containers/0/image", json!(""), &["spec.containers[0].image: Required value"]);
    check(
        "Pod",
        "/spec/containers/0/image",
        json!(" a"),
        &["spec.containers[0].image: Invalid value: \" a\": must not have leading or trailing whitespace"],
    );
    check(
        "Pod",
        "/spec/containers/1",
        json!({"name": "a", "image": "y"}),
        &["spec.containers[1].name: Duplicate value: \"a\""],
    );
    check(
        "Pod",
        "/spec/initContainers",
        json!([{"name": "a", "image": "y"}]),
        &["spec.initContainers[0].name: Duplicate value: \"a\""],
    );
    check(
        "Pod",
        "/spec/containers/0/imagePullPolicy",
        json!("Sometimes"),
        &[
            "spec.containers[0].imagePullPolicy: Unsupported value: \"Sometimes\": supported values: \"Always\", \"IfNotPresent\", \"Never\"",
        ],
    );
    check(
        "Pod",
        "/spec/restartPolicy",
        json!("Maybe"),
        &[
            "spec.restartPolicy: Unsupported value: \"Maybe\": supported values: \"Always\", \"OnFailure\", \"Never\"",
        ],
    );
    check(
        "Pod",
        "/spec/terminationGracePeriodSeconds",
        json!(-1),
        &["spec.terminationGracePeriodSeconds: Invalid value: -1: must be greater than or equal to 0"],
    );
    check(
        "Pod",
        "/spec/activeDeadlineSeconds",
        json!(0),
        &["spec.activeDeadlineSeconds: Invalid value: 0: must be between 1 and 2147483647, inclusive"],
    );
    check("Pod", "/spec/dnsPolicy", json!("None"), &["spec.dnsConfig: Required value"]);
}

#[test]
fn ports_and_environment_are_checked() {
    let c = "/spec/containers/0";
    let port = |port: Value| json!([port]);
    check(
        "Pod",
        &format!("{c}/ports"),
        port(json!({"containerPort": 0})),
        &["spec.containers[0].ports[0].containerPort: Required value"],
    );
    check(
        "Pod",
        &format!("{c}/ports"),
        port(json!({"containerPort": 65536})),
        &[
            "spec.containers[0].ports[0].containerPort: Invalid value: 65536: must be between 1 and 65535, inclusive",
        ],
    );
    check(
        "Pod",
        &format!("{c}/ports"),
        port(json!({"containerPort": 1, "protocol": "X"})),
        &["spec.containers[0].ports[0].protocol: Unsupported value: \"X\""],
    );
    let twice = json!([{"containerPort": 1, "hostPort": 5}, {"containerPort": 2, "hostPort": 5}]);
    check(
        "Pod",
        &format!("{c}/ports"),
        twice,
        &["spec.containers[0].ports[1].hostPort: Duplicate value: \"TCP//5\""],
    );
    check(
        "Pod",
        &format!("{c}/env"),
        json!([{"name": "A=B"}]),
        &["spec.containers[0].env[0].name: Invalid value: \"A=B\": a valid environment"],
    );
    check(
        "Pod",
        &format!("{c}/env"),
        json!([{"name": ""}]),
        &["spec.containers[0].env[0].name: Required value"],
    );
    check(
        "Pod",
        &format!("{c}/env"),
        json!([{"name": "A", "valueFrom": {}}]),
        &["spec.containers[0].env[0].valueFrom: Invalid value: \"\": must specify one of"],
    );
}

#[test]
fn environment_sources_are_checked() {
    let c = "/spec/containers/0";
    let field = |path: &str| json!([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": path}}}]);
    check("Pod", &format!("{c}/env"), field("status.podIP"), &[]);
    check("Pod", &format!("{c}/env"), field("metadata.labels['a']"), &[]);
    check(
        "Pod",
        &format!("{c}/env"),
        field("spec.foo"),
        &["spec.containers[0].env[0].valueFrom.fieldRef.fieldPath: Unsupported value: \"spec.foo\""],
    );
    check(
        "Pod",
        &format!("{c}/envFrom"),
        json!([{"configMapRef": {"name": ""}}]),
        &["spec.containers[0].envFrom[0].configMapRef.name: Required value"],
    );
}

#[test]
fn volumes_have_one_source_and_mounts_name_them() {
    check(
        "Pod",
        "/spec/containers/0/volumeMounts",
        json!([{"name": "v", "mountPath": "/v"}]),
        &["spec.containers[0].volumeMounts[0].name: Not found: \"v\""],
    );
    let two = json!([{"name": "v", "emptyDir": {}, "hostPath": {"path": "/"}}]);
    check(
        "Pod",
        "/spec/volumes",
        two,
        &["spec.volumes[0].hostPath: Forbidden: may not specify more than 1 volume type"],
    );
    check(
        "Pod",
        "/spec/volumes",
        json!([{"name": "v"}, {"name": "v"}]),
        &["spec.volumes[1].name: Duplicate value: \"v\""],
    );
    check(
        "Pod",
        "/spec/volumes",
        json!([{"name": "v", "hostPath": {"path": "/a/../b"}}]),
        &["spec.volumes[0].hostPath.path: Invalid value: \"/a/../b\": must not contain '..'"],
    );
    check(
        "Pod",
        "/spec/volumes",
        json!([{"name": "v", "secret": {}}]),
        &["spec.volumes[0].secret.secretName: Required value"],
    );
    let item = json!([{"name": "v", "configMap": {"name": "c", "defaultMode": 1000, "items": [{"key": "k", "path": "../x"}]}}]);
    check(
        "Pod",
        "/spec/volumes",
        item,
        &[
            "spec.volumes[0].configMap.defaultMode: Invalid value: 1000: must be a number between 0 and 0777 (octal), both inclusive",
            "spec.volumes[0].configMap.items[0].path: Invalid value: \"../x\": must not contain '..'",
        ],
    );
    let token = json!([{"name": "v", "projected": {"sources": [{"serviceAccountToken": {"path": "token", "expirationSeconds": 5}}]}}]);
    check(
        "Pod",
        "/spec/volumes",
        token,
        &[
            "spec.volumes[0].projected.sources[0].serviceAccountToken.expirationSeconds: Invalid value: 5: may not",
        ],
    );
}

#[test]
fn requests_stay_below_limits() {
    let at = "/spec/containers/0/resources";
    let with = |requests: Value, limits: Value| json!({"requests": requests, "limits": limits});
    check(
        "Pod",
        at,
        with(json!({"cpu": "2"}), json!({"cpu": "1"})),
        &[
            "spec.containers[0].resources.requests: Invalid value: \"2\": must be less than or equal to cpu limit of 1",
        ],
    );
    check(
        "Pod",
        at,
        json!({"limits": {"cpu": "-1"}}),
        &[
            "spec.containers[0].resources.limits[cpu]: Invalid value: \"-1\": must be greater than or equal to 0",
            "spec.containers[0].resources.requests[cpu]: Invalid",
        ],
    );
    let foo = [
        "spec.containers[0].resources.limits[foo]: Invalid value: \"foo\": must be a standard resource type",
        "spec.containers[0].resources.limits[foo]: Invalid value: \"foo\": must be a standard resource for",
        "spec.containers[0].resources.requests[foo]: Invalid",
        "spec.containers[0].resources.requests[foo]: Invalid",
    ];
    check("Pod", at, json!({"limits": {"foo": "1"}}), &foo);
    check(
        "Pod",
        at,
        with(json!({"e.com/x": "1"}), json!({"e.com/x": "2"})),
        &["spec.containers[0].resources.requests: Invalid value: \"1\": must be equal to e.com/x limit of 2"],
    );
}

#[test]
fn probes_tolerations_and_security_are_checked() {
    let c = "/spec/containers/0";
    check(
        "Pod",
        &format!("{c}/livenessProbe"),
        json!({}),
        &["spec.containers[0].livenessProbe: Required value: must specify a handler type"],
    );
    check(
        "Pod",
        &format!("{c}/livenessProbe"),
        json!({"exec": {"command": ["a"]}, "tcpSocket": {"port": 1}}),
        &["spec.containers[0].livenessProbe.tcpSocket: Forbidden: may not specify more than 1 handler type"],
    );
    check(
        "Pod",
        &format!("{c}/livenessProbe"),
        json!({"tcpSocket": {"port": 1}, "successThreshold": 2}),
        &["spec.containers[0].livenessProbe.successThreshold: Invalid value: 2: must be 1"],
    );
    check(
        "Pod",
        "/spec/tolerations",
        json!([{"operator": "Equal"}]),
        &[
            "spec.tolerations[0].operator: Invalid value: \"Equal\": operator must be Exists when `key` is empty",
        ],
    );
    check(
        "Pod",
        "/spec/tolerations",
        json!([{"key": "a", "tolerationSeconds": 1, "effect": "NoSchedule"}]),
        &["spec.tolerations[0].effect: Invalid value"],
    );
    check(
        "Pod",
        "/spec/securityContext/runAsUser",
        json!(-1),
        &["spec.securityContext.runAsUser: Invalid value: -1: must be between 0 and 2147483647, inclusive"],
    );
    check(
        "Pod",
        &format!("{c}/securityContext"),
        json!({"privileged": true, "allowPrivilegeEscalation": false}),
        &[
            "spec.containers[0].securityContext: Invalid value: {\"allowPrivilegeEscalation\":false,\"privileged\":true}: cannot set",
        ],
    );
}

#[test]
fn workloads_need_a_selector_that_fits() {
    for name in ["Deployment", "ReplicaSet"] {
        check(name, "/spec/selector", Value::Null, &["spec.selector: Required value"]);
        check(
            name,
            "/spec/selector",
            json!({}),
            &["spec.selector: Invalid value: {}: empty selector is invalid for "],
        );
        check(
            name,
            "/spec/template/metadata/labels",
            json!({"a": "c"}),
            &[
                "spec.template.metadata.labels: Invalid value: {\"a\":\"c\"}: `selector` does not match template `labels`",
            ],
        );
        check(
            name,
            "/spec/replicas",
            json!(-1),
            &["spec.replicas: Invalid value: -1: must be greater than or equal to 0"],
        );
        check(
            name,
            "/spec/template/spec/restartPolicy",
            json!("Never"),
            &["spec.template.spec.restartPolicy: Unsupported value: \"Never\": supported values: \"Always\""],
        );
        check(
            name,
            "/spec/template/spec/containers/0/image",
            json!(""),
            &["spec.template.spec.containers[0].image: Required value"],
        );
    }
}

#[test]
fn strategies_are_checked() {
    check(
        "Deployment",
        "/spec/strategy",
        json!({"type": "Recreate", "rollingUpdate": {}}),
        &["spec.strategy.rollingUpdate: Forbidden: may not be specified when strategy `type` is 'Recreate'"],
    );
    check(
        "Deployment",
        "/spec/strategy",
        json!({"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"}}),
        &[
            "spec.strategy.rollingUpdate.maxUnavailable: Invalid value: \"0%\": may not be 0 when `maxSurge` is 0",
        ],
    );
    check(
        "Deployment",
        "/spec/strategy",
        json!({"rollingUpdate": {"maxSurge": "x"}}),
        &["spec.strategy.rollingUpdate.maxSurge: Invalid value: \"x\": a valid percent string"],
    );
    check(
        "Deployment",
        "/spec/minReadySeconds",
        json!(600),
        &["spec.progressDeadlineSeconds: Invalid value: 600: must be greater than minReadySeconds"],
    );
}

#[test]
fn services_config_maps_and_secrets_are_checked() {
    check("Service", "/spec/ports", json!([]), &["spec.ports: Required value"]);
    check(
        "Service",
        "/spec/ports/0/nodePort",
        json!(30000),
        &["spec.ports[0].nodePort: Forbidden: may not be used when `type` is 'ClusterIP'"],
    );
    check(
        "Service",
        "/spec/ports/0/port",
        json!(0),
        &[
            "spec.ports[0].port: Invalid value: 0: must be between 1 and 65535, inclusive",
            "spec.ports[0].targetPort: Invalid",
        ],
    );
    check(
        "Service",
        "/spec/type",
        json!("X"),
        &[
            "spec.type: Unsupported value: \"X\": supported values: \"ClusterIP\", \"ExternalName\", \"LoadBalancer\", \"NodePort\"",
        ],
    );
    check("Service", "/spec/clusterIP", json!("None"), &[]);
}

#[test]
fn config_maps_secrets_and_others_are_checked() {
    check(
        "ConfigMap",
        "/data",
        json!({"a/b": ""}),
        &["data[a/b]: Invalid value: \"a/b\": a valid config key must"],
    );
    check(
        "ConfigMap",
        "/data",
        json!({"a": "x".repeat(1024 * 1024 + 1)}),
        &[": Too long: may not be more than 1048576 bytes"],
    );
    check(
        "Secret",
        "/type",
        json!("kubernetes.io/tls"),
        &["data[tls.crt]: Required value", "data[tls.key]: Required value"],
    );
    check(
        "Event",
        "/involvedObject/namespace",
        json!("m"),
        &["involvedObject.namespace: Invalid value: \"m\": does not match event.namespace"],
    );
    check(
        "Lease",
        "/spec/leaseDurationSeconds",
        json!(0),
        &["spec.leaseDurationSeconds: Invalid value: 0: must be greater than 0"],
    );
    check(
        "Node",
        "/spec/taints",
        json!([{"key": "a", "effect": "X"}]),
        &["spec.taints[0].effect: Unsupported value: \"X\""],
    );
}

/// Updates a good object by one value.
fn check_update(name: &str, pointer: &str, value: Value, expect: &[&str]) {
    let mut old = good(name);
    strategy::prepare_for_create(kind(name), &mut old);
    defaults::apply(kind(name), &mut old);
    old["metadata"]["uid"] = "u".into();
    let mut new = old.clone();
    set(&mut new, pointer, value);
    strategy::prepare_for_update(kind(name), &mut new, &old);
    defaults::apply(kind(name), &mut new);
    let actual = texts(update(kind(name), &new, &old));
    let fits = actual.len() == expect.len() && actual.iter().zip(expect).all(|(a, e)| a.starts_with(e));
    assert!(fits, "{name} {pointer}: {actual:#?}");
}

#[test]
fn updates_keep_what_is_immutable() {
    check_update("Pod", "/spec/containers/0/image", json!("y"), &[]);
    check_update("Pod", "/spec/tolerations", json!([{"operator": "Exists"}]), &[]);
    check_update("Pod", "/spec/activeDeadlineSeconds", json!(5), &[]);
    check_update("Pod", "/metadata/labels", json!({"a": "b"}), &[]);
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
