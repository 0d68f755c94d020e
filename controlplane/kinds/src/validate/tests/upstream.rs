//! Values for which an earlier version of this crate decided differently from upstream. `scripts/differential` found
//! them.

use super::*;

/// Sets one value in a valid object. The causes are compared by their field and the start of their text.
fn refuse(name: &str, pointer: &str, value: Value, field: &str) {
    check(name, pointer, value, &[field]);
}

#[test]
fn words_of_services_are_checked() {
    for (field, word) in [
        ("externalTrafficPolicy", "Nope"),
        ("internalTrafficPolicy", ""),
        ("internalTrafficPolicy", "Nope"),
        ("trafficDistribution", ""),
    ] {
        let spec = json!({"type": "LoadBalancer", "ports": [{"port": 80}], field: word});
        refuse("Service", "/spec", spec, &format!("spec.{field}: Unsupported value: \"{word}\""));
    }
    let class =
        |kind: &str, class: &str| json!({"type": kind, "ports": [{"port": 80}], "loadBalancerClass": class});
    refuse("Service", "/spec", class("LoadBalancer", "-a"), "spec.loadBalancerClass: Invalid value: \"-a\"");
    refuse("Service", "/spec", class("ClusterIP", "a.b/c"), "spec.loadBalancerClass: Forbidden");
    refuse("Service", "/spec/ports/0/appProtocol", json!("*"), "spec.ports[0].appProtocol: Invalid value");
}

#[test]
fn endpoints_do_not_lead_to_the_node_itself() {
    let endpoints =
        |ip: &str| json!([{"addresses": [{"ip": ip}], "ports": [{"port": 80, "protocol": "TCP"}]}]);
    for (ip, problem) in [
        ("127.0.0.1", "may not be in the loopback range"),
        ("169.254.169.254", "may not be in the link-local range"),
        ("0.0.0.0", "may not be unspecified"),
        ("224.0.0.1", "may not be in the link-local multicast range"),
        ("::1", "may not be in the loopback range"),
        ("fe80::1", "may not be in the link-local range"),
    ] {
        let cause = |field: &str| format!("{field}: Invalid value: \"{ip}\": {problem}");
        refuse("Endpoints", "/subsets", endpoints(ip), &cause("subsets[0].addresses[0].ip"));
        refuse("Service", "/spec/externalIPs", json!([ip]), &cause("spec.externalIPs[0]"));
    }
    check("Endpoints", "/subsets", endpoints("10.0.0.1"), &[]);
    let mut own = good("Endpoints");
    own["metadata"] = json!({"name": "kubernetes", "namespace": "default"});
    own["subsets"] = endpoints("127.0.0.1");
    assert_eq!(texts(create(kind("Endpoints"), &own)), Vec::<String>::new());
    refuse("Endpoints", "/subsets", json!([{"ports": []}]), "subsets[0]: Required value");
}

#[test]
fn names_in_pods_are_checked() {
    let variable =
        |name: &str| json!([{"name": "A", "valueFrom": {"configMapKeyRef": {"name": name, "key": "k"}}}]);
    let path = "spec.containers[0].env[0].valueFrom.configMapKeyRef.name: Invalid value";
    refuse("Pod", "/spec/containers/0/env", variable("A b"), path);
    let from = json!([{"secretRef": {"name": "-a"}}]);
    refuse(
        "Pod",
        "/spec/containers/0/envFrom",
        from,
        "spec.containers[0].envFrom[0].secretRef.name: Invalid value",
    );
    refuse("Pod", "/spec/os", json!({}), "spec.os.name: Required value");
    refuse("Pod", "/spec/os", json!({"name": "plan9"}), "spec.os: Unsupported value: \"plan9\"");
    let search = |name: &str| json!({"searches": [name]});
    refuse("Pod", "/spec/dnsConfig", search(""), "spec.dnsConfig.searches[0]: Invalid value: \"\"");
    for name in ["_sip._tcp.abc_d.example.com", "a.b.", "."] {
        check("Pod", "/spec/dnsConfig", search(name), &[]);
    }
    check("Pod", "/spec/schedulerName", json!("Any name"), &[]);
    check("Pod", "/spec/imagePullSecrets", json!([{}]), &[]);
}

