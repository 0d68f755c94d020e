//! The admission plugins Initializers and InitialResources, which are off by default.

use super::*;
use crate::usage_history::ContainerUsage;
use coracle_store::Expect;

const CONFIGURATIONS: &str = "/apis/admissionregistration.k8s.io/v1alpha1/initializerconfigurations";
const ALL: &str = "includeUninitialized=true";

async fn with(plugin: &str) -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let selection = PluginSelection { enabled: vec![plugin.to_owned()], disabled: Vec::new() };
    let api = open_with(directory.path(), |config| config.admission_plugins = selection).await;
    let server = Fixture { api, directory };
    server.post("/api/v1/namespaces/default/serviceaccounts", json!({"metadata": {"name": "default"}})).await;
    server
}

/// A server with initializers of one resource of the core group.
async fn initializing(resource: &str, names: &[&str]) -> Fixture {
    let server = with("Initializers").await;
    let rule = json!({"apiGroups": [""], "apiVersions": ["v1"], "resources": [resource]});
    let list: Vec<Value> = names.iter().map(|name| json!({"name": name, "rules": [rule]})).collect();
    let made = server.post(CONFIGURATIONS, json!({"metadata": {"name": "a"}, "initializers": list})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    server
}

fn names(list: &Answer) -> Vec<&str> {
    list.body["items"]
        .as_array()
        .unwrap()
        .iter()
        .map(|item| item["metadata"]["name"].as_str().unwrap())
        .collect()
}

#[tokio::test]
async fn without_the_plugin_the_field_and_the_kind_are_unknown() {
    let server = Fixture::new().await;
    assert_eq!(server.get(CONFIGURATIONS).await.code, 404);
    let mut map = config_map("a", json!({}));
    map["metadata"]["initializers"] = json!({"pending": [{"name": "a.example.com"}]});
    let strict = server.post(&format!("{CONFIG_MAPS}?fieldValidation=Strict"), map.clone()).await;
    assert_eq!(strict.code, 400, "{}", strict.body);
    assert!(strict.body["message"].as_str().unwrap().contains("unknown field \"metadata.initializers\""));
    let made = server.post(CONFIG_MAPS, map).await;
    assert_eq!(made.code, 201);
    assert!(made.body["metadata"]["initializers"].is_null(), "{}", made.body);
}

#[tokio::test]
async fn a_create_waits_until_all_initializers_are_done() {
    let server = initializing("configmaps", &["a.example.com", "b.example.com"]).await;
    let path = format!("{CONFIG_MAPS}/x");
    let initialize = async {
        let seen =
            server.first_event(&format!("{CONFIG_MAPS}?watch=1&{ALL}&fieldSelector=metadata.name=x")).await;
        let pending = json!([{"name": "a.example.com"}, {"name": "b.example.com"}]);
        assert_eq!(seen["object"]["metadata"]["initializers"]["pending"], pending, "{seen}");
        assert!(!names(&server.get(CONFIG_MAPS).await).contains(&"x"));
        let by_label = server.get(&format!("{CONFIG_MAPS}?labelSelector=l=1")).await;
        assert!(names(&by_label).is_empty());
        assert!(names(&server.get(&format!("{CONFIG_MAPS}?{ALL}")).await).contains(&"x"));
        assert_eq!(server.get(&path).await.code, 200);
        let first = json!({"metadata": {"initializers": {"pending": [{"name": "b.example.com"}]}}});
        assert_eq!(server.merge(&path, first).await.code, 200);
        let last = json!({"metadata": {"initializers": {"pending": []}}, "data": {"added": "1"}});
        let done = server.merge(&path, last).await;
        assert_eq!(done.code, 200, "{}", done.body);
        assert!(done.body["metadata"]["initializers"].is_null());
    };
    let create = server.post(CONFIG_MAPS, config_map("x", json!({"l": "1"})));
    let (made, ()) = tokio::join!(create, initialize);
    assert_eq!((made.code, &made.body["data"]["added"]), (201, &json!("1")), "{}", made.body);
    assert!(names(&server.get(CONFIG_MAPS).await).contains(&"x"));
    let again = json!({"metadata": {"initializers": {"pending": [{"name": "a.example.com"}]}}});
    assert_eq!(server.merge(&path, again).await.code, 422, "an initialized object stays initialized");
}

#[tokio::test]
async fn an_initializer_rejects_an_object() {
    let server = initializing("configmaps", &["a.example.com"]).await;
    let mut map = config_map("x", json!({}));
    map["metadata"]["finalizers"] = json!(["example.com/f"]);
    let reject = async {
        server.first_event(&format!("{CONFIG_MAPS}?watch=1&{ALL}&fieldSelector=metadata.name=x")).await;
        let result = json!({"status": "Failure", "code": 403, "reason": "Forbidden", "message": "not here"});
        let patch = json!({"metadata": {"initializers": {"result": result}}});
        assert_eq!(server.merge(&format!("{CONFIG_MAPS}/x"), patch).await.code, 200);
    };
    let (made, ()) = tokio::join!(server.post(CONFIG_MAPS, map), reject);
    assert_eq!((made.code, &made.body["message"]), (403, &json!("not here")), "{}", made.body);
    assert_eq!(server.get(&format!("{CONFIG_MAPS}/x")).await.code, 404);
}

#[tokio::test]
async fn a_create_that_waits_too_long_leaves_the_object() {
    let server = initializing("configmaps", &["a.example.com"]).await;
    let made = server.post(&format!("{CONFIG_MAPS}?timeout=0s"), config_map("x", json!({}))).await;
    assert_eq!((made.code, &made.body["reason"]), (504, &json!("Timeout")), "{}", made.body);
    let found = server.get(&format!("{CONFIG_MAPS}/x")).await;
    assert_eq!(found.body["metadata"]["initializers"]["pending"][0]["name"], "a.example.com");
    let at_once = server.post(&format!("{CONFIG_MAPS}?{ALL}"), config_map("y", json!({}))).await;
    assert_eq!(at_once.code, 201, "{}", at_once.body);
    let dry = server.post(&format!("{CONFIG_MAPS}?dryRun=All"), config_map("z", json!({}))).await;
    assert_eq!(dry.code, 201, "{}", dry.body);
    let mut bypass = config_map("bypass", json!({}));
    bypass["metadata"]["initializers"] = json!({});
    let made = server.post(CONFIG_MAPS, bypass).await;
    assert_eq!(made.code, 201, "{}", made.body);
    assert!(made.body["metadata"]["initializers"].is_null());
    let deleted = server.call("DELETE", CONFIG_MAPS, "application/json", None).await;
    assert_eq!(deleted.code, 200, "{}", deleted.body);
    assert!(names(&server.get(&format!("{CONFIG_MAPS}?{ALL}")).await).is_empty());
}

#[tokio::test]
async fn only_users_with_the_verb_initialize_change_uninitialized_objects() {
    let server = initializing("configmaps", &["a.example.com"]).await;
    let roles = "/apis/rbac.authorization.k8s.io/v1/namespaces/default";
    for (name, verbs) in
        [("writer", json!(["create", "patch", "get"])), ("initializer", json!(["initialize", "patch"]))]
    {
        let rules = json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": verbs}]);
        server.post(&format!("{roles}/roles"), json!({"metadata": {"name": name}, "rules": rules})).await;
        let reference = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name});
        let subject = json!({"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": name});
        let binding = json!({"metadata": {"name": name}, "roleRef": reference, "subjects": [subject]});
        assert_eq!(server.post(&format!("{roles}/rolebindings"), binding).await.code, 201);
    }
    server.post(&format!("{CONFIG_MAPS}?{ALL}"), config_map("x", json!({}))).await;
    let patch = |user: &str, body: Value| {
        let request = Request::patch(format!("{CONFIG_MAPS}/x"));
        let request = request.header("content-type", "application/merge-patch+json");
        server.send(User::new(user, &[]), request.body(Full::from(body.to_string())).unwrap())
    };
    let done = json!({"metadata": {"initializers": null}});
    for body in [json!({"data": {"a": "b"}}), done.clone()] {
        let refused = patch("writer", body).await;
        assert_eq!(refused.code, 403, "{}", refused.body);
        let message = refused.body["message"].as_str().unwrap();
        assert!(message.contains("update to uninitialized resource denied"), "{message}");
    }
    let mut own = config_map("own", json!({}));
    own["metadata"]["initializers"] = json!({});
    let request = Request::post(CONFIG_MAPS).header("content-type", "application/json");
    let request = request.body(Full::from(own.to_string())).unwrap();
    let refused = server.send(User::new("writer", &[]), request).await;
    assert_eq!(refused.code, 403);
    let message = refused.body["message"].as_str().unwrap();
    assert!(message.contains("create with initializers denied"), "{message}");
    assert_eq!(patch("initializer", done).await.code, 200);
    assert_eq!(patch("writer", json!({"data": {"a": "b"}})).await.code, 200);
}

