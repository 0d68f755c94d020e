//! The limit of the bytes of all objects in one namespace.

use super::*;

const LIMIT: usize = 64 << 10;

fn sized(name: &str, bytes: usize) -> Value {
    json!({"metadata": {"name": name}, "data": {"key": "x".repeat(bytes)}})
}

async fn send_as_controllers(server: &Fixture, request: http::request::Builder, body: Value) -> u16 {
    let request = request.body(Full::from(body.to_string())).unwrap();
    server.send(User::controllers(), request).await.code
}

#[tokio::test]
async fn a_full_namespace_refuses_growth_until_objects_are_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let api = open_with(directory.path(), |config| config.options.max_namespace_bytes = Some(LIMIT)).await;
    let server = Fixture { api, directory };
    for name in ["full", "other"] {
        let made = server.post("/api/v1/namespaces", json!({"metadata": {"name": name}})).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }
    let (maps, secrets) = ("/api/v1/namespaces/full/configmaps", "/api/v1/namespaces/full/secrets");
    let mut kept = sized("a", 30 << 10);
    kept["metadata"]["finalizers"] = json!(["example.com/kept"]);
    assert_eq!(server.post(maps, kept).await.code, 201);
    let secret = json!({"metadata": {"name": "s"}, "stringData": {"key": "x".repeat(20 << 10)}});
    assert_eq!(server.post(secrets, secret).await.code, 201);

    let refused = server.post(maps, sized("b", 30 << 10)).await;
    assert_eq!((refused.code, &refused.body["reason"]), (403, &json!("Forbidden")), "{}", refused.body);
    let message = refused.body["message"].as_str().unwrap();
    let start = "configmaps \"b\" is forbidden: the objects of namespace \"full\" have ";
    let end = "the limit is 65536: delete objects or raise the setting max-namespace-bytes";
    assert!(message.starts_with(start) && message.ends_with(end), "{message}");
    let growth = json!({"data": {"more": "x".repeat(10_000)}});
    let map = format!("{maps}/a");
    assert_eq!(server.merge(&map, growth.clone()).await.code, 403, "an update that grows");
    let other = server.post("/api/v1/namespaces/other/configmaps", sized("b", 30 << 10)).await;
    assert_eq!(other.code, 201, "another namespace: {}", other.body);

    let create = Request::post(maps).header("content-type", "application/json");
    assert_eq!(send_as_controllers(&server, create, sized("b", 10_000)).await, 403, "for users");
    let update = || Request::patch(&map).header("content-type", "application/merge-patch+json");
    assert_eq!(send_as_controllers(&server, update(), growth).await, 200, "up to a quarter more");
    let growth = json!({"data": {"most": "x".repeat(20_000)}});
    assert_eq!(send_as_controllers(&server, update(), growth).await, 403, "more than a quarter more");

    let server = server.again_with(|config| config.options.max_namespace_bytes = Some(LIMIT)).await;
    assert_eq!(server.post(maps, sized("b", 30 << 10)).await.code, 403, "after a restart");
    let shorter = server.merge(&map, json!({"data": {"more": null}})).await;
    assert_eq!(shorter.code, 200, "a shorter object: {}", shorter.body);
    // The deletion makes the object longer, because it has a finalizer.
    assert_eq!(server.delete(&map, json!({})).await.code, 200);
    assert_eq!(server.merge(&map, json!({"metadata": {"finalizers": null}})).await.code, 200);
    assert_eq!(server.get(&map).await.code, 404);
    assert_eq!(server.post(maps, sized("b", 30 << 10)).await.code, 201, "there is room again");
}

#[tokio::test]
async fn all_namespaces_together_are_limited_and_the_system_is_not() {
    let server = Fixture::new().await;
    assert_eq!(server.post("/api/v1/namespaces", json!({"metadata": {"name": "n"}})).await.code, 201);
    let server = server.again_with(|config| config.options.max_all_namespaces_bytes = Some(LIMIT)).await;
    assert_eq!(server.post(CONFIG_MAPS, sized("a", 40 << 10)).await.code, 201);
    let maps = "/api/v1/namespaces/n/configmaps";
    let refused = server.post(maps, sized("a", 40 << 10)).await;
    let message = refused.body["message"].as_str().unwrap();
    let end = "the limit is 65536: delete objects or raise the setting max-all-namespaces-bytes";
    assert!(refused.code == 403 && message.ends_with(end), "{message}");
    let small = server.post(maps, sized("b", 26 << 10)).await;
    assert_eq!(small.code, 201, "a small namespace, up to a quarter above the limit: {}", small.body);
    let system = "/api/v1/namespaces/kube-system/configmaps";
    assert_eq!(server.post(system, sized("a", 40 << 10)).await.code, 201);
    assert_eq!(server.delete(&format!("{CONFIG_MAPS}/a"), json!({})).await.code, 200);
    assert_eq!(server.post(maps, sized("a", 40 << 10)).await.code, 201, "there is room again");
}