#[test]
fn ephemeral_volumes_have_a_claim() {
    let volume = |source: Value| json!([{"name": "v", "ephemeral": source}]);
    let path = "spec.volumes[0].ephemeral.volumeClaimTemplate";
    refuse("Pod", "/spec/volumes", volume(json!({})), &format!("{path}: Required value"));
    let claim = json!({"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}});
    refuse("Pod", "/spec/volumes", volume(claim), &format!("{path}.spec.resources[storage]: Required value"));
}

#[test]
fn projected_sources_do_not_share_a_path() {
    let map = |path: &str| json!({"configMap": {"name": "m", "items": [{"key": "k", "path": path}]}});
    let volume = |sources: Value| json!([{"name": "v", "projected": {"sources": sources}}]);
    check("Pod", "/spec/volumes", volume(json!([map("a"), map("b"), {}])), &[]);
    let same = volume(json!([map("a"), map("a")]));
    refuse(
        "Pod",
        "/spec/volumes",
        same,
        "spec.volumes[0].projected: Invalid value: \"m\": conflicting duplicate paths",
    );
}

#[test]
fn node_selectors_are_checked_in_pods_and_volumes() {
    let term = |term: Value| json!({"nodeSelectorTerms": [term]});
    let pod = |selector: Value| json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": selector}});
    let place = "requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0]";
    let field = |key: &str, values: Value| {
        term(json!({"matchFields": [{"key": key, "operator": "In", "values": values}]}))
    };
    for (selector, cause) in [
        (field("metadata.labels", json!(["a"])), "matchFields[0].key: Invalid value"),
        (field("metadata.name", json!(["a", "b"])), "matchFields[0].values: Required value"),
        (field("metadata.name", json!(["A b"])), "matchFields[0].values[0]: Invalid value"),
    ] {
        refuse(
            "Pod",
            "/spec/affinity",
            pod(selector),
            &format!("spec.affinity.nodeAffinity.{place}.{cause}"),
        );
    }
    let label = term(json!({"matchExpressions": [{"key": "k", "operator": "In", "values": ["A b"]}]}));
    refuse(
        "PersistentVolume",
        "/spec/nodeAffinity",
        json!({"required": label}),
        "spec.nodeAffinity.required.nodeSelectorTerms[0].matchExpressions[0].values[0]: Invalid value",
    );
    refuse("PersistentVolume", "/spec/nodeAffinity", json!({}), "spec.nodeAffinity.required: Required value");
}

#[test]
fn spread_constraints_differ_and_have_positive_domains() {
    let constraint = json!({"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"});
    let path = "spec.topologySpreadConstraints[0]";
    let two = json!([constraint, constraint]);
    refuse(
        "Pod",
        "/spec/topologySpreadConstraints",
        two,
        &format!("{path}.{{topologyKey, whenUnsatisfiable}}: Duplicate"),
    );
    let mut none = constraint;
    none["minDomains"] = 0.into();
    refuse(
        "Pod",
        "/spec/topologySpreadConstraints",
        json!([none]),
        &format!("{path}.minDomains: Invalid value: 0"),
    );
}

#[test]
fn an_empty_word_is_not_an_absent_one() {
    for (name, pointer, field) in [
        ("PersistentVolume", "/spec/volumeMode", "spec.volumeMode"),
        ("PersistentVolumeClaim", "/spec/volumeMode", "spec.volumeMode"),
        ("StorageClass", "/volumeBindingMode", "volumeBindingMode"),
        ("PersistentVolume", "/spec/hostPath/type", "spec.hostPath.type"),
    ] {
        let word = if pointer.ends_with("type") { "Nope" } else { "" };
        refuse(name, pointer, json!(word), &format!("{field}: Unsupported value: \"{word}\""));
    }
}

#[test]
fn ranges_of_a_node_are_one_of_each_family() {
    let mut node = good("Node");
    node["spec"] = json!({"podCIDR": "10.1.0.0/24", "podCIDRs": ["10.2.0.0/24", "fd00::/64"]});
    defaults::apply(kind("Node"), &mut node);
    assert_eq!(node["spec"]["podCIDRs"], json!(["10.1.0.0/24"]));
    let two = json!(["10.1.0.0/24", "10.2.0.0/24"]);
    refuse("Node", "/spec/podCIDRs", two, "spec.podCIDRs: Invalid value");
    check("Node", "/spec/podCIDRs", json!(["10.1.0.0/24", "fd00::/64"]), &[]);
}

#[test]
fn selectors_and_labels_of_templates_are_reported_as_upstream_does() {
    let wrong = json!({"matchLabels": {"a": "b c"}});
    let value = "spec.selector.matchLabels: Invalid value: \"b c\"";
    check("Deployment", "/spec/selector", wrong.clone(), &[value, "spec.selector: Invalid value: {"]);
    check("StatefulSet", "/spec/selector", wrong.clone(), &[value, "spec.selector: Invalid value: {"]);
    check("DaemonSet", "/spec/selector", wrong, &[value]);
    let mismatch = "spec.template.metadata.labels: Invalid value: {\"a\":\"b\"}: `selector` does not match";
    check("DaemonSet", "/spec/selector", Value::Null, &[mismatch]);
    let long = "x".repeat(64);
    let template = "/spec/template/metadata/labels/z";
    refuse("Deployment", template, json!(long), "spec.template.labels: Invalid value: \"xxx");
    let text =
        format!("spec.containers[0].name: Invalid value: \"{long}\": must be no more than 63 characters");
    refuse("Pod", "/spec/containers/0/name", json!(long), &text);
}

#[test]
fn strategies_are_checked_as_upstream_does() {
    check("Deployment", "/spec/strategy", json!({"type": "Recreate"}), &[]);
    let strategy = json!({"type": "Nope"});
    let refused = |field: &str| format!("spec.{field}: Unsupported value: {{\"type\":\"Nope\"}}");
    refuse("Deployment", "/spec/strategy", strategy.clone(), &refused("strategy"));
    refuse("DaemonSet", "/spec/updateStrategy", strategy, &refused("updateStrategy"));
    let rolling = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "", "maxUnavailable": 1}});
    refuse(
        "Deployment",
        "/spec/strategy",
        rolling,
        "spec.strategy.rollingUpdate.maxSurge: Invalid value: \"\"",
    );
    let rolling = json!({"type": "RollingUpdate", "rollingUpdate": {"maxSurge": "x", "maxUnavailable": 0}});
    let place = "spec.updateStrategy.rollingUpdate";
    let problems =
        [format!("{place}.maxSurge: Invalid value: \"x\""), format!("{place}.maxUnavailable: Required")];
    check("DaemonSet", "/spec/updateStrategy", rolling, &problems.each_ref().map(String::as_str));
}

