use serde_json::json;

use super::*;

fn said(check: fn(&mut Causes, &Value, Option<&Value>), object: Value) -> Vec<String> {
    let mut causes = Causes::default();
    check(&mut causes, &object, None);
    causes.into_list().into_iter().map(|cause| format!("{}: {}", cause.field, cause.message)).collect()
}

fn assert_says(check: fn(&mut Causes, &Value, Option<&Value>), object: Value, expect: &str) {
    let causes = said(check, object.clone());
    assert!(causes.iter().any(|cause| cause.contains(expect)), "{object}: {causes:?}");
}

#[test]
fn policies_have_peers_and_ports() {
    let policy = |rule: Value| json!({"spec": {"podSelector": {}, "ingress": [rule]}});
    let good = json!({"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}},
        {"podSelector": {}, "namespaceSelector": {}}], "ports": [{"port": 80, "endPort": 90, "protocol": "TCP"}, {"port": "http", "protocol": "UDP"}]});
    assert_eq!(said(network_policy, policy(good)), Vec::<String>::new());
    for (rule, expect) in [
        (json!({"from": [{}]}), "spec.ingress[0].from[0]: Required value"),
        (json!({"from": [{"podSelector": {}, "ipBlock": {"cidr": "10.0.0.0/8"}}]}), "may not specify both"),
        (json!({"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["11.0.0.0/16"]}}]}), "strict subset"),
        (json!({"from": [{"ipBlock": {"cidr": "10.0.0.0"}}]}), "must be a valid CIDR"),
        (
            json!({"ports": [{"port": 80, "endPort": 79}]}),
            "endPort: Invalid value: 80: must be greater than or equal to `port`",
        ),
        (
            json!({"ports": [{"endPort": 79}]}),
            "endPort: Invalid value: 79: may not be specified when `port` is not specified",
        ),
        (json!({"ports": [{"port": "http", "endPort": 79}]}), "non-numeric"),
        (json!({"ports": [{"port": 70000}]}), "must be between 1 and 65535"),
        (json!({"ports": [{"protocol": "ICMP"}]}), "Unsupported value"),
    ] {
        assert_says(network_policy, policy(rule), expect);
    }
}

#[test]
fn ingresses_have_backends_and_absolute_paths() {
    let backend = json!({"service": {"name": "web", "port": {"number": 80}}});
    let ingress = |path: Value| json!({"spec": {"rules": [{"host": "a.b", "http": {"paths": [path]}}]}});
    let good = json!({"path": "/x", "pathType": "Prefix", "backend": backend});
    assert_eq!(said(ingress_of, ingress(good)), Vec::<String>::new());
    for (path, expect) in [
        (json!({"path": "x", "pathType": "Prefix", "backend": backend}), "must be an absolute path"),
        (json!({"path": "/a/../b", "pathType": "Exact", "backend": backend}), "must not contain '/../'"),
        (json!({"path": "/x", "backend": backend}), "pathType must be specified"),
        (
            json!({"path": "/x", "pathType": "Prefix", "backend": {}}),
            "resource or service backend is required",
        ),
        (
            json!({"path": "/x", "pathType": "Prefix", "backend": {"service": {"name": "web"}}}),
            "port name or number",
        ),
    ] {
        assert_says(ingress_of, ingress(path), expect);
    }
    assert_says(ingress_of, json!({"spec": {}}), "either `defaultBackend` or `rules`");
    let address = json!({"spec": {"rules": [{"host": "10.0.0.1"}]}});
    assert_says(ingress_of, address, "must be a DNS name, not an IP address");
}

fn ingress_of(causes: &mut Causes, object: &Value, old: Option<&Value>) {
    ingress(causes, object, old);
}

#[test]
fn classes_ranges_and_addresses() {
    assert_eq!(said(ingress_class, json!({"spec": {"controller": "a.io/b"}})), Vec::<String>::new());
    assert_says(ingress_class, json!({"spec": {"controller": "b"}}), "domain-prefixed path");
    let scoped = json!({"spec": {"controller": "a.io/b", "parameters": {"kind": "K", "name": "n", "scope": "Namespace"}}});
    assert_says(ingress_class, scoped, "spec.parameters.namespace: Required");
    let class = |scope: Value, namespace: Value| {
        let parameters = json!({"kind": "K", "name": "n", "scope": scope, "namespace": namespace});
        json!({"spec": {"controller": "a.io/b", "parameters": parameters}})
    };
    assert_says(ingress_class, class("Namespace".into(), "".into()), "spec.parameters.namespace: Invalid");
    assert_says(ingress_class, class("Cluster".into(), "".into()), "spec.parameters.namespace: Forbidden");
    assert_says(
        ingress_class,
        class("".into(), "n".into()),
        "spec.parameters.scope: Unsupported value: \"\"",
    );
    assert_says(ingress_class, class(Value::Null, "n".into()), "spec.parameters.scope: Required");
    assert_eq!(
        said(service_cidr, json!({"spec": {"cidrs": ["10.0.0.0/16", "fd00::/112"]}})),
        Vec::<String>::new()
    );
    assert_says(service_cidr, json!({"spec": {"cidrs": ["10.0.0.1/16"]}}), "beyond the prefix length");
    assert_says(service_cidr, json!({"spec": {"cidrs": ["10.0.0.0/16", "10.1.0.0/16"]}}), "each IP family");
    let parent = json!({"parentRef": {"resource": "services", "name": "x"}});
    assert_eq!(
        said(ip_address, json!({"metadata": {"name": "10.0.0.1"}, "spec": parent})),
        Vec::<String>::new()
    );
    assert_says(ip_address, json!({"metadata": {"name": "fd00:0::1"}, "spec": parent}), "canonical form");
    let generated = json!({"metadata": {"name": "10.0.0.1", "generateName": "a"}, "spec": parent});
    assert_says(
        ip_address,
        generated,
        "metadata.generateName: Invalid value: \"a\": must be a valid IP address",
    );
    assert_says(
        ip_address,
        json!({"metadata": {"name": "10.0.0.1"}, "spec": {}}),
        "spec.parentRef: Required",
    );
}

#[test]
fn changes_of_immutable_fields_are_refused() {
    let of = |name: &str| json!({"spec": {"controller": name}});
    let mut causes = Causes::default();
    ingress_class(&mut causes, &of("a.io/b"), Some(&of("a.io/c")));
    let mut ranges = Causes::default();
    let (one, two) = (
        json!({"spec": {"cidrs": ["10.0.0.0/16"]}}),
        json!({"spec": {"cidrs": ["10.0.0.0/16", "fd00::/112"]}}),
    );
    service_cidr(&mut ranges, &two, Some(&one));
    assert_eq!((causes.into_list().len(), ranges.into_list().len()), (1, 0));
}

#[test]
fn the_parent_of_an_address_is_needed_and_immutable() {
    let of = |spec: Value| json!({"metadata": {"name": "10.0.0.1"}, "spec": spec});
    let old = of(json!({"parentRef": {"resource": "services", "name": "x"}}));
    let update = |new: Value| {
        let mut causes = Causes::default();
        ip_address(&mut causes, &of(new), Some(&old));
        causes.into_list().into_iter().map(|cause| (cause.field, cause.reason)).collect::<Vec<_>>()
    };
    assert!(update(old["spec"].clone()).is_empty());
    let (invalid, required) = ("FieldValueInvalid", "FieldValueRequired");
    let parent = "spec.parentRef".to_owned();
    assert_eq!(update(json!({})), [(parent.clone(), invalid), (parent.clone(), required)]);
    let unnamed = update(json!({"parentRef": {"resource": "services"}}));
    assert_eq!(unnamed, [(parent.clone(), invalid), (format!("{parent}.name"), required)]);
}

#[test]
fn the_protocol_of_a_policy_port_may_be_absent() {
    let policy =
        json!({"spec": {"podSelector": {}, "ingress": [{"ports": [{"port": 80}]}], "policyTypes": [""]}});
    assert_eq!(
        said(network_policy, policy),
        ["spec.policyTypes[0]: Unsupported value: \"\": supported values: \"Ingress\", \"Egress\""]
    );
}

#[test]
fn hosts_of_ingresses_may_have_a_wildcard() {
    let ingress = |host: &str| json!({"spec": {"rules": [{"host": host}], "tls": [{"hosts": [host]}]}});
    assert_eq!(said(ingress_of, ingress("*.a.b")), Vec::<String>::new());
    for host in ["a.*.b", "*"] {
        let causes = said(ingress_of, ingress(host));
        assert!(causes.len() == 2 && causes[0].contains("a wildcard DNS-1123 subdomain"), "{causes:?}");
    }
}

#[test]
fn the_class_of_an_ingress_is_checked() {
    let mut ingress = json!({"metadata": {"annotations": {"kubernetes.io/ingress.class": "a"}},
        "spec": {"ingressClassName": "b", "defaultBackend": {"resource": {"kind": "K", "name": "n"}}}});
    assert_eq!(
        said(ingress_of, ingress.clone()),
        [
            "annotations.kubernetes.io/ingress.class: Invalid value: \"a\": must match `ingressClassName` when both are specified"
        ]
    );
    let mut update = Causes::default();
    super::ingress(&mut update, &ingress, Some(&ingress));
    assert!(update.is_empty(), "only new ingresses");
    ingress["spec"]["ingressClassName"] = "a".into();
    assert_eq!(said(ingress_of, ingress), Vec::<String>::new());
    assert_says(ingress_class, json!({"spec": {"controller": "a.io/b c"}}), "Invalid path (regex");
}

#[test]
fn path_types_decide_which_paths_are_good() {
    let backend = json!({"service": {"name": "web", "port": {"number": 80}}});
    let of = |kind: &str, path: &str| {
        let path = json!({"path": path, "pathType": kind, "backend": backend});
        said(ingress_of, json!({"spec": {"rules": [{"http": {"paths": [path]}}]}}))
    };
    assert_eq!(of("ImplementationSpecific", "/a//b"), Vec::<String>::new());
    assert_eq!(of("ImplementationSpecific", ""), Vec::<String>::new());
    assert_eq!((of("Exact", "/a//b").len(), of("Exact", "").len(), of("Other", "x").len()), (1, 1, 1));
}

#[test]
fn ranges_of_services_can_only_get_a_second_family() {
    let of = |ranges: &[&str]| json!({"spec": {"cidrs": ranges}});
    let update = |new: &[&str], old: &[&str]| {
        let mut causes = Causes::default();
        service_cidr(&mut causes, &of(new), Some(&of(old)));
        causes.into_list().into_iter().map(|cause| cause.field).collect::<Vec<_>>()
    };
    let (v4, v6) = ("10.0.0.0/16", "fd00::/112");
    assert_eq!(update(&[v4, v6], &[v4]), Vec::<String>::new());
    assert_eq!(update(&[v6, v4], &[v4]), ["spec.cidrs[0]"]);
    assert_eq!(update(&[v6, v6], &[v4, v6]), ["spec.cidrs[0]"]);
    assert_eq!(update(&[v4], &[v4, v6]), ["spec.cidrs"]);
    assert_says(service_cidr, of(&["FD00::/112"]), "must be in canonical form");
}

#[test]
fn points_of_load_balancers_are_checked() {
    let mut causes = Causes::default();
    let points = json!([{"ip": "10.0.0.1"}, {"hostname": "a.b"}, {"ip": "x"}, {"hostname": "10.0.0.1"}]);
    ingress_status(&mut causes, &json!({"loadBalancer": {"ingress": points}}));
    let fields: Vec<String> = causes.into_list().into_iter().map(|cause| cause.field).collect();
    assert_eq!(fields, ["status.loadBalancer.ingress[2].ip", "status.loadBalancer.ingress[3].hostname"]);
}