#[tokio::test]
async fn an_initializer_changes_the_spec_of_a_pod_but_not_its_status() {
    let server = initializing("*", &["a.example.com"]).await;
    let made = server.post(&format!("{PODS}?{ALL}"), pod("p")).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let path = format!("{PODS}/p");
    let status = server.merge(&format!("{path}/status"), json!({"status": {"phase": "Running"}})).await;
    assert_eq!(status.code, 422, "{}", status.body);
    let services = "/api/v1/namespaces/default/services";
    let service = json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}});
    assert_eq!(server.post(&format!("{services}?{ALL}"), service).await.code, 201);
    let through_status = json!({"metadata": {"initializers": null}, "status": {"loadBalancer": {}}});
    let answer = server.merge(&format!("{services}/s/status"), through_status).await;
    assert_eq!(answer.code, 200, "{}", answer.body);
    let pending = &server.get(&format!("{services}/s")).await.body["metadata"]["initializers"]["pending"];
    assert_eq!(pending[0]["name"], "a.example.com", "a subresource does not initialize");
    let resources = json!({"requests": {"cpu": "1"}});
    let containers = json!([{"name": "c", "image": "busybox"}, {"name": "sidecar", "image": "proxy", "resources": resources}]);
    let patch = json!({"metadata": {"initializers": null}, "spec": {"containers": containers}});
    let done = server.merge(&path, patch).await;
    assert_eq!(done.code, 200, "{}", done.body);
    assert_eq!(done.body["spec"]["containers"][1]["name"], "sidecar");
    assert_eq!(done.body["status"]["qosClass"], "Burstable");
    let late =
        server.merge(&path, json!({"spec": {"containers": [{"name": "c", "image": "busybox"}]}})).await;
    assert_eq!(late.code, 422, "{}", late.body);
}