#[test]
fn a_limit_range_has_a_possible_ratio() {
    let limit = |ratio: &str, kind: &str| json!({"type": kind, "min": {"cpu": "3"}, "max": {"cpu": "7"}, "maxLimitRequestRatio": {"cpu": ratio}});
    for kind in ["Pod", "Container"] {
        check("LimitRange", "/spec/limits", json!([limit("2300m", kind)]), &[]);
        let text = "spec.limits[0].maxLimitRequestRatio[cpu]: Invalid value: \"2334m\": ratio 2334m is greater than \
                    max/min = 2.333333";
        refuse("LimitRange", "/spec/limits", json!([limit("2334m", kind)]), text);
    }
    let limit = |min: &str, max: &str, request: &str| {
        json!([{"type": "Container", "min": {"cpu": min}, "max": {"cpu": max}, "default": {"cpu": "3"},
            "defaultRequest": {"cpu": request}}])
    };
    let place = "spec.limits[0].default[cpu]: Invalid value:";
    let above = format!("{place} \"2\": default value 3 is greater than max value 2");
    check("LimitRange", "/spec/limits", limit("1", "2", "1"), &[&above]);
    let below = format!("{place} \"4\": min value 4 is greater than default value 3");
    let request = "spec.limits[0].defaultRequest[cpu]: Invalid value: \"3\": min value 4 is greater than default request";
    check("LimitRange", "/spec/limits", limit("4", "5", "3"), &[request, &below]);
    let (one, two) = (json!({"example.com/gpu": "1"}), json!({"example.com/gpu": "2"}));
    let limits = |request: &Value| json!([{"type": "Container", "default": two, "defaultRequest": request}]);
    check("LimitRange", "/spec/limits", limits(&two), &[]);
    let text = "spec.limits[0].defaultRequest[example.com/gpu]: Invalid value: \"1\": default value 2 must equal to \
                defaultRequest value 1 in example.com/gpu";
    refuse("LimitRange", "/spec/limits", limits(&one), text);
}