#[tokio::test]
async fn writes_that_help_deletions_add_few_bytes_to_a_full_namespace() {
    let server = Fixture::new().await;
    let mut map = sized("a", 64 << 10);
    map["metadata"]["finalizers"] = json!(["example.com/a", "example.com/b"]);
    assert_eq!(server.post(CONFIG_MAPS, map).await.code, 201);
    let [limit, _reserved] = server.api.state.cache.namespace_bytes.of("default").unwrap();
    let server = server.again_with(|config| config.options.max_namespace_bytes = Some(limit)).await;
    let map = format!("{CONFIG_MAPS}/a");
    let patch = |name: &str, bytes: usize| json!({"metadata": {"annotations": {name: "x".repeat(bytes)}}});
    assert_eq!(server.merge(&map, patch("more", 500)).await.code, 403, "the namespace is full");
    let removing = |bytes: usize| {
        let mut patch = patch("removing", bytes);
        patch["metadata"]["finalizers"] = json!(["example.com/b"]);
        patch
    };
    assert_eq!(server.merge(&map, removing(5000)).await.code, 403, "the write adds too many bytes");
    let removed = server.merge(&map, removing(500)).await;
    assert_eq!(removed.code, 200, "{}", removed.body);
    assert_eq!(server.merge(&map, patch("more", 500)).await.code, 403, "this write removes no finalizer");
    assert_eq!(server.delete(&map, json!({})).await.code, 200);
    let mut codes = Vec::new();
    for number in 0..10 {
        codes.push(server.merge(&map, patch(&format!("step-{number}"), 3000)).await.code);
    }
    assert_eq!((codes[0], codes[9]), (200, 403), "the object is being deleted, and the bytes are limited");
    let last = server.merge(&map, json!({"metadata": {"finalizers": null}})).await;
    assert_eq!(last.code, 200, "{}", last.body);
    assert_eq!(server.get(&map).await.code, 404);
}

#[tokio::test]
async fn the_status_of_a_pod_in_a_full_namespace_is_stored() {
    let server = Fixture::new().await;
    assert_eq!(server.post(PODS, pod("p")).await.code, 201);
    let server = server.again_with(|config| config.options.max_namespace_bytes = Some(1)).await;
    assert_eq!(server.post(PODS, pod("q")).await.code, 403);
    let status = json!({"status": {"message": "x".repeat(5_000)}});
    assert_eq!(server.merge(&format!("{PODS}/p/status"), status).await.code, 200);
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    assert_eq!(server.merge(&format!("{PODS}/p"), labels).await.code, 403);
    let binding = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n"}});
    assert_eq!(server.post(&format!("{PODS}/p/binding"), binding).await.code, 201);
    assert_eq!(server.delete(&format!("{PODS}/p"), json!({})).await.code, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn creators_at_once_do_not_exceed_the_bytes_of_a_namespace() {
    let server = Fixture::new().await;
    let of = |server: &Fixture| server.api.state.cache.namespace_bytes.of("default").unwrap();
    let limit = of(&server)[0] + (64 << 10);
    let server = server.again_with(|config| config.options.max_namespace_bytes = Some(limit)).await;
    let maps = (0..50).map(|number| server.post(CONFIG_MAPS, sized(&format!("m{number}"), 10_000)));
    let answers = futures::future::join_all(maps).await;
    let made = answers.iter().filter(|answer| answer.code == 201).count();
    assert!((1..=6).contains(&made), "{made}");
    assert!(answers.iter().all(|answer| matches!(answer.code, 201 | 403)));
    let [stored, reserved] = of(&server);
    assert!(stored <= limit && reserved == 0, "{stored} of {limit}, {reserved} reserved");
}
