//! Cases for defaulting of pods.

use serde_json::json;

use super::*;

fn defaulted(mut object: Value) -> Value {
    pod::pod(&mut object);
    let once = object.clone();
    pod::pod(&mut object);
    assert_eq!(object, once, "defaulting twice changes nothing");
    object
}

#[test]
fn a_pod_gets_upstreams_defaults() {
    let pod = defaulted(json!({"spec": {"containers": [{"name": "a", "image": "nginx"}]}}));
    let expect = json!({"metadata": {}, "spec": {
        "containers": [{"name": "a", "image": "nginx", "imagePullPolicy": "Always", "resources": {},
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}],
        "dnsPolicy": "ClusterFirst", "enableServiceLinks": true, "restartPolicy": "Always",
        "schedulerName": "default-scheduler", "securityContext": {}, "terminationGracePeriodSeconds": 30}});
    assert_eq!(pod, expect);
}

#[test]
fn sources_of_variables_are_filled() {
    let env = json!([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "B", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "f", "key": "k"}}},
        {"name": "C", "valueFrom": {"fileKeyRef": {"optional": true}}}, {"name": "D", "value": "d"}]);
    let pod = defaulted(json!({"spec": {"containers": [{"name": "a", "image": "x", "env": env}]}}));
    let env = &pod["spec"]["containers"][0]["env"];
    assert_eq!(env[0]["valueFrom"]["fieldRef"]["apiVersion"], "v1");
    assert_eq!(env[1]["valueFrom"]["fileKeyRef"]["optional"], false);
    assert_eq!(env[2]["valueFrom"]["fileKeyRef"]["optional"], true);
}

#[test]
fn pull_policy_follows_the_tag() {
    let cases = [
        ("nginx", "Always"),
        ("nginx:latest", "Always"),
        ("nginx:1.27", "IfNotPresent"),
        ("localhost:5000/nginx", "Always"),
        ("localhost:5000/nginx:1", "IfNotPresent"),
        ("nginx@sha256:00", "IfNotPresent"),
        ("nginx:latest@sha256:00", "Always"),
        ("Registry.example:5000/a/b-c__d.e", "Always"),
        ("A b/c", "IfNotPresent"),
        ("Nginx", "IfNotPresent"),
        ("-a", "IfNotPresent"),
        ("a._b", "IfNotPresent"),
        ("", "IfNotPresent"),
    ];
    for (image, expect) in cases {
        assert_eq!(container::pull_policy(image), expect, "for {image}");
    }
    assert_eq!(container::pull_policy(&"x".repeat(256)), "IfNotPresent");
}

#[test]
fn probes_ports_and_requests_are_filled() {
    let pod = defaulted(json!({"spec": {"hostNetwork": true, "containers": [{"name": "a", "image": "x:1",
        "ports": [{"containerPort": 80}], "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}},
        "livenessProbe": {"httpGet": {"port": 80}}, "readinessProbe": {"periodSeconds": 0, "tcpSocket": {"port": 1}}}]}}));
    let container = &pod["spec"]["containers"][0];
    assert_eq!(container["ports"][0], json!({"containerPort": 80, "hostPort": 80, "protocol": "TCP"}));
    assert_eq!(container["resources"]["requests"], json!({"cpu": "500m", "memory": "1Gi"}));
    let expect = json!({"httpGet": {"path": "/", "port": 80, "scheme": "HTTP"}, "timeoutSeconds": 1,
        "periodSeconds": 10, "successThreshold": 1, "failureThreshold": 3});
    assert_eq!(container["livenessProbe"], expect);
    assert_eq!(container["readinessProbe"]["periodSeconds"], 10);
}

#[test]
fn volumes_get_modes_and_a_source() {
    let pod =
        defaulted(json!({"spec": {"volumes": [{"name": "a"}, {"name": "b", "configMap": {"name": "c"}},
        {"name": "h", "hostPath": {"path": "/x"}},
        {"name": "p", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]}}));
    let expect = json!([{"name": "a", "emptyDir": {}}, {"name": "b", "configMap": {"name": "c", "defaultMode": 420}},
        {"name": "h", "hostPath": {"path": "/x", "type": ""}},
        {"name": "p", "projected": {"defaultMode": 420, "sources": [{"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}]}}]);
    assert_eq!(pod["spec"]["volumes"], expect);
}

#[test]
fn resources_of_the_whole_pod_follow_its_containers() {
    let container = json!({"name": "a", "image": "x", "resources": {"requests": {"cpu": "500m"}}});
    let pod = |resources: Value| {
        let spec = json!({"containers": [container, {"name": "b", "image": "x", "resources": {"requests": {"cpu": "1"}}}],
            "resources": resources});
        defaulted(json!({"spec": spec}))["spec"]["resources"].clone()
    };
    let limits = json!({"cpu": "2", "memory": "1Gi"});
    let expect = json!({"limits": limits, "requests": {"cpu": "1500m", "memory": "1Gi"}});
    assert_eq!(pod(json!({"limits": limits})), expect);
    assert_eq!(pod(json!({"requests": {"cpu": "2"}})), json!({"requests": {"cpu": "2"}}));
}