#[test]
fn details_of_kinds_equal_upstreams_details() {
    let spec =
        |kind: &str| json!({"type": kind, "ports": [{"port": 80}], "allocateLoadBalancerNodePorts": false});
    check("Service", "/spec", spec("LoadBalancer"), &[]);
    refuse(
        "Service",
        "/spec",
        spec("NodePort"),
        "spec.allocateLoadBalancerNodePorts: Forbidden: may only be used",
    );
    let claim = |name: &str| {
        json!({"metadata": {"name": name}, "spec": {"accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": "1Gi"}}}})
    };
    check("StatefulSet", "/spec/volumeClaimTemplates", json!([claim("a"), claim("a")]), &[]);
    let invalid = ["spec.template.spec.volumes[0].name: Invalid value: \"A b\""];
    check("StatefulSet", "/spec/volumeClaimTemplates", json!([claim("A b")]), &invalid);
    let job = json!({"completionMode": "x", "backoffLimitPerIndex": 1, "successPolicy": {"rules": [{"succeededCount": 1}]},
        "completions": 1, "parallelism": 1, "template": good("Job")["spec"]["template"]});
    let invalid = ["spec.completionMode: Unsupported value: \"x\"", "spec.successPolicy: Invalid value"];
    check("Job", "/spec", job, &invalid);
    let mut namespace = good("Namespace");
    namespace["spec"] = json!({"finalizers": ["a", "kubernetes", "a.b/c"]});
    let problems = texts(create(kind("Namespace"), &namespace));
    let plain = "spec.finalizers: Invalid value: \"a\": name is neither a standard finalizer name";
    assert!(matches!(problems.as_slice(), [only] if only.starts_with(plain)), "{problems:?}");
    let limits = json!([{"type": "PersistentVolumeClaim", "min": {"storage": "1", "a": "1"}}]);
    refuse(
        "LimitRange",
        "/spec/limits",
        limits,
        "spec.limits[0].min[a]: Invalid value: \"a\": must be a standard resource",
    );
    let subsets = json!([{"addresses": [{"ip": "x"}], "ports": [{"port": 80, "protocol": "TCP"}]}]);
    let ip = "subsets[0].addresses[0].ip: Invalid value: \"x\": must be a valid IP address";
    check("Endpoints", "/subsets", subsets, &[ip, ip]);
}

#[test]
fn an_autoscaler_needs_policies() {
    let kind = crate::kind::by_kind("autoscaling/v2", "HorizontalPodAutoscaler").unwrap();
    let said = |rules: &str, policies: Value| {
        let target = json!({"apiVersion": "apps/v1", "kind": "Deployment", "name": "d"});
        let value = json!({"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
            "metadata": {"name": "h", "namespace": "n"}, "spec": {"maxReplicas": 2, "scaleTargetRef": target,
            "behavior": {rules: {"policies": policies}}}});
        let parsed = crate::schema::Parsed { value, duplicates: Vec::new(), keys: Vec::new() };
        let (mut object, _) = kind.strategy().decode(parsed, crate::schema::FieldValidation::Strict).unwrap();
        defaults::apply(kind, &mut object);
        texts(create(kind, &object))
    };
    for rules in ["scaleUp", "scaleDown"] {
        assert_eq!(said(rules, Value::Null), Vec::<String>::new());
        let text =
            format!("spec.behavior.{rules}.policies: Required value: must specify at least one Policy");
        assert_eq!(said(rules, json!([])), [text]);
    }
}

