//! Warnings about whole objects.

use serde_json::json;

use super::*;
use crate::kind::by_kind;

fn created(api_version: &str, kind: &str, object: &Value) -> Vec<String> {
    about(by_kind(api_version, kind).unwrap(), object, None)
}

fn updated(api_version: &str, kind: &str, new: &Value, old: &Value) -> Vec<String> {
    about(by_kind(api_version, kind).unwrap(), new, Some(old))
}

fn pod_spec() -> Value {
    json!({
        "nodeSelector": {"beta.kubernetes.io/os": "linux"},
        "terminationGracePeriodSeconds": -1,
        "volumes": [
            {"name": "v", "gitRepo": {"repository": "r"}},
            {"name": "c", "configMap": {"name": "m", "items": [{"key": "a", "path": "x/"}, {"key": "b", "path": "x/y"}]}},
            {"name": "p", "projected": {"sources": [{},
                {"secret": {"name": "s", "items": [{"key": "a", "path": "t"}]}},
                {"serviceAccountToken": {"path": "t"}}]}},
        ],
        "hostAliases": [{"ip": "192.0.2.1"}, {"ip": "192.0.2.1"}],
        "imagePullSecrets": [{"name": ""}],
        "topologySpreadConstraints": [{"topologyKey": "failure-domain.beta.kubernetes.io/zone"}],
        "affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "k"}]}},
        "containers": [{"name": "a", "resources": {"limits": {"memory": "1.5"}},
            "env": [{"name": "X", "value": "1"}, {"name": "X", "value": "$(X)2"}, {"name": "X", "value": "3"}],
            "ports": [{"containerPort": 80, "protocol": "TCP", "name": "w"},
                {"containerPort": 80, "protocol": "TCP", "hostPort": 8080, "name": "w"},
                {"containerPort": 81, "protocol": "TCP", "hostIP": "192.0.2.1"}]}],
    })
}

const POD: [&str; 17] = [
    "spec.nodeSelector[beta.kubernetes.io/os]: deprecated since v1.14; use \"kubernetes.io/os\" instead",
    "spec.topologySpreadConstraints[0].topologyKey: failure-domain.beta.kubernetes.io/zone is deprecated since v1.17; use \
     \"topology.kubernetes.io/zone\" instead",
    "spec.topologySpreadConstraints[0].labelSelector: a null labelSelector results in matching no pod",
    "spec.volumes[0].gitRepo: deprecated in v1.11, and disabled by default in v1.33+",
    "volume \"c\" (ConfigMap \"m\"): overlapping paths: \"x/y\" with \"x\"",
    "volume \"p\" (Projected) has no sources provided",
    "volume \"p\" (Projected): overlapping paths: \"t\" (ServiceAccountToken) with \"t\" (Secret \"s\")",
    "spec.hostAliases[1].ip: duplicate ip \"192.0.2.1\"",
    "spec.imagePullSecrets[0].name: invalid empty name \"\"",
    "spec.containers[0].resources.limits[memory]: fractional byte value \"1500m\" is invalid, must be an integer",
    "spec.containers[0].env[2]: hides previous definition of \"X\", which may be dropped when using apply",
    "spec.containers[0].ports[1]: overlapping port definition with spec.containers[0].ports[0]",
    "spec.containers[0].ports[2]: hostIP set without hostPort: {Name: HostPort:0 ContainerPort:81 Protocol:TCP \
     HostIP:192.0.2.1}",
    "spec.containers[0].ports[1]: duplicate port name \"w\" with spec.containers[0].ports[0], services and probes that \
     select ports by name will use spec.containers[0].ports[0]",
    "spec.terminationGracePeriodSeconds: must be >= 0; negative values are invalid and will be treated as 1",
    "spec.affinity.podAffinity.requiredDuringSchedulingIgnoredDuringExecution[0].labelSelector: a null labelSelector \
     results in matching no pod",
    "metadata.annotations[container.seccomp.security.alpha.kubernetes.io/a]: non-functional in v1.27+; use the \
     \"seccompProfile\" field instead",
];

