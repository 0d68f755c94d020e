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
        (json!({"ports": [{"port": 80, "endPort": 79}]}), "greater than or equal to `port`"),
        (json!({"ports": [{"port": 80, "endPort": 0}]}), "Invalid value: 80: must be greater"),
        (json!({"ports": [{"port": "http", "endPort": 79}]}), "non-numeric"),
        (
            json!({"ports": [{"endPort": 79}]}),
            "endPort: Invalid value: 79: may not be specified when `port` is not",
        ),
        (json!({"ports": [{"port": ""}]}), "must contain only alpha-numeric"),
        (json!({"from": [{"podSelector": {}, "ipBlock": {"cidr": "x"}}]}), "ipBlock.cidr: Invalid value"),
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
    let host = |host: &str| json!({"spec": {"rules": [{"host": host}], "tls": [{"hosts": [host]}]}});
    assert_says(ingress_of, host("10.0.0.1"), "must be a DNS name, not an IP address");
    assert_eq!(said(ingress_of, host("*.a.b")), Vec::<String>::new());
    for wrong in ["*", "*a.b", "*.*.b"] {
        assert_eq!(said(ingress_of, host(wrong)).len(), 2, "{wrong}");
        assert_says(ingress_of, host(wrong), "a wildcard DNS-1123 subdomain must start with");
    }
    let untyped = said(ingress_of, ingress(json!({})));
    assert_eq!(untyped.len(), 1, "the other fields depend on the type: {untyped:?}");
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
    let class = |scope: Value, namespace: Value| json!({"spec": {"controller": "a.io/b", "parameters": {"kind": "K", "name": "n", "scope": scope, "namespace": namespace}}});
    assert_says(ingress_class, class("Namespace".into(), "".into()), "spec.parameters.namespace: Invalid");
    assert_says(ingress_class, class("Cluster".into(), "".into()), "spec.parameters.namespace: Forbidden");
    assert_says(
        ingress_class,
        class("".into(), "n".into()),
        "spec.parameters.scope: Unsupported value: \"\"",
    );
    assert_says(ingress_class, class(Value::Null, "n".into()), "spec.parameters.scope: Required");
    assert_says(
        ingress_class,
        json!({"spec": {"controller": "a.io/b c"}}),
        "Invalid value: \"b c\": Invalid path",
    );
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
    for (name, expect) in [
        ("fd00:0::1", "must be in canonical form (\"fd00::1\")"),
        ("::ffff:10.0.0.1", "must not be an IPv4-mapped IPv6 address"),
        ("a", "must be a valid IP address"),
    ] {
        assert_says(ip_address, json!({"metadata": {"name": name}, "spec": parent}), expect);
    }
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
    let fields = |cidrs: Value| -> Vec<String> {
        let mut causes = Causes::default();
        service_cidr(&mut causes, &json!({"spec": {"cidrs": cidrs}}), Some(&one));
        causes.into_list().into_iter().map(|cause| cause.field).collect()
    };
    assert_eq!(fields(json!(["x"])), ["spec.cidrs[0]"]);
    assert_eq!(fields(json!([])), ["spec.cidrs"]);
    assert_eq!(fields(json!(["10.0.0.0/16", "10.1.0.0/16"])), ["spec.cidrs"], "both are of one family");
}