#[test]
fn places_in_pods_equal_upstreams_places() {
    let at = |name: &str| format!("spec.containers[0].{name}");
    let required = "type is required when seccompProfile is set";
    let profile = json!({"seccompProfile": {}});
    let text = format!("spec.securityContext.seccompProfile.type: Required value: {required}");
    refuse("Pod", "/spec/securityContext", profile, &text);
    refuse("Pod", "/spec/containers/0/envFrom", json!([{}]), &at("envFrom: Invalid value: \"\""));
    let mounts = json!([{"name": "v", "mountPath": "/v", "mountPropagation": "x"}]);
    let mut pod = good("Pod");
    pod["spec"]["volumes"] = json!([{"name": "v", "emptyDir": {}}]);
    pod["spec"]["containers"][0]["volumeMounts"] = mounts;
    let problems = texts(create(kind("Pod"), &pod));
    let expected = at("volumeMounts.mountPropagation: Unsupported");
    assert!(problems.iter().any(|problem| problem.starts_with(&expected)), "{problems:?}");
    let volumes = json!([{"name": "v", "downwardAPI": {"items": [{"path": "a"}]}}]);
    refuse("Pod", "/spec/volumes", volumes, "spec.volumes[0].downwardAPI: Required value: one of fieldRef");
    refuse("Pod", "/spec/dnsConfig", json!({"options": [{}]}), "spec.dnsConfig.options[0]: Required value");
}

#[test]
fn the_template_of_a_job_is_frozen_until_its_pods_are_gone() {
    let mut old = good("Job");
    strategy::prepare_for_create(kind("Job"), &mut old);
    defaults::apply(kind("Job"), &mut old);
    old["metadata"]["uid"] = "u".into();
    strategy::prepare_named(kind("Job"), &mut old);
    old["spec"]["suspend"] = true.into();
    let mut new = old.clone();
    new["spec"]["template"]["spec"]["nodeSelector"] = json!({"a": "b"});
    let problems = |old: &Value| texts(update(kind("Job"), &new, old));
    assert!(
        problems(&old).iter().any(|text| text.starts_with("spec.template: Invalid value")),
        "{:?}",
        problems(&old)
    );
    old["status"] = json!({"conditions": [{"type": "Suspended", "status": "True"}]});
    assert_eq!(problems(&old), Vec::<String>::new());
}

#[test]
fn annotations_of_services_agree() {
    let both = |hints: &str| json!({"service.kubernetes.io/topology-aware-hints": hints, "service.kubernetes.io/topology-mode": "Auto"});
    check("Service", "/metadata/annotations", both("Auto"), &[]);
    refuse(
        "Service",
        "/metadata/annotations",
        both("Disabled"),
        "metadata.annotations[service.kubernetes.io/topology-mode]: Invalid value: \"Auto\": must match annotations[service.kubernetes.io/topology-aware-hints]",
    );
}

#[test]
fn points_of_load_balancers_are_checked() {
    let texts = |kind: &str, point: Value| {
        let service = json!({"spec": {"type": kind}, "status": {"loadBalancer": {"ingress": [point]}}});
        found(|causes| built_in_status(causes, "", "Service", &service, &service))
    };
    let path = "status.loadBalancer.ingress";
    assert_eq!(texts("LoadBalancer", json!({"ip": "10.0.0.1", "ipMode": "VIP"})), Vec::<String>::new());
    assert_eq!(
        texts("ClusterIP", json!({"ip": "10.0.0.1", "ipMode": "VIP"})),
        [format!("{path}: Forbidden: may only be used when `spec.type` is 'LoadBalancer'")]
    );
    assert_eq!(
        texts("LoadBalancer", json!({"ip": "10.0.0.1"})),
        [format!("{path}[0].ipMode: Required value: must be specified when `ip` is set")]
    );
    assert_eq!(
        texts("LoadBalancer", json!({"hostname": "a.b", "ipMode": "VIP"})),
        [format!("{path}[0].ipMode: Forbidden: may not be specified when `ip` is not set")]
    );
    assert_eq!(
        texts("LoadBalancer", json!({"ip": "10.0.0.1", "ipMode": "X"})),
        [format!("{path}[0].ipMode: Unsupported value: \"X\": supported values: \"Proxy\", \"VIP\"")]
    );
}

