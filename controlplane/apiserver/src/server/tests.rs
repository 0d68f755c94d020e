//! Tests of the API server by requests in process, on a real store in a temporary directory.

use std::{sync::Arc, time::Duration};

use coracle_store::{Embedded, EmbeddedOptions, Store};
use coracle_testing::{eventually_async, until};
use http_body_util::{BodyExt as _, Full};
use rcgen::KeyPair;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use super::*;
use crate::{
    ApiserverConfig, AuditConfig, AuthorizationConfig, FrontProxy, InitialResourcesOptions, KubeletTls,
    PluginSelection, RuntimeConfig, ServiceRanges,
};

mod access;
mod admission_plugins;
mod aggregation;
mod answers;
mod audit;
mod custom_resources;
mod devices;
mod disruption;
mod flow_control;
mod impersonation;
mod initializers;
mod joining;
mod later_fields;
mod list;
mod load;
mod metrics;
mod namespace_bytes;
mod options;
mod pod_security;
mod policy;
mod policy_status;
mod quota;
mod rbac;
mod registry;
mod resize;
mod runtime_config;
mod services;
mod serving;
mod terminating;
mod unreadable;
mod upstream_metrics;
mod webhook;
mod webhook_faults;

/// A server and its directory.
struct Fixture {
    api: Apiserver,
    directory: tempfile::TempDir,
}

struct Answer {
    code: u16,
    body: Value,
    headers: HeaderMap,
}

impl Fixture {
    async fn new() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let api = open(directory.path()).await;
        let fixture = Self { api, directory };
        let account = json!({"metadata": {"name": "default"}});
        assert_eq!(fixture.post("/api/v1/namespaces/default/serviceaccounts", account).await.code, 201);
        fixture
    }

    /// The server after a restart.
    async fn again(self) -> Self {
        self.again_with(|_config| {}).await
    }

    /// Restarts with another configuration.
    async fn again_with(self, configure: impl FnOnce(&mut ApiserverConfig)) -> Self {
        let (store, directory) = self.close().await;
        Self { api: open_on(Arc::new(store), directory.path(), configure).await, directory }
    }

    /// Ends the server. Returns its store and its directory, which no task of the server uses any more.
    async fn close(self) -> (Embedded, tempfile::TempDir) {
        let Self { api, directory } = self;
        let users = Arc::downgrade(&api.state.store);
        drop(api);
        let path = directory.path().join("store");
        // The server's tasks need this thread to end. Opening a store in use would block the thread for 200 ms.
        until("the former server's tasks end", 20, || users.strong_count() == 0).await;
        let released = async || Embedded::open(&path, EmbeddedOptions::default()).ok();
        let store = eventually_async("the former server releases its store", 20, released).await;
        (store, directory)
    }

    async fn send(&self, user: User, request: Request<Full<Bytes>>) -> Answer {
        let answer = self.api.handle(request, Some(user)).await;
        let (code, headers) = (answer.status().as_u16(), answer.headers().clone());
        let bytes = answer.into_body().collect().await.unwrap().to_bytes();
        let text = || Value::String(String::from_utf8_lossy(&bytes).into_owned());
        Answer { code, body: serde_json::from_slice(&bytes).unwrap_or_else(|_| text()), headers }
    }

    async fn call(&self, method: &str, path: &str, media: &str, body: Option<Value>) -> Answer {
        let request = Request::builder().method(method).uri(path).header("content-type", media);
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        self.send(admin(), request.body(Full::new(body.into())).unwrap()).await
    }

    async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, "", None).await
    }

    async fn post(&self, path: &str, body: Value) -> Answer {
        self.call("POST", path, "application/json", Some(body)).await
    }

    async fn put(&self, path: &str, body: Value) -> Answer {
        self.call("PUT", path, "application/json", Some(body)).await
    }

    async fn merge(&self, path: &str, body: Value) -> Answer {
        self.call("PATCH", path, "application/merge-patch+json", Some(body)).await
    }

    async fn delete(&self, path: &str, options: Value) -> Answer {
        self.call("DELETE", path, "application/json", Some(options)).await
    }

    async fn get_as(&self, user: User, path: &str) -> Answer {
        self.send(user, Request::get(path).body(Full::default()).unwrap()).await
    }

    /// Waits for the first event of a watch.
    async fn first_event(&self, path: &str) -> Value {
        let request = Request::get(path).body(Full::default()).unwrap();
        let mut events = self.api.handle(request, Some(admin())).await.into_body();
        let first = tokio::time::timeout(std::time::Duration::from_secs(120), events.frame()).await;
        let first = first.expect("an event in time").expect("an event").unwrap().into_data().unwrap();
        serde_json::from_slice(&first).unwrap()
    }

    /// The events of a watch for the existing objects. The watch has no time limit that a slow webhook could exceed.
    async fn existing(&self, path: &str, selector: &str) -> Vec<Value> {
        let initial = "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
        let request = Request::get(format!("{path}?watch=1&{initial}&fieldSelector={selector}"));
        let request = request.body(Full::default()).unwrap();
        let mut frames = self.api.handle(request, Some(admin())).await.into_body();
        let mut events = Vec::new();
        loop {
            let next = tokio::time::timeout(Duration::from_secs(120), frames.frame()).await;
            let next = next.expect("an event in time").expect("an event").unwrap().into_data().unwrap();
            let event: Value = serde_json::from_slice(&next).unwrap();
            // The bookmark follows after the last object.
            if event["type"] == "BOOKMARK" {
                return events;
            }
            events.push(event);
        }
    }

    /// The events of a watch that ends after a few seconds.
    async fn watch(&self, path: &str) -> Vec<Value> {
        let answer = self.get(&format!("{path}&watch=1&timeoutSeconds=4")).await;
        assert_eq!(answer.code, 200, "{}", answer.body);
        match &answer.body {
            Value::String(lines) => lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect(),
            one => vec![one.clone()],
        }
    }
}