#[tokio::test]
async fn the_spec_of_an_initializer_is_admitted_as_that_of_a_new_pod() {
    let server = initializing("pods", &["a.example.com"]).await;
    let labels = json!({"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "baseline"}}});
    assert_eq!(server.merge("/api/v1/namespaces/default", labels).await.code, 200);
    let class = json!({"metadata": {"name": "high"}, "value": 1000, "preemptionPolicy": "Never"});
    let made = server.post("/apis/scheduling.k8s.io/v1/priorityclasses", class).await;
    assert_eq!(made.code, 201, "{}", made.body);
    assert_eq!(server.post(&format!("{PODS}?{ALL}"), pod("p")).await.code, 201);
    let path = format!("{PODS}/p");
    for (spec, why) in [
        (json!({"hostNetwork": true}), "violates PodSecurity"),
        (json!({"serviceAccountName": "missing"}), "service account"),
        (json!({"runtimeClassName": "missing"}), "RuntimeClass"),
        (json!({"priority": 2_000_000_000}), "priority"),
    ] {
        let answer = server.merge(&path, json!({"spec": spec})).await;
        let message = answer.body["message"].as_str().unwrap_or_default();
        assert!(answer.code == 403 && message.contains(why), "{spec}: {}", answer.body);
    }
    let done = server.merge(&path, json!({"spec": {"priorityClassName": "high"}})).await;
    let spec = &done.body["spec"];
    assert_eq!(
        (&spec["priority"], &spec["preemptionPolicy"]),
        (&json!(1000), &json!("Never")),
        "{}",
        done.body
    );
}

#[tokio::test]
async fn a_scale_of_an_uninitialized_object_needs_the_verb_initialize() {
    let server = initializing("replicationcontrollers", &["a.example.com"]).await;
    let controllers = "/api/v1/namespaces/default/replicationcontrollers";
    let template =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let controller =
        json!({"metadata": {"name": "r"}, "spec": {"selector": {"a": "b"}, "template": template}});
    let made = server.post(&format!("{controllers}?{ALL}"), controller).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let group = "rbac.authorization.k8s.io";
    let roles = format!("/apis/{group}/v1/namespaces/default");
    let rules =
        json!([{"apiGroups": [""], "resources": ["replicationcontrollers/scale"], "verbs": ["patch"]}]);
    server.post(&format!("{roles}/roles"), json!({"metadata": {"name": "scaler"}, "rules": rules})).await;
    let reference = json!({"apiGroup": group, "kind": "Role", "name": "scaler"});
    let subject = json!({"kind": "User", "apiGroup": group, "name": "scaler"});
    let binding = json!({"metadata": {"name": "scaler"}, "roleRef": reference, "subjects": [subject]});
    assert_eq!(server.post(&format!("{roles}/rolebindings"), binding).await.code, 201);
    let path = format!("{controllers}/r/scale");
    let patch = json!({"spec": {"replicas": 3}});
    let request = Request::patch(&path).header("content-type", "application/merge-patch+json");
    let request = request.body(Full::from(patch.to_string())).unwrap();
    let refused = server.send(User::new("scaler", &[]), request).await;
    let message = refused.body["message"].as_str().unwrap_or_default();
    assert!(refused.code == 403 && message.contains("uninitialized"), "{}", refused.body);
    assert_eq!(server.merge(&path, patch).await.code, 200);
}

#[tokio::test]
async fn the_controllers_see_uninitialized_pods() {
    let server = initializing("pods", &["a.example.com"]).await;
    let request = Request::post(PODS).header("content-type", "application/json");
    let request = request.body(Full::from(pod("p").to_string())).unwrap();
    let made = server.send(User::controllers(), request).await;
    assert_eq!(made.code, 201, "{}", made.body);
    assert_eq!(names(&server.get_as(User::controllers(), PODS).await), ["p"]);
    assert!(names(&server.get(PODS).await).is_empty());
}

#[tokio::test]
async fn an_object_that_was_rejected_before_a_crash_is_removed() {
    let server = initializing("configmaps", &["a.example.com"]).await;
    let mut map = config_map("x", json!({}));
    map["metadata"]["initializers"] = json!({"result": {"status": "Failure", "message": "no"}});
    let refused = server.post(&format!("{CONFIG_MAPS}?{ALL}"), map.clone()).await;
    assert_eq!(refused.code, 422, "{}", refused.body);
    map["apiVersion"] = "v1".into();
    map["kind"] = "ConfigMap".into();
    map["metadata"]["namespace"] = "default".into();
    let kind = coracle_kinds::kind::by_resource("", "v1", "configmaps").unwrap();
    let key = crate::cache::key_of(kind, "default", "x");
    let stored = crate::write::commit(&server.api.state, kind, &key, Expect::Absent, Some(&map)).await;
    assert!(stored.is_ok_and(|stored| stored.is_some()));
    let selection = PluginSelection { enabled: vec!["Initializers".to_owned()], disabled: Vec::new() };
    let server = server.again_with(|config| config.admission_plugins = selection).await;
    let removed = async {
        while server.get(&format!("{CONFIG_MAPS}/x")).await.code != 404 {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), removed).await.expect("the object is removed");
    assert_eq!(server.get(&format!("{CONFIGURATIONS}/a")).await.code, 200, "configurations are stored");
}

#[tokio::test]
async fn a_container_without_requests_gets_those_of_its_image() {
    let server = with("InitialResources").await;
    let history = server.api.state.admission.usage_history.clone().unwrap();
    let now = u64::try_from(jiff::Timestamp::now().as_second()).unwrap();
    history.record("default", "busybox", ContainerUsage { cpu_millis: 6, memory_bytes: 1 << 20 }, now);
    let made = server.post(PODS, pod("p")).await;
    let container = &made.body["spec"]["containers"][0];
    assert_eq!(container["resources"]["requests"]["cpu"], "6m", "{}", made.body);
    let note = "Initial Resources plugin set: cpu, memory request for container c";
    assert_eq!(made.body["metadata"]["annotations"]["kubernetes.io/initial-resources"], note);
    assert_eq!(made.body["status"]["qosClass"], "Burstable");
}

#[tokio::test]
async fn server_side_apply_and_policies_keep_the_initializers() {
    let server = initializing("configmaps", &["a.example.com"]).await;
    let apply = |name: &str, metadata: Value, query: &str| {
        let mut config =
            json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"a": "b"}});
        config["metadata"]["name"] = name.into();
        let path = format!("{CONFIG_MAPS}/{name}?fieldManager=m&force=true&{query}");
        let request = Request::patch(path).header("content-type", "application/apply-patch+yaml");
        server.send(admin(), request.body(Full::from(config.to_string())).unwrap())
    };
    let made = apply("x", json!({}), ALL).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let late = apply("late", json!({}), "timeout=0s").await;
    assert_eq!(late.code, 504, "{}", late.body);
    let bypass = apply("bypass", json!({"initializers": {"pending": []}}), "timeout=0s").await;
    assert_eq!(bypass.code, 201, "{}", bypass.body);
    assert!(bypass.body["metadata"]["initializers"].is_null(), "{}", bypass.body);
    let group = "/apis/admissionregistration.k8s.io/v1";
    let rule = json!({"operations": ["UPDATE"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]});
    let expression = "Object{data: {'policy': 'yes'}}";
    let policy = json!({"metadata": {"name": "p"}, "spec": {
        "reinvocationPolicy": "Never", "matchConstraints": {"resourceRules": [rule]},
        "mutations": [{"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": expression}}]}});
    assert_eq!(server.post(&format!("{group}/mutatingadmissionpolicies"), policy).await.code, 201);
    let binding = json!({"metadata": {"name": "b"}, "spec": {"policyName": "p"}});
    assert_eq!(server.post(&format!("{group}/mutatingadmissionpolicybindings"), binding).await.code, 201);
    let applied = apply("x", json!({"labels": {"l": "1"}}), "").await;
    assert_eq!((applied.code, &applied.body["data"]["policy"]), (200, &json!("yes")), "{}", applied.body);
    assert_eq!(applied.body["metadata"]["initializers"]["pending"][0]["name"], "a.example.com");
}

