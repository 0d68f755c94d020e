//! Limits on the duration and size of requests.

use std::convert::Infallible;

use coracle_connections::{ConnectionPermit, Connections, Limits};
use futures::FutureExt as _;
use http_body::Frame;
use http_body_util::StreamBody;
use tokio::io::AsyncReadExt as _;

use super::*;
use crate::{
    cache::{key_of, parses},
    field_manager::Writer,
    offload,
    write::{self, Part, Target},
};

/// Users with all permissions, who are not exempt from limits. Tests that occupy the slots of one user have different
/// users, because all tests share the slots.
const EVE: &str = "load-eve";
const ANN: &str = "load-ann";

impl Fixture {
    async fn by(&self, user: &str, [method, path, media]: [&str; 3], body: &str) -> Answer {
        let request = Request::builder().method(method).uri(path).header("content-type", media);
        let request = request.body(Full::new(Bytes::from(body.to_owned()))).unwrap();
        self.send(User::new(user, &[]), request).await
    }

    async fn permit_everything(&self, user: &str) {
        let group = "rbac.authorization.k8s.io";
        let binding = json!({"metadata": {"name": user},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": "cluster-admin"},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user}]});
        let path = format!("/apis/{group}/v1/clusterrolebindings");
        assert_eq!(self.post(&path, binding).await.code, 201);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_with_slow_bodies_are_refused_while_too_many_wait_for_a_slot() {
    let fixture = Fixture::new().await;
    fixture.permit_everything(EVE).await;
    let pod =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let deployment = json!({"metadata": {"name": "d"},
        "spec": {"selector": {"matchLabels": {"a": "b"}}, "template": pod}});
    assert_eq!(fixture.post("/apis/apps/v1/namespaces/default/deployments", deployment).await.code, 201);
    let (maps, map) = ("/api/v1/namespaces/default/configmaps", "/api/v1/namespaces/default/configmaps/a");
    let applied = "/api/v1/namespaces/default/configmaps/a?fieldManager=m";
    let scale = "/apis/apps/v1/namespaces/default/deployments/d/scale";
    let applied_scale = "/apis/apps/v1/namespaces/default/deployments/d/scale?fieldManager=m";
    // `is_slow_yaml` counts the brackets, although they are in a comment.
    let slow = |text: &str| format!("{text}\n# {}\n", "[".repeat(800));
    let config_map = slow("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndata: {b: c}");
    let replicas = slow("apiVersion: autoscaling/v1\nkind: Scale\nmetadata: {name: d}\nspec: {replicas: 2}");
    let long_patch = json!({"data": {"x": "x".repeat(40 << 10)}}).to_string();
    let add = r#"[{"op": "add", "path": "/data/a", "value": "b"}]"#.to_owned();
    let set = r#"[{"op": "add", "path": "/spec/replicas", "value": 2}]"#.to_owned();
    let requests = [
        (["POST", maps, "application/yaml"], config_map.clone(), 201),
        (["PUT", map, "application/yaml"], config_map.clone(), 200),
        (["PATCH", map, "application/json-patch+json"], add, 200),
        (["PATCH", map, "application/merge-patch+json"], long_patch, 200),
        (["PATCH", applied, "application/apply-patch+yaml"], config_map, 200),
        (["PUT", scale, "application/yaml"], replicas.clone(), 200),
        (["PATCH", scale, "application/json-patch+json"], set, 200),
        (["PATCH", applied_scale, "application/apply-patch+yaml"], replicas, 200),
        (["DELETE", map, "application/yaml"], slow("apiVersion: v1\nkind: DeleteOptions"), 200),
    ];
    for (request, body, code) in requests {
        let occupied = offload::occupy_bodies(EVE).await;
        let refused = fixture.by(EVE, request, &body).await;
        assert_eq!(refused.code, 429, "{request:?}: {}", refused.body);
        assert_eq!(refused.headers["retry-after"], "1");
        drop(occupied);
        let answer = fixture.by(EVE, request, &body).await;
        assert_eq!(answer.code, code, "{request:?}: {}", answer.body);
    }
}

/// In an earlier version, a patch read the object before it waited, and then got 409 from its commit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_patch_that_has_waited_for_its_slot_changes_the_current_object() {
    let fixture = Fixture::new().await;
    fixture.permit_everything(ANN).await;
    assert_eq!(fixture.post(CONFIG_MAPS, config_map("a", json!({}))).await.code, 201);
    let map = "/api/v1/namespaces/default/configmaps/a";
    let patch = ["PATCH", map, "application/json-patch+json"];
    // The authorizer parses the roles of the user at the first request.
    assert_eq!(fixture.by(ANN, patch, "[]").await.code, 200);
    let slot = request_owner::scope(ANN.into(), offload::body_slot(true)).await.unwrap();
    assert!(slot.is_some(), "the patch does not wait");
    let before = parses::so_far();
    let operations = r#"[{"op": "test", "path": "/data/key", "value": "new"},
        {"op": "add", "path": "/data/other", "value": "b"}]"#;
    let patching = fixture.by(ANN, patch, operations);
    let changing = async {
        eventually_async("the patch to wait", 30, async || offload::waiting_bodies(ANN) == 1).await;
        assert_eq!(parses::so_far(), before, "the waiting patch has a tree of the object in memory");
        let changed = fixture.merge(map, json!({"data": {"key": "new"}})).await;
        assert_eq!(changed.code, 200, "{}", changed.body);
        drop(slot);
    };
    let (patched, ()) = tokio::join!(patching, changing);
    assert_eq!(patched.code, 200, "{}", patched.body);
    assert_eq!(patched.body["data"], json!({"key": "new", "other": "b"}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_json_patches_of_an_object_all_succeed() {
    let fixture = Fixture::new().await;
    assert_eq!(fixture.post(CONFIG_MAPS, config_map("a", json!({}))).await.code, 201);
    let map = format!("{CONFIG_MAPS}/a");
    let patch = |number: usize| {
        let operations = json!([{"op": "add", "path": format!("/data/k{number}"), "value": "v"}]);
        let patching = fixture.call("PATCH", &map, "application/json-patch+json", Some(operations));
        async move {
            let patched = patching.await;
            assert_eq!(patched.code, 200, "{}", patched.body);
        }
    };
    futures::future::join_all((0..100).map(patch)).await;
    let data = fixture.get(&map).await.body["data"].clone();
    assert_eq!(data.as_object().unwrap().len(), 101, "{data}");
}

#[tokio::test]
async fn a_write_that_requires_a_former_revision_fails_without_a_turn() {
    let fixture = Fixture::new().await;
    let made = fixture.post(CONFIG_MAPS, config_map("a", json!({}))).await.body;
    let revision = made["metadata"]["resourceVersion"].as_str().unwrap();
    let kind = coracle_kinds::kind::by_kind("v1", "ConfigMap").unwrap();
    let call = Call::internal(&fixture.api.state, kind.clone(), &made);
    let written = async |value: &str| {
        let (mut attempts, target) = (0, Target { name: "a", revision });
        let written = write::update_target(&call, target, Part::Main, Writer::Update, |old| {
            attempts += 1;
            write::check_revision(kind, old, &revision.into())?;
            let mut new = old.clone();
            new["data"]["key"] = value.into();
            Ok(new)
        });
        let code = written.await.map_or_else(|error| error.code, |_stored| 200);
        (code, attempts)
    };
    // Another write has the turn.
    let _turn = fixture.api.state.write_turns.enter(&key_of(kind, "default", "a")).await.unwrap();
    let (one, other) = futures::future::join(written("b"), written("c")).await;
    let mut written = [one, other];
    written.sort_unstable();
    assert_eq!(written, [(200, 1), (409, 1)]);
}

#[tokio::test]
async fn a_body_that_never_comes_ends_the_request() {
    let fixture = Fixture::new().await;
    tokio::time::pause();
    let body = StreamBody::new(futures::stream::pending::<std::result::Result<Frame<Bytes>, Infallible>>());
    let request = Request::post("/api/v1/namespaces").header("authorization", "Bearer secret");
    let answer = fixture.api.handle(request.body(body).unwrap(), None).await;
    assert_eq!(answer.status(), 504);
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    let status: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((&status["kind"], &status["reason"]), (&json!("Status"), &json!("Timeout")));
}

#[tokio::test]
async fn the_response_to_an_unknown_client_keeps_the_memory_of_its_request() {
    let fixture = Fixture::new().await;
    let unknown = || fixture.api.state.in_flight.unknown_bytes();
    for (token, path, code) in [
        (Some("wrong"), "/api/v1/nodes", 401),
        (None, "/api/v1/nodes", 403),
        (None, "/api/v1/nodes?watch=1", 403),
        (Some("secret"), "/api/v1/nodes", 200),
    ] {
        let memory = fixture.api.state.in_flight.unauthenticated(1, 1000).unwrap();
        let memory = Arc::new(memory);
        let mut request = Request::get(path).body(Full::<Bytes>::default()).unwrap();
        if let Some(token) = token {
            request.headers_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        }
        request.extensions_mut().insert(memory.clone());
        let response = fixture.api.handle(request, None).await;
        assert_eq!(response.status().as_u16(), code);
        assert!(response.extensions().get::<ShortLived>().is_some(), "a time limit");
        assert_eq!(Arc::strong_count(&memory), 1, "that of requests that are not authenticated yet");
        assert_eq!(unknown(), if code == 200 { 0 } else { 1000 }, "{path}");
        drop(response);
        assert_eq!(unknown(), 0);
    }
}

#[tokio::test]
async fn unknown_clients_leave_memory_for_requests_with_credentials() {
    let fixture = Fixture::new().await;
    let in_flight = &fixture.api.state.in_flight;
    let limits = Limits { total: 8, per_source: 4, unauthenticated: 8, unauthenticated_per_source: 4 };
    let (port, mut unread) = (Connections::new(limits), Vec::new());
    for source in 0..8_u8 {
        let permit = Arc::new(port.admit(IpAddr::from([10, 0, 0, source])).unwrap());
        while permit.evicted().now_or_never().is_none() {
            let memory = in_flight
                .unauthenticated(permit.source(), 1 << 20)
                .expect("memory for a request with credentials");
            let request = Request::get("/api/v1/nodes").header("authorization", "Bearer wrong");
            let request = request.extension(Arc::new(memory)).extension(permit.clone());
            let request = request.body(Full::<Bytes>::default()).unwrap();
            unread.push(fixture.api.handle(request, None).await);
        }
    }
    assert!(unread.len() > 20 && in_flight.unknown_bytes() > 20 << 20, "{}", unread.len());
    drop(unread);
    assert_eq!(in_flight.unknown_bytes(), 0);
}

/// The webhook accepts connections, and never answers.
#[tokio::test]
async fn one_source_leaves_calls_of_the_token_webhook_for_others() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("webhook");
    let content = json!({"clusters": [{"name": "c", "cluster": {"server": url}}], "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "c"}}]});
    std::fs::write(&file, content.to_string()).unwrap();
    let (cache, version) = (Duration::ZERO, "v1".to_owned());
    let webhook = crate::authn::TokenWebhookConfig { file, cache, version };
    let api = open_with(directory.path(), |config| config.token_webhook = Some(webhook)).await;
    let limits = Limits { total: 8, per_source: 4, unauthenticated: 8, unauthenticated_per_source: 4 };
    let port = Connections::new(limits);
    let [eve, bob] = [1, 2].map(|host| Arc::new(port.admit(IpAddr::from([10, 0, 0, host])).unwrap()));
    let send = |permit: &Arc<ConnectionPermit>, number: usize| {
        let request = Request::get("/api/v1/nodes").header("authorization", format!("Bearer wrong-{number}"));
        let request = request.extension(permit.clone()).body(Full::<Bytes>::default()).unwrap();
        let api = api.clone();
        tokio::spawn(async move { api.handle(request, None).await });
    };
    (0..150).for_each(|number| send(&eve, number));
    let accept = async || tokio::time::timeout(Duration::from_secs(60), listener.accept()).await;
    let mut calls = Vec::new();
    for _ in 0..50 {
        calls.push(accept().await.expect("half of the calls").unwrap());
    }
    send(&bob, 1000);
    let (mut call, _) = accept().await.expect("a client of another source waits").unwrap();
    // The first source has no more calls, so this is the call of the other source.
    let mut text = Vec::new();
    let read = async {
        while !String::from_utf8_lossy(&text).contains("wrong-1000") {
            assert_ne!(call.read_buf(&mut text).await.unwrap(), 0);
        }
    };
    tokio::time::timeout(Duration::from_secs(60), read).await.expect("more than half of the calls");
}

#[tokio::test]
async fn an_object_cannot_grow_by_patches() {
    let fixture = Fixture::new().await;
    let account = "/api/v1/namespaces/default/serviceaccounts/default";
    let mut code = 200;
    for round in 0..4 {
        let secrets: Vec<Value> =
            (0..15).map(|at| json!({"name": format!("{round}-{at}-{}", "x".repeat(60_000))})).collect();
        let patch = json!({"secrets": secrets});
        let media = "application/strategic-merge-patch+json";
        code = fixture.call("PATCH", account, media, Some(patch)).await.code;
    }
    assert_eq!(code, 413);
}

/// In managedFields, the fields of an object are four levels deeper. So an object that the decoder accepts could become
/// an object that the decoder refuses.
#[tokio::test]
async fn an_object_that_cannot_be_read_again_is_refused() {
    let fixture = Fixture::new().await;
    let post = async |depth: usize| {
        let data = (0..depth).fold(json!({}), |inner, _| json!({"a{[\"": inner}));
        let name = format!("deep-{depth}");
        let object = json!({"apiVersion": "apps/v1", "kind": "ControllerRevision", "metadata": {"name": name},
            "revision": 1, "data": data});
        fixture.post("/apis/apps/v1/namespaces/default/controllerrevisions", object).await.code
    };
    assert_eq!((post(100).await, post(122).await), (201, 413));
}

#[tokio::test]
async fn a_body_is_limited() {
    let fixture = Fixture::new().await;
    let large = json!({"data": {"a": "x".repeat(4 << 20)}});
    assert_eq!(fixture.post("/api/v1/namespaces/default/configmaps", large).await.code, 413);
}
