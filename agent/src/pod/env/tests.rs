use serde_json::json;

use super::*;

fn pod(container: serde_json::Value) -> Pod {
    serde_json::from_value(json!({
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "labels": {"app": "x"}},
        "spec": {"nodeName": "node", "containers": [container]},
    }))
    .unwrap()
}

fn env_of(container: serde_json::Value, sources: &Sources) -> Result<Vec<(String, String)>, EnvError> {
    let pod = pod(container);
    environment(&pod, &pod.spec.as_ref().unwrap().containers[0], sources)
}

fn value<'a>(env: &'a [(String, String)], name: &str) -> Option<&'a str> {
    env.iter().find(|(n, _)| n == name).map(|(_, v)| v.as_str())
}

#[test]
fn references_expand_to_variables_set_before() {
    let look = |name: &str| (name == "A").then_some("1");
    for (text, expected) in
        [("$(A)", "1"), ("$$(A)", "$(A)"), ("$(B)", "$(B)"), ("x$", "x$"), ("$(A", "$(A"), ("$A", "$A")]
    {
        assert_eq!(expand(text, 10, look).as_deref(), Ok(expected), "{text}");
    }
    let env = env_of(
        json!({"name": "c", "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "$(A)-$(C)"}, {"name": "C", "value": "2"}]}),
        &Sources::default(),
    );
    assert_eq!(value(&env.unwrap(), "B"), Some("1-$(C)"));
}

#[test]
fn variables_are_set_from_fields_and_resources_of_the_pod() {
    let sources = Sources {
        addresses: Addresses { pod_ips: vec!["10.0.0.2".into()], host_ips: vec!["1.2.3.4".into()] },
        node: [("cpu", "2"), ("memory", "1Gi"), ("ephemeral-storage", "5Gi")]
            .map(|(name, amount)| (name.to_owned(), Quantity(amount.to_owned())))
            .into(),
        ..Sources::default()
    };
    let field = |path: &str| json!({"name": path, "valueFrom": {"fieldRef": {"fieldPath": path}}});
    let resource = |r: &str| json!({"name": r, "valueFrom": {"resourceFieldRef": {"resource": r}}});
    let env = env_of(
        json!({"name": "c", "resources": {"requests": {"cpu": "1500m"}},
               "env": [field("metadata.name"), field("metadata.labels['app']"), field("status.podIP"),
                       resource("requests.cpu"), resource("limits.cpu"), resource("limits.memory"),
                       resource("limits.ephemeral-storage"), field("spec.host")]}),
        &sources,
    )
    .unwrap();
    let values: Vec<&str> = env.iter().map(|(_, v)| v.as_str()).collect();
    assert_eq!(values, ["p", "x", "10.0.0.2", "2", "2", "1073741824", "5368709120", "node"]);
}

#[test]
fn config_maps_and_secrets_are_required_unless_optional() {
    let map: ConfigMap = serde_json::from_value(json!({"data": {"k": "v"}})).unwrap();
    let sources = Sources { config_maps: [("m".to_owned(), Some(map))].into(), ..Sources::default() };
    let key = |name: &str, key: &str, optional: bool| {
        json!({"name": "c", "env": [{"name": "A", "valueFrom":
            {"configMapKeyRef": {"name": name, "key": key, "optional": optional}}}]})
    };
    assert_eq!(value(&env_of(key("m", "k", false), &sources).unwrap(), "A"), Some("v"));
    assert_eq!(env_of(key("m", "z", true), &sources).unwrap(), []);
    assert_eq!(
        env_of(key("m", "z", false), &sources).unwrap_err().to_string(),
        "couldn't find key z in ConfigMap n/m"
    );
    assert_eq!(env_of(key("q", "k", false), &sources).unwrap_err().to_string(), "configmap \"q\" not found");
    let from = json!({"name": "c", "envFrom": [{"prefix": "P_", "configMapRef": {"name": "m"}}]});
    assert_eq!(value(&env_of(from, &sources).unwrap(), "P_k"), Some("v"));
}

#[test]
fn later_variables_can_refer_to_a_variable_from_a_file() {
    let container = json!({"name": "c", "env": [
        {"name": "A", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "f", "key": "K"}}},
        {"name": "B", "value": "$(A)!"},
        {"name": "C", "valueFrom": {"fileKeyRef": {"volumeName": "v", "path": "f", "key": "L", "optional": true}}}]});
    let name = FileName { volume: "v".to_owned(), path: "f".to_owned() };
    let file = EnvFile::parse(b"K='$(B)'\n", &["K", "L"].map(str::to_owned).into());
    let sources = Sources { files: [(name, file)].into(), ..Sources::default() };
    let env = env_of(container, &sources).unwrap();
    assert_eq!((value(&env, "A"), value(&env, "B"), value(&env, "C")), (Some("$(B)"), Some("$(B)!"), None));
}