async fn open(directory: &std::path::Path) -> Apiserver {
    open_with(directory, |_config| {}).await
}

async fn open_with(directory: &std::path::Path, configure: impl FnOnce(&mut ApiserverConfig)) -> Apiserver {
    let store = Embedded::open(&directory.join("store"), EmbeddedOptions::default()).unwrap();
    open_on(Arc::new(store), directory, configure).await
}

async fn open_on(
    store: Arc<dyn Store>,
    directory: &std::path::Path,
    configure: impl FnOnce(&mut ApiserverConfig),
) -> Apiserver {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let kubelet = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    let token_file = directory.join("tokens");
    std::fs::write(&token_file, "secret,ann,7,system:masters\nof-eve,eve,8\n").unwrap();
    let mut config = ApiserverConfig {
        advertise: "192.0.2.1:6443".parse().unwrap(),
        service_ranges: ServiceRanges::new("10.43.0.0/16".parse().unwrap(), None),
        service_account_key: KeyPair::generate().unwrap().serialize_der(),
        token_signer: None,
        issuer: "https://kubernetes.default.svc".to_owned(),
        password_file: None,
        token_file: Some(token_file),
        authentication_file: None,
        oidc: None,
        token_webhook: None,
        request_header: None,
        anonymous_auth: true,
        authorization: AuthorizationConfig::default(),
        kubelet: KubeletTls(Arc::new(kubelet)),
        admission_file: None,
        admission_plugins: PluginSelection::default(),
        initial_resources: InitialResourcesOptions::default(),
        runtime_config: RuntimeConfig::default(),
        features: crate::ServerFeatures::default(),
        options: crate::ServerOptions::default(),
        audit: None,
        front_proxy: FrontProxy::default(),
        request_timeout: in_flight::REQUEST_TIMEOUT,
        max_in_flight: in_flight::MAX_IN_FLIGHT,
        flags: [("listen".to_owned(), "0.0.0.0:6443".to_owned())].into(),
        component_metrics: None,
        encryption_health: None,
        own_components: vec!["scheduler"],
        shutdown_delay: std::time::Duration::ZERO,
    };
    configure(&mut config);
    Apiserver::open(config, store, CancellationToken::new()).await.unwrap()
}

fn admin() -> User {
    User::new("admin", &["system:masters"])
}