#[test]
fn fields_of_pods_are_reported_at_their_paths() {
    let annotations = json!({"container.seccomp.security.alpha.kubernetes.io/a": "runtime/default"});
    let pod = json!({"metadata": {"name": "p", "annotations": annotations}, "spec": pod_spec()});
    let found = created("v1", "Pod", &pod);
    for expect in POD {
        assert!(found.iter().any(|text| text == expect), "{expect} is not in {found:#?}");
    }
    assert_eq!(found.len(), POD.len(), "{found:#?}");
    assert_eq!(
        updated("v1", "Pod", &pod, &json!({})),
        [""; 0],
        "as upstream, updates of pods have no warnings"
    );
    let plain = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "a", "image": "i"}]}});
    assert_eq!(created("v1", "Pod", &plain), [""; 0]);
    let name = created("v1", "Pod", &json!({"metadata": {"name": "a.b"}, "spec": {}}));
    assert!(name[0].starts_with("metadata.name: this is used in the Pod's hostname"), "{name:?}");
}

#[test]
fn templates_are_reported_when_they_change() {
    for (version, kind, path, prefix) in [
        ("apps/v1", "Deployment", "/spec/template", "spec.template."),
        ("apps/v1", "DaemonSet", "/spec/template", "spec.template."),
        ("batch/v1", "CronJob", "/spec/jobTemplate/spec/template", "spec.jobTemplate.spec.template."),
        ("v1", "PodTemplate", "/template", "template."),
    ] {
        let parts: Vec<&str> = path.split('/').skip(1).collect();
        let template = json!({"metadata": {}, "spec": {"nodeSelector": {"beta.kubernetes.io/os": "linux"}}});
        let mut object = parts.iter().rev().fold(template, |value, part| json!({(*part): value}));
        object["metadata"] = json!({"name": "x", "generation": 1});
        let expect = format!("{prefix}{}", POD[0]);
        assert_eq!(created(version, kind, &object), std::slice::from_ref(&expect), "{kind}");
        assert_eq!(updated(version, kind, &object, &object), [""; 0], "{kind}");
        let mut changed = object.clone();
        changed["metadata"]["generation"] = 2.into();
        *changed.pointer_mut(path).unwrap() =
            json!({"spec": {"nodeSelector": {"beta.kubernetes.io/os": "windows"}}});
        assert_eq!(updated(version, kind, &changed, &object), [expect], "{kind}");
    }
}

#[test]
fn annotations_of_profiles_are_reported_in_templates() {
    let key = "container.apparmor.security.beta.kubernetes.io/a";
    let of = |annotation: &str, profile: Value| {
        let spec = json!({"securityContext": {"appArmorProfile": profile}, "containers": [{"name": "a"}]});
        let template = json!({"metadata": {"annotations": {key: annotation}}, "spec": spec});
        created("apps/v1", "DaemonSet", &json!({"metadata": {"name": "d"}, "spec": {"template": template}}))
    };
    let expect = format!(
        "spec.template.metadata.annotations[{key}]: deprecated since v1.30; use the \"appArmorProfile\" field instead"
    );
    assert_eq!(of("runtime/default", Value::Null), std::slice::from_ref(&expect));
    assert_eq!(of("localhost/x", json!({"type": "RuntimeDefault"})), [expect]);
    assert_eq!(of("runtime/default", json!({"type": "RuntimeDefault"})), [""; 0]);
}

#[test]
fn kinds_of_networks_and_nodes_have_their_warnings() {
    let headless = json!({"type": "ClusterIP", "clusterIP": "None", "externalIPs": ["192.0.2.1"], "sessionAffinity": "ClientIP"});
    let external = json!({"type": "ClusterIP", "clusterIP": "10.0.0.1", "clusterIPs": ["10.0.0.1"],
        "externalIPs": ["192.0.2.1"], "externalName": "x", "trafficDistribution": "PreferClose"});
    let peer = json!({"ipBlock": {"cidr": "10.0.0.1/8"}});
    for (version, kind, object, expect) in [
        (
            "v1",
            "Service",
            json!({"spec": headless}),
            vec![
                "spec.externalIPs is ignored for headless services",
                "spec.SessionAffinity is ignored for headless services",
            ],
        ),
        (
            "v1",
            "Service",
            json!({"spec": external}),
            vec![
                "spec.externalIPs is deprecated and may no longer be implemented in some clusters",
                "spec.externalName is ignored when spec.type is not \"ExternalName\"",
                "spec.trafficDistribution: \"PreferClose\" is deprecated; use \"PreferSameZone\"",
            ],
        ),
        (
            "v1",
            "Node",
            json!({"spec": {"configSource": {}, "externalID": "x"}}),
            vec![
                "spec.configSource: the feature is removed",
                "spec.externalID: this field is deprecated, and is unused by Kubernetes",
            ],
        ),
        (
            "networking.k8s.io/v1",
            "NetworkPolicy",
            json!({"spec": {"egress": [{"to": [peer]}]}}),
            vec![
                "spec.egress[0].to[0].ipBlock.cidr: CIDR value \"10.0.0.1/8\" is ambiguous in this context (should be \
             \"10.0.0.0/8\" or \"10.0.0.1/32\"?)",
            ],
        ),
        (
            "networking.k8s.io/v1",
            "Ingress",
            json!({"metadata": {"annotations": {INGRESS_CLASS: "x"}}, "spec": {}}),
            vec![
                "annotation \"kubernetes.io/ingress.class\" is deprecated, please use 'spec.ingressClassName' instead",
            ],
        ),
    ] {
        assert_eq!(created(version, kind, &object), expect, "{kind}");
    }
}

