//! Priority and fairness.

use std::{
    convert::Infallible,
    sync::atomic::{AtomicBool, Ordering},
};

use http_body::Frame;
use http_body_util::StreamBody;

use super::{custom_resources::Breakable, *};
use crate::in_flight::BodyMemory;

const SCHEMAS: &str = "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas";
const LEVELS: &str = "/apis/flowcontrol.apiserver.k8s.io/v1/prioritylevelconfigurations";

/// A request from the network with the token of `system:masters`.
async fn send(server: &Fixture, user: &str, path: &str) -> http::Response<reply::Body> {
    let request = Request::get(path).header("authorization", "Bearer secret");
    let request = match user {
        "" => request,
        user => request.header("impersonate-user", user),
    };
    server.api.handle(request.body(Full::<Bytes>::default()).unwrap(), None).await
}

fn classified(answer: &http::Response<reply::Body>) -> [String; 2] {
    ["x-kubernetes-pf-flowschema-uid", "x-kubernetes-pf-prioritylevel-uid"].map(|name| {
        answer.headers().get(name).map(|value| value.to_str().unwrap().to_owned()).unwrap_or_default()
    })
}

async fn uid(server: &Fixture, path: &str) -> String {
    server.get(path).await.body["metadata"]["uid"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn requests_are_classified_by_the_impersonated_user() {
    let server = Fixture::new().await;
    let exempt =
        [uid(&server, &format!("{SCHEMAS}/exempt")).await, uid(&server, &format!("{LEVELS}/exempt")).await];
    assert_eq!(classified(&send(&server, "", "/api/v1/nodes").await), exempt);
    let level = json!({"metadata": {"name": "own"}, "spec": {"type": "Limited", "limited": {
        "nominalConcurrencyShares": 0, "borrowingLimitPercent": 0, "limitResponse": {"type": "Reject"}}}});
    let rule = json!({"subjects": [{"kind": "User", "user": {"name": "eve"}}],
        "resourceRules": [{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"], "namespaces": ["*"], "clusterScope": true}]});
    let schema = json!({"metadata": {"name": "own"}, "spec": {"matchingPrecedence": 3, "rules": [rule],
        "priorityLevelConfiguration": {"name": "own"}}});
    let dangling = async || {
        let body = server.get(&format!("{SCHEMAS}/own")).await.body;
        body["status"]["conditions"][0]["status"].as_str().unwrap_or_default().to_owned()
    };
    assert_eq!(server.post(SCHEMAS, schema).await.code, 201);
    eventually_async("the reference dangles", 10, async || dangling().await == "True").await;
    // A schema without its level matches no request.
    let default = uid(&server, &format!("{SCHEMAS}/global-default")).await;
    assert_eq!(classified(&send(&server, "eve", "/api/v1/nodes").await)[0], default);
    let made = server.post(LEVELS, level).await;
    assert_eq!(made.code, 201, "{}", made.body);
    eventually_async("the reference is complete", 10, async || dangling().await == "False").await;
    let own = [uid(&server, &format!("{SCHEMAS}/own")).await, uid(&server, &format!("{LEVELS}/own")).await];
    // The level has no seat.
    let refused = send(&server, "eve", "/api/v1/nodes").await;
    assert_eq!((refused.status().as_u16(), classified(&refused)), (429, own));
    assert_eq!(refused.headers()["retry-after"], "1");
    assert_eq!(send(&server, "eve", "/api/v1/nodes?watch=1").await.status(), 429);
    assert_eq!(send(&server, "bob", "/api/v1/nodes").await.status(), 403);
}

#[tokio::test]
async fn a_slow_authorization_has_no_seats_and_waits_for_seats_at_its_end() {
    let server = Fixture::new().await;
    let state = &server.api.state;
    let in_use = || state.flow_control.levels().iter().map(|level| level.seats_in_use).sum::<u64>();
    let info = RequestInfo::parse(&Method::GET, &"/api/v1/namespaces/a/pods/b".parse().unwrap());
    let eve = User::new("eve", &[]);
    let requester = request_seats::Requester { user: &eve, info: &info };
    tokio::time::pause();
    for (milliseconds, during) in [(100, 1), (5000, 0)] {
        let mut seats = state.flow_control.enter(&eve, &info, &state.cache).await.1.unwrap();
        let authorization = async {
            waits::for_server(tokio::time::sleep(Duration::from_millis(milliseconds))).await;
            assert_eq!(in_use(), during, "{milliseconds} ms");
            Ok(())
        };
        request_seats::wait(state, requester, &mut seats, authorization).await.unwrap();
        assert!(seats.is_some());
        assert_eq!(in_use(), 1);
    }
}

#[tokio::test]
async fn a_read_that_waits_for_etcd_has_no_seats() {
    let directory = tempfile::tempdir().unwrap();
    let store = Embedded::open(&directory.path().join("store"), EmbeddedOptions::default()).unwrap();
    let [is_broken, is_full] = [(); 2].map(|()| Arc::<AtomicBool>::default());
    let store = Breakable { store, is_broken: is_broken.clone(), is_full: is_full.clone(), is_shared: true };
    let server = Fixture { api: open_on(Arc::new(store), directory.path(), |_config| {}).await, directory };
    let in_use =
        || server.api.state.flow_control.levels().iter().map(|level| level.seats_in_use).sum::<u64>();
    let read = async || send(&server, "system:kube-scheduler", "/api/v1/nodes").await.status().as_u16();
    eventually_async("the scheduler may read nodes", 10, async || read().await == 200).await;
    for flag in [is_full, is_broken] {
        flag.store(true, Ordering::SeqCst);
    }
    tokio::time::pause();
    let mut reading = std::pin::pin!(read());
    assert!(tokio::time::timeout(SLOW_CLIENT * 2, reading.as_mut()).await.is_err());
    assert_eq!(in_use(), 0, "while etcd does not respond");
    assert_eq!(reading.await, 504);
}

#[tokio::test]
async fn without_priority_and_fairness_no_request_is_classified() {
    let options = |config: &mut ApiserverConfig| {
        config.options.priority_and_fairness = false;
        config.options.strict_transport_security = "max-age=9; preload".to_owned();
    };
    let server = Fixture::new().await.again_with(options).await;
    let answer = send(&server, "", "/api/v1/nodes").await;
    assert_eq!((answer.status().as_u16(), classified(&answer)), (200, [String::new(), String::new()]));
    assert_eq!(answer.headers()["strict-transport-security"], "max-age=9; preload");
    // Requests in this process have no such header.
    assert!(!server.get("/api/v1/nodes").await.headers.contains_key("strict-transport-security"));
}

#[tokio::test]
async fn mandatory_objects_come_back() {
    let server = Fixture::new().await;
    let path = format!("{LEVELS}/catch-all");
    let first = uid(&server, &path).await;
    server.delete(&path, json!({})).await;
    eventually_async("the level is created again", 10, async || {
        let found = server.get(&path).await;
        found.code == 200 && found.body["metadata"]["uid"] != first.as_str()
    })
    .await;
    server.merge(&path, json!({"spec": {"limited": {"nominalConcurrencyShares": 90}}})).await;
    let shares = async || server.get(&path).await.body["spec"]["limited"]["nominalConcurrencyShares"].clone();
    eventually_async("the shares are 5", 10, async || shares().await == 5).await;
}

#[tokio::test]
async fn a_client_that_sends_its_body_slowly_has_no_seats() {
    let server = Fixture::new().await;
    let state = &server.api.state;
    let user = User::new("eve", &[]);
    let info = RequestInfo::parse(&Method::POST, &"/api/v1/namespaces".parse().unwrap());
    let in_use = || state.flow_control.levels().iter().map(|level| level.seats_in_use).sum::<u64>();
    let mut seats = state.flow_control.enter(&user, &info, &state.cache).await.1.unwrap();
    assert_eq!(in_use(), 1);
    tokio::time::pause();
    let body = StreamBody::new(futures::stream::once(async {
        tokio::time::sleep(SLOW_CLIENT * 2).await;
        assert_eq!(in_use(), 0, "while the client is slow");
        Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"{}")))
    }));
    let mut memory = BodyMemory::default();
    let requester = request_seats::Requester { user: &user, info: &info };
    let received = request_seats::receive(state, Some(body), &mut memory, requester, &mut seats).await;
    assert_eq!(&received.unwrap()[..], b"{}");
    assert!(seats.is_some());
    assert_eq!(in_use(), 1, "when the body is complete");
}

#[tokio::test]
async fn a_large_request_waits_for_the_others_of_its_authenticated_user() {
    let server = Fixture::new().await;
    let group = "rbac.authorization.k8s.io";
    let role = json!({"metadata": {"name": "eve"}, "rules": [
        {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"]},
        {"apiGroups": [""], "resources": ["users"], "verbs": ["impersonate"]}]});
    let subjects = ["eve", "bob"].map(|name| json!({"kind": "User", "name": name, "apiGroup": group}));
    let binding = json!({"metadata": {"name": "eve"},
        "subjects": subjects,
        "roleRef": {"kind": "ClusterRole", "name": "eve", "apiGroup": group}});
    for (plural, object) in [("clusterroles", role), ("clusterrolebindings", binding)] {
        let made = server.post(&format!("/apis/{group}/v1/{plural}"), object).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }
    let create = async |name: &str, bytes: usize| {
        let object = json!({"metadata": {"name": name}, "data": {"a": "x".repeat(bytes)}}).to_string();
        let request = Request::post("/api/v1/namespaces/default/configmaps")
            .header("authorization", "Bearer of-eve")
            .header("impersonate-user", "bob")
            .header("content-type", "application/json");
        let request = request.body(Full::<Bytes>::from(object)).unwrap();
        server.api.handle(request, None).await.status().as_u16()
    };
    let permit = server.api.state.large_requests.enter("eve", 2 << 20).await;
    assert_eq!(create("small", 10).await, 201);
    let mut large = std::pin::pin!(create("large", 100_000));
    tokio::time::pause();
    assert!(tokio::time::timeout(SLOW_CLIENT * 4, large.as_mut()).await.is_err());
    tokio::time::resume();
    drop(permit);
    assert_eq!(large.await, 201);
}

#[tokio::test]
async fn a_table_of_schemas_has_their_order() {
    let server = Fixture::new().await;
    let request = Request::get(SCHEMAS).header("accept", "application/json;as=Table;v=v1;g=meta.k8s.io");
    let table = server.send(admin(), request.body(Full::default()).unwrap()).await.body;
    let rows = table["rows"].as_array().unwrap();
    let precedences: Vec<i64> = rows.iter().map(|row| row["cells"][2].as_i64().unwrap()).collect();
    assert!(precedences.len() > 5 && precedences.is_sorted(), "{precedences:?}");
    let first = [&rows[0], &rows[1]].map(|row| row["cells"][0].as_str().unwrap());
    assert_eq!(first, ["exempt", "probes"]);
}

#[tokio::test]
async fn levels_and_queues_have_debug_pages() {
    let server = Fixture::new().await;
    send(&server, "", "/api/v1/nodes").await;
    let page = async |name: &str| server.get(&format!("/debug/api_priority_and_fairness/{name}")).await;
    let levels = page("dump_priority_levels").await;
    let text = levels.body.as_str().unwrap().to_owned();
    assert_eq!(levels.code, 200);
    assert!(text.lines().any(|line| line.starts_with("exempt,")), "{text}");
    assert!(page("dump_queues").await.body.as_str().unwrap().starts_with("PriorityLevelName, "));
    let requests = page("dump_requests?includeRequestDetails=1").await;
    let text = requests.body.as_str().unwrap().to_owned();
    assert!(text.starts_with("PriorityLevelName, "), "{text}");
    assert!(text.lines().next().unwrap().ends_with("SubResource"), "{text}");
    assert_eq!(page("other").await.code, 404);
    let user = User::new("ann", &[]);
    let path = "/debug/api_priority_and_fairness/dump_queues";
    assert_eq!(server.get_as(user, path).await.code, 403);
    let server = server.again_with(|config| config.options.priority_and_fairness = false).await;
    assert_eq!(server.get(path).await.code, 404);
}