fn node(name: &str) -> User {
    User::new(&format!("system:node:{name}"), &["system:nodes"])
}

fn config_map(name: &str, labels: Value) -> Value {
    json!({"metadata": {"name": name, "labels": labels}, "data": {"key": name}})
}

fn pod(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "c", "image": "busybox"}]}})
}

const CONFIG_MAPS: &str = "/api/v1/namespaces/default/configmaps";
const PODS: &str = "/api/v1/namespaces/default/pods";

#[tokio::test]
async fn every_cluster_has_its_namespaces_and_its_own_service() {
    let server = Fixture::new().await;
    for name in ["default", "kube-system", "kube-public", "kube-node-lease"] {
        let found = server.get(&format!("/api/v1/namespaces/{name}")).await;
        assert_eq!(found.body["status"]["phase"], "Active");
        assert_eq!(found.body["metadata"]["labels"]["kubernetes.io/metadata.name"], name);
    }
    let service = server.get("/api/v1/namespaces/default/services/kubernetes").await;
    assert_eq!(service.body["spec"]["clusterIP"], "10.43.0.1");
    let endpoints = server.get("/api/v1/namespaces/default/endpoints/kubernetes").await;
    assert_eq!(endpoints.body["subsets"][0]["addresses"][0]["ip"], "192.0.2.1");
}

#[tokio::test]
async fn objects_are_created_once_and_outlive_the_server() {
    let server = Fixture::new().await;
    let made = server.post(CONFIG_MAPS, config_map("a", json!({}))).await;
    assert_eq!(made.code, 201);
    assert!(made.body["metadata"]["uid"].is_string() && made.body["metadata"]["resourceVersion"].is_string());
    let again = server.post(CONFIG_MAPS, config_map("a", json!({}))).await;
    assert_eq!((again.code, &again.body["reason"]), (409, &json!("AlreadyExists")));
    assert_eq!(again.body["message"], "configmaps \"a\" already exists");
    let missing = server.get(&format!("{CONFIG_MAPS}/b")).await;
    assert_eq!(missing.body["message"], "configmaps \"b\" not found");
    assert_eq!(missing.body["details"], json!({"name": "b", "kind": "configmaps"}));
    let server = server.again().await;
    let found = server.get(&format!("{CONFIG_MAPS}/a")).await;
    assert_eq!(found.body, made.body);
}

#[tokio::test]
async fn generated_names_take_the_prefix() {
    let server = Fixture::new().await;
    let made = server.post(CONFIG_MAPS, json!({"metadata": {"generateName": "gen-"}})).await;
    let name = made.body["metadata"]["name"].as_str().unwrap();
    assert!(name.starts_with("gen-") && name.len() == 9, "{name}");
    let spec = json!({"serviceAccountName": "nobody", "containers": [{"name": "c", "image": "i"}]});
    let body = json!({"metadata": {"generateName": "gen-"}, "spec": spec});
    let refused = server.post("/api/v1/namespaces/default/pods", body).await;
    assert_eq!((refused.code, &refused.body["details"]["name"]), (403, &json!("gen-")));
    let long = server.post("/api/v1/namespaces", json!({"metadata": {"generateName": "n".repeat(63)}})).await;
    let name = long.body["metadata"]["name"].as_str().unwrap();
    assert!(name.starts_with(&"n".repeat(58)) && name.len() == 63, "{name}");
    let dotted = server.post(CONFIG_MAPS, json!({"metadata": {"generateName": "gen."}})).await;
    assert_eq!(dotted.code, 422);
    let refused = server.post(CONFIG_MAPS, json!({"metadata": {"generateName": "Gen_"}})).await;
    assert!(refused.body["message"].as_str().unwrap().starts_with("ConfigMap \"Gen_"), "{}", refused.body);
    assert_eq!(refused.code, 422);
    let unnamed = server.post(CONFIG_MAPS, json!({"metadata": {}})).await;
    assert_eq!((unnamed.code, &unnamed.body["reason"]), (422, &json!("Invalid")));
}

