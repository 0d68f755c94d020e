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
