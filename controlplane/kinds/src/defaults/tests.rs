//! Cases for defaulting.

use serde_json::json;

use super::*;
use crate::kind::by_kind;

fn defaulted(api_version: &str, kind: &str, mut object: Value) -> Value {
    let kind = by_kind(api_version, kind).unwrap();
    apply(kind, &mut object);
    let once = object.clone();
    apply(kind, &mut object);
    assert_eq!(object, once, "defaulting twice changes nothing");
    object
}

#[test]
fn a_pod_gets_upstreams_defaults() {
    let pod = defaulted("v1", "Pod", json!({"spec": {"containers": [{"name": "a", "image": "nginx"}]}}));
    let expect = json!({"metadata": {}, "spec": {
        "containers": [{"name": "a", "image": "nginx", "imagePullPolicy": "Always", "resources": {},
            "terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}],
        "dnsPolicy": "ClusterFirst", "enableServiceLinks": true, "restartPolicy": "Always",
        "schedulerName": "default-scheduler", "securityContext": {}, "terminationGracePeriodSeconds": 30}});
    assert_eq!(pod, expect);
}

#[test]
fn a_negative_grace_period_of_a_pod_is_one_second() {
    let pod = defaulted("v1", "Pod", json!({"spec": {"terminationGracePeriodSeconds": -1}}));
    assert_eq!(pod["spec"]["terminationGracePeriodSeconds"], 1);
    let template = json!({"spec": {"template": {"spec": {"terminationGracePeriodSeconds": -1}}}});
    let set = defaulted("apps/v1", "ReplicaSet", template);
    assert_eq!(set["spec"]["template"]["spec"]["terminationGracePeriodSeconds"], -1, "templates keep it");
}

#[test]
fn disks_of_pods_and_of_volumes_have_the_same_defaults() {
    let given = [
        ("hostPath", json!({"path": "/x"})),
        ("iscsi", json!({"targetPortal": "a"})),
        ("rbd", json!({"monitors": ["a"], "image": "b", "user": "u"})),
        ("azureDisk", json!({"diskName": "a", "fsType": "xfs"})),
        ("scaleIO", json!({"gateway": "a"})),
    ];
    let expect = [
        json!({"path": "/x", "type": ""}),
        json!({"targetPortal": "a", "iscsiInterface": "default"}),
        json!({"monitors": ["a"], "image": "b", "user": "u", "pool": "rbd", "keyring": "/etc/ceph/keyring"}),
        json!({"diskName": "a", "fsType": "xfs", "cachingMode": "ReadWrite", "readOnly": false, "kind": "Shared"}),
        json!({"gateway": "a", "storageMode": "ThinProvisioned", "fsType": "xfs"}),
    ];
    for ((name, source), expect) in given.into_iter().zip(expect) {
        let pod = json!({"spec": {"volumes": [{"name": "v", name: source}]}});
        assert_eq!(defaulted("v1", "Pod", pod)["spec"]["volumes"][0][name], expect, "{name}");
        let volume = json!({"spec": {name: source}});
        assert_eq!(defaulted("v1", "PersistentVolume", volume)["spec"][name], expect, "{name}");
    }
}

#[test]
fn sources_of_variables_are_filled() {
    let env = json!([{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "B", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "f", "key": "k"}}},
        {"name": "C", "valueFrom": {"fileKeyRef": {"optional": true}}}, {"name": "D", "value": "d"}]);
    let pod =
        defaulted("v1", "Pod", json!({"spec": {"containers": [{"name": "a", "image": "x", "env": env}]}}));
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
    let pod = defaulted(
        "v1",
        "Pod",
        json!({"spec": {"hostNetwork": true, "containers": [{"name": "a", "image": "x:1",
        "ports": [{"containerPort": 80}], "resources": {"limits": {"cpu": "1", "memory": "1Gi"}, "requests": {"cpu": "500m"}},
        "livenessProbe": {"httpGet": {"port": 80}}, "readinessProbe": {"periodSeconds": 0, "tcpSocket": {"port": 1}}}]}}),
    );
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
    let pod = defaulted(
        "v1",
        "Pod",
        json!({"spec": {"volumes": [{"name": "a"}, {"name": "b", "configMap": {"name": "c"}},
        {"name": "h", "hostPath": {"path": "/x"}},
        {"name": "p", "projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}}]}}),
    );
    let expect = json!([{"name": "a", "emptyDir": {}}, {"name": "b", "configMap": {"name": "c", "defaultMode": 420}},
        {"name": "h", "hostPath": {"path": "/x", "type": ""}},
        {"name": "p", "projected": {"defaultMode": 420, "sources": [{"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}}]}}]);
    assert_eq!(pod["spec"]["volumes"], expect);
}

#[test]
fn templates_do_not_get_the_defaults_of_pods() {
    let deployment = defaulted(
        "apps/v1",
        "Deployment",
        json!({"spec": {"template": {"spec": {"containers": [
        {"name": "a", "image": "x:1", "resources": {"limits": {"cpu": "1"}}}]}}}}),
    );
    let spec = &deployment["spec"];
    assert_eq!(
        spec["strategy"],
        json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "25%", "maxUnavailable": "25%"}})
    );
    assert_eq!(
        (&spec["replicas"], &spec["revisionHistoryLimit"], &spec["progressDeadlineSeconds"]),
        (&json!(1), &json!(10), &json!(600))
    );
    assert_eq!(spec["template"]["spec"]["containers"][0]["resources"], json!({"limits": {"cpu": "1"}}));
    assert_eq!(spec["template"]["spec"]["enableServiceLinks"], Value::Null);
    let zero = defaulted(
        "apps/v1",
        "Deployment",
        json!({"spec": {"replicas": 0, "strategy": {"type": "Recreate"}}}),
    );
    assert_eq!(
        (&zero["spec"]["replicas"], &zero["spec"]["strategy"]),
        (&json!(0), &json!({"type": "Recreate"}))
    );
}

#[test]
fn an_absent_scope_of_an_ingress_class_is_the_cluster() {
    let scope = |parameters: Value| {
        let class = json!({"spec": {"controller": "a.io/b", "parameters": parameters}});
        let class = defaulted("networking.k8s.io/v1", "IngressClass", class);
        class["spec"]["parameters"]["scope"].clone()
    };
    assert_eq!(scope(json!({"kind": "K", "name": "n"})), "Cluster");
    assert_eq!(scope(json!({"kind": "K", "name": "n", "scope": ""})), "", "validation refuses it");
}

#[test]
fn services_secrets_and_namespaces_are_filled() {
    let service = defaulted("v1", "Service", json!({"spec": {"ports": [{"port": 80, "targetPort": 0}]}}));
    let expect = json!({"spec": {"type": "ClusterIP", "sessionAffinity": "None", "internalTrafficPolicy": "Cluster",
        "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}]}, "status": {"loadBalancer": {}}});
    assert_eq!(service, expect);
    let points = json!([{"ip": "10.0.0.1"}, {"hostname": "a"}, {"ip": "10.0.0.2", "ipMode": "Proxy"}]);
    let balancer = json!({"spec": {"type": "LoadBalancer"}, "status": {"loadBalancer": {"ingress": points}}});
    let balancer = defaulted("v1", "Service", balancer);
    let points = json!([{"ip": "10.0.0.1", "ipMode": "VIP"}, {"hostname": "a"}, {"ip": "10.0.0.2", "ipMode": "Proxy"}]);
    assert_eq!(balancer["status"]["loadBalancer"]["ingress"], points);
    let secret = defaulted("v1", "Secret", json!({"data": {"a": "YQ=="}, "stringData": {"b": "b"}}));
    assert_eq!(secret, json!({"type": "Opaque", "data": {"a": "YQ==", "b": "Yg=="}}));
    let namespace = defaulted("v1", "Namespace", json!({"metadata": {"name": "n"}}));
    assert_eq!(namespace["metadata"]["labels"], json!({"kubernetes.io/metadata.name": "n"}));
    assert_eq!(namespace["status"], json!({"phase": "Active"}));
}

#[test]
fn resources_of_the_whole_pod_follow_its_containers() {
    let container = json!({"name": "a", "image": "x", "resources": {"requests": {"cpu": "500m"}}});
    let pod = |resources: Value| {
        let spec = json!({"containers": [container, {"name": "b", "image": "x", "resources": {"requests": {"cpu": "1"}}}],
            "resources": resources});
        defaulted("v1", "Pod", json!({"spec": spec}))["spec"]["resources"].clone()
    };
    let limits = json!({"cpu": "2", "memory": "1Gi"});
    let expect = json!({"limits": limits, "requests": {"cpu": "1500m", "memory": "1Gi"}});
    assert_eq!(pod(json!({"limits": limits})), expect);
    assert_eq!(pod(json!({"requests": {"cpu": "2"}})), json!({"requests": {"cpu": "2"}}));
}