#[tokio::test]
async fn ephemeral_containers_are_added_by_their_subresource_and_stay() {
    let server = Fixture::new().await;
    let path = "/api/v1/namespaces/default/pods/p";
    let sub = format!("{path}/ephemeralcontainers");
    server.post("/api/v1/namespaces/default/pods", pod("p")).await;
    let debug = json!({"name": "debug", "image": "busybox"});
    let wanted = json!({"spec": {"ephemeralContainers": [debug], "hostNetwork": true}});
    let answer = server.call("PATCH", &sub, "application/strategic-merge-patch+json", Some(wanted)).await;
    assert_eq!(answer.code, 200, "{}", answer.body);
    let made = &server.get(path).await.body["spec"];
    assert_eq!(made["ephemeralContainers"][0]["terminationMessagePolicy"], "File");
    assert!(made["hostNetwork"].is_null(), "{made}");
    assert_eq!(server.get(&sub).await.body["spec"], *made);
    let removed = server.merge(&sub, json!({"spec": {"ephemeralContainers": []}})).await;
    assert_eq!((removed.code, &removed.body["reason"]), (422, &json!("Invalid")));
    let mut whole = server.get(path).await.body;
    whole["spec"]["ephemeralContainers"][0]["image"] = "other".into();
    assert_eq!(server.put(&sub, whole.clone()).await.code, 422);
    assert_eq!(server.put(path, whole).await.code, 422);
}

#[tokio::test]
async fn an_update_from_a_stale_read_is_refused_and_one_without_effect_costs_nothing() {
    let server = Fixture::new().await;
    let first = server.post(CONFIG_MAPS, config_map("a", json!({}))).await.body;
    let path = format!("{CONFIG_MAPS}/a");
    let same = server.put(&path, first.clone()).await;
    assert_eq!((same.code, &same.body), (200, &first));
    let mut changed = first.clone();
    changed["data"]["key"] = "new".into();
    let second = server.put(&path, changed.clone()).await;
    assert_eq!((second.code, &second.body["data"]["key"]), (200, &json!("new")));
    let stale = server.put(&path, first).await;
    assert_eq!((stale.code, &stale.body["reason"]), (409, &json!("Conflict")));
    assert_eq!(
        stale.body["message"],
        "Operation cannot be fulfilled on configmaps \"a\": the object has been modified; \
         please apply your changes to the latest version and try again"
    );
}

#[tokio::test]
async fn patches_change_what_they_name() {
    let server = Fixture::new().await;
    server.post(CONFIG_MAPS, config_map("a", json!({"x": "1"}))).await;
    let path = format!("{CONFIG_MAPS}/a");
    let merged = server.merge(&path, json!({"metadata": {"labels": {"x": null, "y": "2"}}})).await;
    assert_eq!(merged.body["metadata"]["labels"], json!({"y": "2"}));
    let operations = json!([{"op": "replace", "path": "/data/key", "value": "z"}]);
    let patched = server.call("PATCH", &path, "application/json-patch+json", Some(operations)).await;
    assert_eq!(patched.body["data"]["key"], "z");
    let dry = server.merge(&format!("{path}?dryRun=All"), json!({"data": {"key": "dry"}})).await;
    assert_eq!(dry.body["data"]["key"], "dry");
    assert_eq!(server.get(&path).await.body["data"]["key"], "z");
    assert_eq!(server.merge(&format!("{CONFIG_MAPS}/none"), json!({})).await.code, 404);
}

