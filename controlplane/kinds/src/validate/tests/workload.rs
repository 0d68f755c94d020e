//! Workloads, services, and the config maps and Secrets of pods.

use super::*;

#[test]
fn workloads_need_a_selector_that_matches_their_template() {
    for name in ["Deployment", "ReplicaSet"] {
        let mismatch =
            "spec.template.metadata.labels: Invalid value: {\"a\":\"b\"}: `selector` does not match";
        check(name, "/spec/selector", Value::Null, &["spec.selector: Required value", mismatch]);
        check(
            name,
            "/spec/selector",
            json!({}),
            &["spec.selector: Invalid value: {}: empty selector is invalid for deployment"],
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
fn a_template_is_not_checked_if_the_selector_is_invalid() {
    let selector = json!({"matchLabels": {"a b": "c"}});
    let spec = json!({"selector": selector, "template": {"spec": {"containers": []}}});
    let shown = "spec.selector: Invalid value: {\"matchLabels\":{\"a b\":\"c\"}}";
    for name in ["Deployment", "ReplicaSet", "StatefulSet"] {
        check(name, "/spec", spec.clone(), &["spec.selector.matchLabels: Invalid value: \"a b\"", shown]);
    }
    let mismatch = "spec.template.metadata.labels: Invalid value: {\"a\":\"b\"}: `selector` does not match";
    check("StatefulSet", "/spec/selector", Value::Null, &["spec.selector: Required value", mismatch]);
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
    let headless = json!({"type": "ClusterIP", "clusterIP": "None", "clusterIPs": ["None"],
        "sessionAffinity": "None", "internalTrafficPolicy": "Cluster"});
    check("Service", "/spec", headless, &[]);
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
        &["[]: Too long: may not be more than 1048576 bytes"],
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
        "CSINode",
        "/spec/drivers",
        json!([{"name": "d", "nodeID": "1", "topologyKeys": ["a", "a"]}, {"name": "d", "allocatable": {"count": -1}}]),
        &[
            "spec.drivers[0]: Duplicate value",
            "spec.drivers[1].nodeID: Required value",
            "spec.drivers[1].allocatable.count: Invalid value: -1",
            "spec.drivers[1].name: Duplicate value",
        ],
    );
    check(
        "Node",
        "/spec/taints",
        json!([{"key": "a", "effect": "X"}]),
        &["metadata.taints[0].effect: Unsupported value: \"X\""],
    );
}

#[test]
fn the_health_check_port_of_a_service_belongs_to_local_load_balancers() {
    let why = "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'";
    let expected = format!("spec.healthCheckNodePort: Invalid value: 30500: {why}");
    check("Service", "/spec/healthCheckNodePort", json!(30500), &[&expected]);
    let local = json!({"type": "LoadBalancer", "clusterIP": "10.43.0.9", "clusterIPs": ["10.43.0.9"], "sessionAffinity": "None",
        "externalTrafficPolicy": "Local", "healthCheckNodePort": 30500,
        "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}]});
    check("Service", "/spec", local.clone(), &[]);
    let class = |spec: &Value, class: &str| {
        let mut spec = spec.clone();
        spec["loadBalancerClass"] = class.into();
        spec
    };
    check("Service", "/spec", class(&local, "example.com/a"), &[]);
    check("Service", "/spec", class(&local, "a b"), &["spec.loadBalancerClass: Invalid value: \"a b\""]);
    let only = "spec.loadBalancerClass: Forbidden: may only be used when `type` is 'LoadBalancer'";
    check("Service", "/spec/loadBalancerClass", json!("example.com/a"), &[only]);
}

#[test]
fn ports_of_services_differ() {
    let spec = |ports: [Value; 2]| {
        json!({"type": "NodePort", "clusterIP": "10.43.0.9", "clusterIPs": ["10.43.0.9"], "sessionAffinity": "None",
            "ports": ports})
    };
    let first = json!({"name": "a", "protocol": "TCP", "port": 80, "targetPort": 80, "nodePort": 30000});
    for (field, value, cause) in [
        ("protocol", json!("UDP"), None),
        ("name", json!("a"), Some("spec.ports[1].name: Duplicate value: \"a\"")),
        ("port", json!(80), Some("spec.ports[1]: Duplicate value: {")),
        ("nodePort", json!(30000), Some("spec.ports[1].nodePort: Duplicate value: 30000")),
    ] {
        let mut second =
            json!({"name": "b", "protocol": "TCP", "port": 81, "targetPort": 80, "nodePort": 30001});
        second[field] = value;
        let causes: Vec<&str> = cause.into_iter().collect();
        check("Service", "/spec", spec([first.clone(), second]), &causes);
    }
    let mut shared = first.clone();
    (shared["name"], shared["protocol"]) = ("b".into(), "UDP".into());
    check("Service", "/spec", spec([first, shared]), &[]);
}

#[test]
fn source_ranges_of_services_are_prefixes() {
    let ranges = "LoadBalancerSourceRanges";
    check(
        "Service",
        "/spec/loadBalancerSourceRanges",
        json!(["10.0.0.0/8"]),
        &[&format!("spec.{ranges}: Forbidden: may only be used when `type` is 'LoadBalancer'")],
    );
    let problem = "must be a valid CIDR value, (e.g. 10.9.8.0/24 or 2001:db8::/64)";
    let spec = |ranges: Value| {
        json!({"type": "LoadBalancer", "clusterIP": "10.43.0.9", "clusterIPs": ["10.43.0.9"], "sessionAffinity": "None",
            "ports": [{"port": 80, "protocol": "TCP", "targetPort": 80}], "loadBalancerSourceRanges": ranges})
    };
    check("Service", "/spec", spec(json!(["10.0.0.0/8", " fd00::/8 "])), &[]);
    check(
        "Service",
        "/spec",
        spec(json!(["10.0.0.0/8", "10.0.0.1", "all"])),
        &[
            &format!("spec.{ranges}[1]: Invalid value: \"10.0.0.1\": {problem}"),
            &format!("spec.{ranges}[2]: Invalid value: \"all\": {problem}"),
        ],
    );
}

/// The causes of a status of this kind.
fn status(group: &str, kind: &str, status: Value, old: Value) -> Vec<String> {
    let (new, old) = (json!({"status": status}), json!({"status": old}));
    found(|causes| built_in_status(causes, group, kind, &new, &old))
}

#[test]
fn counts_in_statuses_are_parts_of_all_pods() {
    let more =
        |field: &str| format!("status.{field}: Invalid value: 2: cannot be greater than status.replicas");
    assert_eq!(
        status("apps", "ReplicaSet", json!({"replicas": 1, "fullyLabeledReplicas": 2}), json!({})),
        [more("fullyLabeledReplicas")]
    );
    assert_eq!(
        status("", "ReplicationController", json!({"replicas": 1, "readyReplicas": 2}), json!({})),
        [more("readyReplicas")]
    );
    let counts = json!({"replicas": 1, "updatedReplicas": 2, "unavailableReplicas": -1});
    assert_eq!(
        status("apps", "Deployment", counts, json!({"collisionCount": 1})),
        [
            "status.unavailableReplicas: Invalid value: -1: must be greater than or equal to 0".to_owned(),
            more("updatedReplicas"),
            "status.collisionCount: Invalid value: 0: cannot be decremented".to_owned(),
        ]
    );
    let counts = json!({"replicas": 1, "availableReplicas": 1});
    assert_eq!(
        status("apps", "StatefulSet", counts, json!({})),
        ["status.availableReplicas: Invalid value: 1: cannot be greater than status.readyReplicas"]
    );
}

#[test]
fn statuses_of_claims_have_amounts_and_known_states() {
    let kind = "PersistentVolumeClaim";
    let good = json!({"capacity": {"storage": "1Gi"}, "allocatedResources": {"storage": "2Gi"},
        "allocatedResourceStatuses": {"storage": "NodeResizePending"}});
    assert_eq!(status("", kind, good, json!({})), Vec::<String>::new());
    let bad = json!({"capacity": {"storage": "-1"}, "allocatedResources": {"cpu": "1", "storage": "-2"},
        "allocatedResourceStatuses": {"storage": "X"}});
    let fields: Vec<String> = status("", kind, bad, json!({}))
        .iter()
        .map(|cause| cause.split(": ").take(3).collect::<Vec<_>>().join(": "))
        .collect();
    assert_eq!(
        fields,
        [
            "status.capacity[storage]: Invalid value: -1",
            "status.allocatedResourceStatuses: Unsupported value: \"storage\"",
            "status.allocatedResources: Unsupported value: \"cpu\"",
            "status.allocatedResources[storage]: Invalid value: -2",
        ]
    );
}