#[test]
fn other_kinds_have_their_warnings() {
    let term = json!({"matchExpressions": [{"key": "beta.kubernetes.io/arch", "operator": "Exists"}]});
    for (version, kind, object, expect) in [
        (
            "v1",
            "PersistentVolume",
            json!({"spec": {"rbd": {}, "persistentVolumeReclaimPolicy": "Recycle",
            "nodeAffinity": {"required": {"nodeSelectorTerms": [term]}}}}),
            vec![
                "spec.persistentVolumeReclaimPolicy: The Recycle reclaim policy is deprecated. Instead, the recommended approach \
             is to use dynamic provisioning.",
                "spec.nodeAffinity.required.nodeSelectorTerms[0].matchExpressions[0].key: beta.kubernetes.io/arch is deprecated \
             since v1.14; use \"kubernetes.io/arch\" instead",
                "spec.rbd: deprecated in v1.28, non-functional in v1.31+",
            ],
        ),
        (
            "v1",
            "PersistentVolumeClaim",
            json!({"spec": {"resources": {"requests": {"storage": "100m"}}}}),
            vec![
                "spec.resources.requests[storage]: fractional byte value \"100m\" is invalid, must be an integer",
            ],
        ),
        (
            "discovery.k8s.io/v1",
            "EndpointSlice",
            json!({"addressType": "IPv4", "endpoints": [{"addresses": ["192.0.2.01"]}]}),
            vec![
                "endpoints[0].addresses[0]: non-standard IP address \"192.0.2.01\" is invalid: use \"192.0.2.1\"",
            ],
        ),
        (
            "apps/v1",
            "StatefulSet",
            json!({"metadata": {"name": "a.b"}, "spec": {"revisionHistoryLimit": -1}}),
            vec![
                "spec.revisionHistoryLimit: a negative value retains all historical revisions; a value >= 0 is recommended",
            ],
        ),
    ] {
        assert_eq!(created(version, kind, &object), expect, "{kind}");
    }
    let secrets = json!({"metadata": {"annotations": {MOUNTABLE_SECRETS: "true"}}});
    assert_eq!(updated("v1", "ServiceAccount", &secrets, &json!({})).len(), 1);
    assert_eq!(updated("v1", "ServiceAccount", &secrets, &secrets), [""; 0]);
}

#[test]
fn an_object_with_many_elements_has_few_warnings() {
    let ports: Vec<Value> =
        (0..5000).map(|_| json!({"containerPort": 80, "protocol": "UDP", "name": "x"})).collect();
    let paths: Vec<Value> = (0..5000).map(|_| json!({"key": "a", "path": "x"})).collect();
    let spec = json!({"containers": [{"name": "a", "ports": ports}],
        "volumes": [{"name": "v", "secret": {"secretName": "s", "items": paths}}]});
    let found = created("v1", "Pod", &json!({"metadata": {"name": "p"}, "spec": spec}));
    assert_eq!(found.len(), MAX);
}

#[test]
fn an_object_with_long_names_has_short_warnings() {
    let name = "x".repeat(10_000);
    let paths: Vec<Value> = (0..200).map(|_| json!({"key": "a", "path": "x"})).collect();
    let sources = json!([{"configMap": {"name": name, "items": paths}}]);
    for volume in [
        json!({"name": "v", "projected": {"sources": sources}}),
        json!({"name": "v", "secret": {"secretName": name, "items": paths}}),
    ] {
        let pod = json!({"metadata": {"name": "p"}, "spec": {"volumes": [volume]}});
        let bytes: usize = created("v1", "Pod", &pod).iter().map(String::len).sum();
        assert!(bytes > 10_000 && bytes < MAX_BYTES + 30_000, "{bytes}");
    }
}