#[tokio::test]
async fn server_side_apply_creates_merges_and_reports_conflicts() {
    const APPLY: &str = "application/apply-patch+yaml";
    let server = Fixture::new().await;
    let path = format!("{CONFIG_MAPS}/a");
    let config = |data: Value| {
        Some(json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}, "data": data}))
    };
    let nameless = server.call("PATCH", &path, APPLY, config(json!({}))).await;
    assert_eq!((nameless.code, &nameless.body["reason"]), (422, &json!("Invalid")));
    let by = |manager: &str| format!("{path}?fieldManager={manager}");
    let created = server.call("PATCH", &by("one"), APPLY, config(json!({"x": "1", "y": "1"}))).await;
    assert_eq!((created.code, &created.body["metadata"]["name"]), (201, &json!("a")));
    let entry = &created.body["metadata"]["managedFields"][0];
    assert_eq!((&entry["manager"], &entry["operation"]), (&json!("one"), &json!("Apply")));
    assert_eq!(entry["fieldsV1"], json!({"f:data": {"f:x": {}, "f:y": {}}}));
    let refused = server.call("PATCH", &by("two"), APPLY, config(json!({"x": "2"}))).await;
    assert_eq!((refused.code, &refused.body["reason"]), (409, &json!("Conflict")));
    let cause = &refused.body["details"]["causes"][0];
    assert_eq!((&cause["reason"], &cause["field"]), (&json!("FieldManagerConflict"), &json!(".data.x")));
    let forced =
        server.call("PATCH", &format!("{}&force=true", by("two")), APPLY, config(json!({"x": "2"}))).await;
    assert_eq!((forced.code, &forced.body["data"]), (200, &json!({"x": "2", "y": "1"})));
    let omitted = server.call("PATCH", &by("one"), APPLY, config(json!({"z": "1"}))).await;
    assert_eq!(omitted.body["data"], json!({"x": "2", "z": "1"}));
    // A merge patch records its own manager; `force` belongs to apply alone.
    let patched = server.merge(&by("three"), json!({"data": {"p": "1"}})).await;
    let entries = patched.body["metadata"]["managedFields"].as_array().unwrap();
    let own = entries.iter().find(|entry| entry["manager"] == "three").unwrap();
    assert_eq!((&own["operation"], &own["fieldsV1"]), (&json!("Update"), &json!({"f:data": {"f:p": {}}})));
    assert_eq!(server.merge(&format!("{}&force=true", by("three")), json!({})).await.code, 422);
    // An update that does not mention managedFields keeps them, and one empty entry clears them.
    let cleared = server.merge(&path, json!({"metadata": {"managedFields": [{}]}})).await;
    assert!(cleared.body["metadata"]["managedFields"].is_null(), "{}", cleared.body);
    let wrong = Some(json!({"apiVersion": "v2", "kind": "ConfigMap"}));
    assert_eq!(server.call("PATCH", &by("one"), APPLY, wrong).await.code, 400);
}

#[tokio::test]
async fn invalid_bodies_are_refused_with_the_place_of_the_error_and_nothing_is_stored() {
    let server = Fixture::new().await;
    let unknown = json!({"metadata": {"name": "a"}, "dat": {}});
    let strict = server.post(&format!("{CONFIG_MAPS}?fieldValidation=Strict"), unknown.clone()).await;
    assert_eq!(strict.code, 400);
    assert!(strict.body["message"].as_str().unwrap().contains("unknown field \"dat\""));
    assert_eq!(server.get(&format!("{CONFIG_MAPS}/a")).await.code, 404);
    let warned = server.post(CONFIG_MAPS, unknown).await;
    assert_eq!((warned.code, &warned.body["dat"]), (201, &Value::Null));
    let warning = warned.headers.get("warning").unwrap().to_str().unwrap();
    assert!(warning.starts_with("299 - \"") && warning.contains("dat"), "{warning}");
    let patched = server.merge(&format!("{CONFIG_MAPS}/a?fieldValidation=Strict"), json!({"dat": {}})).await;
    let message = " \"\" is invalid: patch: Invalid value: strict decoding error: unknown field \"dat\"";
    assert_eq!((patched.code, &patched.body["message"]), (422, &json!(message)));
    let nameless = server.post(CONFIG_MAPS, json!({"metadata": {}})).await;
    assert_eq!((nameless.code, &nameless.body["reason"]), (422, &json!("Invalid")));
    let elsewhere = json!({"metadata": {"name": "x", "namespace": "other"}});
    assert_eq!(server.post(CONFIG_MAPS, elsewhere).await.code, 400);
    let wrong_kind = server.post(CONFIG_MAPS, json!({"kind": "Pod", "metadata": {"name": "x"}})).await;
    assert_eq!(wrong_kind.code, 400);
}