#[test]
fn variables_are_set_for_the_api_server_and_for_services_of_the_namespace() {
    let service = |ns: &str, name: &str| -> Service {
        serde_json::from_value(json!({"metadata": {"namespace": ns, "name": name},
            "spec": {"clusterIP": "10.43.0.1", "ports": [{"name": "https", "port": 443}]}}))
        .unwrap()
    };
    let sources = Sources {
        services: [service("default", "kubernetes"), service("n", "my-web"), service("z", "far")]
            .map(std::sync::Arc::new)
            .into(),
        ..Sources::default()
    };
    let env = env_of(json!({"name": "c"}), &sources).unwrap();
    assert_eq!(value(&env, "KUBERNETES_SERVICE_HOST"), Some("10.43.0.1"));
    assert_eq!(value(&env, "KUBERNETES_PORT_443_TCP"), Some("tcp://10.43.0.1:443"));
    assert_eq!(value(&env, "MY_WEB_SERVICE_PORT_HTTPS"), Some("443"));
    assert_eq!(value(&env, "FAR_SERVICE_HOST"), None);
}

#[test]
fn unclosed_references_take_linear_time() {
    let text = "$(".repeat(3 << 19);
    assert_eq!(expand(&text, BYTES_MAX, |_| None).as_ref(), Ok(&text));
    let text = format!("$(A){text}");
    assert_eq!(expand(&text, BYTES_MAX, |name| (name == "A").then_some("")).as_deref(), Ok(&text[4..]));
}

#[test]
fn references_and_copies_cannot_make_variables_of_any_size() {
    let doubled =
        (1..30).map(|i| json!({"name": format!("V{i}"), "value": format!("$(V{0})$(V{0})", i - 1)}));
    let first = json!({"name": "V0", "value": "x".repeat(1024)});
    let env: Vec<_> = std::iter::once(first).chain(doubled).collect();
    let found = env_of(json!({"name": "c", "env": env}), &Sources::default());
    assert_eq!(found.expect_err("exponential growth"), EnvError::TooLarge);

    let large = "x".repeat(1 << 20);
    let map: ConfigMap = serde_json::from_value(json!({"data": {"k": large}})).unwrap();
    let sources = Sources { config_maps: [("m".to_owned(), Some(map))].into(), ..Sources::default() };
    let from: Vec<_> =
        (0..20).map(|i| json!({"prefix": format!("P{i}_"), "configMapRef": {"name": "m"}})).collect();
    let found = env_of(json!({"name": "c", "envFrom": from}), &sources);
    assert_eq!(found.expect_err("many copies of a config map"), EnvError::TooLarge);
    let key = json!({"configMapKeyRef": {"name": "m", "key": "k"}});
    let same: Vec<_> = (0..20).map(|_| json!({"name": "A", "valueFrom": key})).collect();
    let found = env_of(json!({"name": "c", "env": same}), &sources);
    assert_eq!(found.expect_err("one name again and again"), EnvError::TooLarge);
}