#[test]
fn names_of_system_classes_are_reserved() {
    let problems = |name: &str, value: i64, is_default: bool| {
        let class = json!({"metadata": {"name": name}, "value": value, "globalDefault": is_default,
            "preemptionPolicy": "Never"});
        found(|causes| policy::priority_class(causes, &class, None))
    };
    assert_eq!(problems("system-node-critical", 2_000_001_000, false), Vec::<String>::new());
    let text = "metadata.name: Forbidden: priority class names with 'system-' prefix are reserved for system use only. error: ";
    for (name, value, is_default, error) in [
        ("system-x", 1, false, "system-x is not a known system priority class"),
        ("system-node-critical", 1, false, "value of system-node-critical PriorityClass must be 2000001000"),
        (
            "system-node-critical",
            2_000_001_000,
            true,
            "globalDefault of system-node-critical PriorityClass must be false",
        ),
    ] {
        assert_eq!(problems(name, value, is_default), [format!("{text}{error}")]);
    }
}

#[test]
fn the_handler_of_a_runtime_class_is_checked_last() {
    let toleration = json!({"key": "k", "operator": "Exists"});
    let class = json!({"handler": "b", "scheduling": {"tolerations": [toleration, toleration]}});
    let causes = found(|causes| policy::runtime_class(causes, &class, Some(&json!({"handler": "a"}))));
    let fields: Vec<_> = causes.iter().filter_map(|cause| cause.split(':').next()).collect();
    assert_eq!(fields, ["scheduling.tolerations[1]", "handler"], "{causes:?}");
}

#[test]
fn tolerations_and_topologies_are_compared_quickly() {
    let tolerations: Vec<Value> =
        (0..50_000).map(|number| json!({"key": format!("k{number}"), "operator": "Exists"})).collect();
    let class = json!({"handler": "a", "scheduling": {"tolerations": tolerations}});
    assert_eq!(found(|causes| policy::runtime_class(causes, &class, None)), Vec::<String>::new());
    let term = |key: &str| json!({"matchLabelExpressions": [{"key": key, "values": ["a"]}]});
    let path = "allowedTopologies";
    check("StorageClass", "/allowedTopologies", json!([term("a"), term("b")]), &[]);
    for terms in [json!([term("a"), term("a")]), json!([term("a"), {}])] {
        let cause = format!("{path}[1].matchLabelExpressions: Duplicate value: \"\"");
        check("StorageClass", "/allowedTopologies", terms, &[&cause]);
    }
}

#[test]
fn a_limit_range_shows_the_amount_that_breaks_the_order() {
    let limit = json!([{"type": "Container", "min": {"cpu": "2"}, "max": {"cpu": "3"}, "default": {"cpu": "4"},
        "defaultRequest": {"cpu": "2"}}]);
    let text =
        "spec.limits[0].default[cpu]: Invalid value: \"3\": default value 4 is greater than max value 3";
    refuse("LimitRange", "/spec/limits", limit, text);
}

#[test]
fn owners_and_finalizers_of_objects_are_checked() {
    let owner = |version: &str, kind: &str| json!({"apiVersion": version, "kind": kind, "name": "a", "uid": "u", "controller": true});
    check("ConfigMap", "/metadata/ownerReferences", json!([owner("events.k8s.io/v1", "Event")]), &[]);
    for (list, cause) in [
        (json!([owner("v1", "Event")]), "metadata.ownerReferences: Invalid value: {"),
        (
            json!([owner("a/b/c", "K")]),
            "metadata.ownerReferences.apiVersion: Invalid value: \"a/b/c\": version must not be empty",
        ),
    ] {
        check("ConfigMap", "/metadata/ownerReferences", list, &[cause]);
    }
    let three = json!([owner("v1", "A"), owner("v1", "B"), owner("v1", "C")]);
    check("ConfigMap", "/metadata/ownerReferences", three, &["metadata.ownerReferences: Invalid value"; 2]);
    let cause = "metadata.finalizers[0]: Invalid value: \"plain\": name is neither a standard finalizer name";
    check("ConfigMap", "/metadata/finalizers", json!(["plain"]), &[cause]);
    check("Lease", "/metadata/finalizers", json!(["plain"]), &[]);
    check(
        "ConfigMap",
        "/metadata/finalizers",
        json!(["orphan", "foregroundDeletion"]),
        &[
            "metadata.finalizers: Invalid value: [\"orphan\",\"foregroundDeletion\"]: finalizer orphan and foregroundDeletion cannot be both set",
        ],
    );
}