#[tokio::test]
async fn deprecated_kinds_are_served_with_a_warning() {
    let server = Fixture::new().await;
    let endpoints = server.get("/api/v1/namespaces/default/endpoints").await;
    let text = "299 - \"v1 Endpoints is deprecated in v1.33+; use discovery.k8s.io/v1 EndpointSlice\"";
    assert_eq!(endpoints.headers.get("warning").unwrap(), text);
    assert!(server.get(CONFIG_MAPS).await.headers.get("warning").is_none());
}

#[tokio::test]
async fn a_bound_pod_ends_gracefully_and_an_unbound_one_at_once() {
    let server = Fixture::new().await;
    assert_eq!(server.post(PODS, pod("waiting")).await.code, 201);
    let gone = server.delete(&format!("{PODS}/waiting"), json!({})).await;
    assert_eq!((gone.code, &gone.body["metadata"]["name"]), (200, &json!("waiting")));
    assert_eq!(server.get(&format!("{PODS}/waiting")).await.code, 404);
    let made = server.post(PODS, pod("bound")).await.body;
    assert_eq!(made["spec"]["serviceAccountName"], "default");
    let binding = json!({"metadata": {"name": "bound"}, "target": {"kind": "Node", "name": "n1"}});
    assert_eq!(server.post(&format!("{PODS}/bound/binding"), binding.clone()).await.code, 201);
    assert_eq!(server.post(&format!("{PODS}/bound/binding"), binding).await.code, 409);
    let path = format!("{PODS}/bound");
    let marked = server.delete(&path, json!({})).await;
    assert_eq!(marked.body["metadata"]["deletionGracePeriodSeconds"], 30);
    let again = server.delete(&path, json!({"gracePeriodSeconds": 60})).await;
    assert_eq!(again.body["metadata"]["deletionTimestamp"], marked.body["metadata"]["deletionTimestamp"]);
    let wrong = json!({"gracePeriodSeconds": 0, "preconditions": {"uid": "other"}});
    assert_eq!(server.delete(&path, wrong).await.code, 409);
    let right = json!({"gracePeriodSeconds": 0, "preconditions": {"uid": made["metadata"]["uid"]}});
    assert_eq!(server.delete(&path, right).await.code, 200);
    assert_eq!(server.get(&path).await.code, 404);
}

#[tokio::test]
async fn finalizers_hold_an_object_until_the_last_is_gone() {
    let server = Fixture::new().await;
    let path = format!("{CONFIG_MAPS}/a");
    let held = json!({"metadata": {"name": "a", "finalizers": ["example.com/x"]}});
    server.post(CONFIG_MAPS, held).await;
    let marked = server.delete(&path, json!({"propagationPolicy": "Foreground"})).await;
    assert!(marked.body["metadata"]["deletionTimestamp"].is_string());
    assert_eq!(marked.body["metadata"]["finalizers"], json!(["example.com/x", "foregroundDeletion"]));
    assert_eq!(server.merge(&path, json!({"metadata": {"finalizers": null}})).await.code, 200);
    assert_eq!(server.get(&path).await.code, 404);
}

#[tokio::test]
async fn a_namespace_is_removed_with_its_finalizer_and_accepts_no_objects_before() {
    let server = Fixture::new().await;
    let space = "/api/v1/namespaces/x";
    server.post("/api/v1/namespaces", json!({"metadata": {"name": "x"}})).await;
    assert_eq!(server.delete("/api/v1/namespaces/default", json!({})).await.code, 403);
    let marked = server.delete(space, json!({})).await;
    assert_eq!(marked.body["status"]["phase"], "Terminating");
    let refused = server.post(&format!("{space}/configmaps"), config_map("a", json!({}))).await;
    assert_eq!(refused.body["details"]["causes"][0]["reason"], "NamespaceTerminating");
    let mut done = marked.body.clone();
    done["spec"]["finalizers"] = json!(["plain"]);
    assert_eq!(server.put(&format!("{space}/finalize"), done.clone()).await.code, 422);
    done["spec"]["finalizers"] = json!([]);
    assert_eq!(server.put(&format!("{space}/finalize"), done).await.code, 200);
    assert_eq!(server.get(space).await.code, 404);
    let nowhere = server.post(&format!("{space}/configmaps"), config_map("a", json!({}))).await;
    assert_eq!(nowhere.body["message"], "namespaces \"x\" not found");
}

