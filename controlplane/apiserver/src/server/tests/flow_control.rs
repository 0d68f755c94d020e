//! Priority and fairness.

use super::*;

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
    // Without its level a schema matches nothing.
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