#[tokio::test]
async fn quotas_count_what_an_initializer_adds() {
    let server = initializing("pods", &["a.example.com"]).await;
    let quota = json!({"metadata": {"name": "q"}, "spec": {"hard": {"requests.cpu": "1"}}});
    assert_eq!(server.post("/api/v1/namespaces/default/resourcequotas", quota).await.code, 201);
    let containers =
        |cpu: &str| json!([{"name": "c", "image": "busybox", "resources": {"requests": {"cpu": cpu}}}]);
    let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": containers("500m")}});
    let made = server.post(&format!("{PODS}?{ALL}"), pod).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let patch =
        |cpu: &str| json!({"metadata": {"initializers": null}, "spec": {"containers": containers(cpu)}});
    let refused = server.merge(&format!("{PODS}/p"), patch("2")).await;
    assert_eq!(refused.code, 403, "{}", refused.body);
    assert_eq!(server.merge(&format!("{PODS}/p"), patch("1")).await.code, 200);
}

#[tokio::test]
async fn an_uninitialized_binding_gives_no_rights() {
    let server = with("Initializers").await;
    let group = "rbac.authorization.k8s.io";
    let rule = json!({"apiGroups": [group], "apiVersions": ["v1"], "resources": ["clusterrolebindings"]});
    let initializers = json!([{"name": "a.example.com", "rules": [rule]}]);
    server.post(CONFIGURATIONS, json!({"metadata": {"name": "a"}, "initializers": initializers})).await;
    let rules = json!([{"apiGroups": [""], "resources": ["configmaps"], "verbs": ["list"]}]);
    let role = json!({"metadata": {"name": "reader"}, "rules": rules});
    assert_eq!(server.post(&format!("/apis/{group}/v1/clusterroles"), role).await.code, 201);
    let bindings = format!("/apis/{group}/v1/clusterrolebindings");
    let binding = json!({"metadata": {"name": "b"},
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "reader"},
        "subjects": [{"kind": "User", "apiGroup": group, "name": "ann"}]});
    let made = server.post(&format!("{bindings}?{ALL}"), binding).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let ann = || User::new("ann", &[]);
    assert_eq!(server.get_as(ann(), CONFIG_MAPS).await.code, 403);
    let done = server.merge(&format!("{bindings}/b"), json!({"metadata": {"initializers": null}})).await;
    assert_eq!(done.code, 200, "{}", done.body);
    assert_eq!(server.get_as(ann(), CONFIG_MAPS).await.code, 200);
}