#[tokio::test]
async fn scale_and_status_change_their_part_only() {
    let server = Fixture::new().await;
    let path = "/apis/apps/v1/namespaces/default/deployments";
    let template =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let spec = json!({"selector": {"matchLabels": {"a": "b"}}, "template": template});
    let made = server.post(path, json!({"metadata": {"name": "d"}, "spec": spec})).await.body;
    assert_eq!((&made["spec"]["replicas"], &made["metadata"]["generation"]), (&json!(1), &json!(1)));
    let scaled = server.merge(&format!("{path}/d/scale"), json!({"spec": {"replicas": 4}})).await;
    assert_eq!((&scaled.body["kind"], &scaled.body["spec"]["replicas"]), (&json!("Scale"), &json!(4)));
    let status = json!({"spec": {"replicas": 9}, "status": {"replicas": 2, "observedGeneration": 2}});
    let answer = server.merge(&format!("{path}/d/status"), status).await.body;
    assert_eq!((&answer["spec"]["replicas"], &answer["status"]["replicas"]), (&json!(4), &json!(2)));
    assert_eq!(answer["metadata"]["generation"], 2);
    let main = server.merge(&format!("{path}/d"), json!({"status": {"replicas": 7}})).await.body;
    assert_eq!(main["status"]["replicas"], 2);
}

#[tokio::test]
async fn clients_that_request_tables_get_them() {
    let server = Fixture::new().await;
    server.post(PODS, pod("p")).await;
    let accept = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json";
    let request = Request::get(PODS).header("accept", accept).body(Full::default()).unwrap();
    let table = server.send(admin(), request).await.body;
    assert_eq!(table["kind"], "Table");
    assert_eq!(table["rows"][0]["cells"][0], "p");
    assert_eq!(table["rows"][0]["object"]["kind"], "PartialObjectMetadata");
}

#[tokio::test]
async fn documents_are_not_sent_again_to_clients_that_have_them() {
    let server = Fixture::new().await;
    let accept = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList";
    let request = || Request::get("/apis").header("accept", accept);
    let first = server.send(admin(), request().body(Full::default()).unwrap()).await;
    assert_eq!(first.body["kind"], "APIGroupDiscoveryList");
    let tag = first.headers.get("etag").unwrap();
    let again = request().header("if-none-match", tag).body(Full::default()).unwrap();
    let again = server.send(admin(), again).await;
    assert_eq!((again.code, again.headers.get("content-type")), (304, None));
    let root = server.get("/openapi/v3").await.body;
    let url = root["paths"]["api/v1"]["serverRelativeURL"].as_str().unwrap();
    let document = server.get(url).await;
    assert_eq!(document.headers.get("cache-control").unwrap(), "public, immutable");
    assert!(document.body["paths"].is_object());
}

#[tokio::test]
async fn services_get_addresses_and_keep_them() {
    let server = Fixture::new().await;
    let path = "/api/v1/namespaces/default/services";
    let spec = json!({"type": "NodePort", "ports": [{"port": 80}]});
    let made = server.post(path, json!({"metadata": {"name": "s"}, "spec": spec})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let (ip, port) = (&made.body["spec"]["clusterIP"], &made.body["spec"]["ports"][0]["nodePort"]);
    assert!(ip.as_str().unwrap().starts_with("10.43."));
    assert!((30000..=32767).contains(&port.as_u64().unwrap()));
    let spec = json!({"type": "NodePort", "ports": [{"port": 80}], "selector": {"a": "b"}});
    let updated = server.put(&format!("{path}/s"), json!({"metadata": {"name": "s"}, "spec": spec})).await;
    assert_eq!(
        (&updated.body["spec"]["clusterIP"], &updated.body["spec"]["ports"][0]["nodePort"]),
        (ip, port)
    );
    let taken = json!({"clusterIP": ip, "ports": [{"port": 80}]});
    let refused = server.post(path, json!({"metadata": {"name": "t"}, "spec": taken})).await;
    assert_eq!((refused.code, &refused.body["reason"]), (422, &json!("Invalid")));
}
