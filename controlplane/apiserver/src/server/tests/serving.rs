//! Modes of authorization, compression and the end of the server.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use super::{custom_resources::Breakable, *};
use crate::remote::tests::Hook;

async fn with(configure: impl FnOnce(&mut ApiserverConfig)) -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let api = open_with(directory.path(), configure).await;
    Fixture { api, directory }
}

async fn anonymous(server: &Fixture, path: &str) -> u16 {
    let request = Request::get(path).body(Full::<Bytes>::default()).unwrap();
    server.api.handle(request, None).await.status().as_u16()
}

#[tokio::test]
async fn always_allow_is_not_for_anonymous_requests() {
    let server = with(|config| config.authorization.modes = vec!["AlwaysAllow".to_owned()]).await;
    assert_eq!(server.get_as(User::new("bob", &[]), PODS).await.code, 200);
    let review = json!({"spec": {"namespace": "default"}}).to_string();
    let review =
        Request::post("/apis/authorization.k8s.io/v1/selfsubjectrulesreviews").body(Full::from(review));
    let rules = server.send(User::new("bob", &[]), review.unwrap()).await.body["status"].clone();
    // Without RBAC the rules of roles have no effect.
    let all = json!([{"verbs": ["*"], "apiGroups": ["*"], "resources": ["*"]}]);
    assert_eq!((&rules["resourceRules"], &rules["incomplete"]), (&all, &json!(false)));
    assert_eq!(anonymous(&server, PODS).await, 401);
    let server = with(|config| config.anonymous_auth = false).await;
    assert_eq!(anonymous(&server, "/readyz").await, 401);
}

#[tokio::test]
async fn a_page_of_an_allowed_origin_may_read_responses() {
    let origins = vec![r"^https://a\.example$".to_owned()];
    let server = with(|config| config.options.allowed_origins = origins).await;
    let send = async |method: &str, origin: &str| {
        let request = Request::builder().method(method).uri("/version").header("origin", origin);
        let request = request.body(Full::<Bytes>::default()).unwrap();
        let answer = server.api.handle_network(request).await;
        let allowed = answer.headers().get("access-control-allow-origin");
        (answer.status().as_u16(), allowed.map(|origin| origin.to_str().unwrap().to_owned()))
    };
    let own = "https://a.example";
    assert_eq!(send("OPTIONS", own).await, (204, Some(own.to_owned())));
    assert_eq!(send("GET", own).await, (200, Some(own.to_owned())));
    assert_eq!(send("GET", "https://a.example.evil").await, (200, None));
    assert_ne!(send("OPTIONS", "https://b.example").await.0, 204);
}

#[tokio::test]
async fn a_changed_authorization_configuration_takes_effect() {
    let hook = Hook::start(|_| (200, json!({"status": {"allowed": true}}).to_string())).await;
    let files = tempfile::tempdir().unwrap();
    let path = files.path().join("authorization.json");
    let write = |authorizers: Value| {
        let file = json!({"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthorizationConfiguration",
            "authorizers": authorizers});
        std::fs::write(&path, file.to_string()).unwrap();
    };
    write(json!([{"type": "RBAC", "name": "rbac"}]));
    let server = with(|config| config.authorization.file = Some(path.clone())).await;
    let bob = || server.get_as(User::new("bob", &[]), PODS);
    assert_eq!(bob().await.code, 403);
    let webhook = json!({"timeout": "30s", "subjectAccessReviewVersion": "v1", "failurePolicy": "Deny",
        "connectionInfo": {"type": "KubeConfigFile", "kubeConfigFile": hook.file()}});
    // The watch of the file begins some time after the start.
    eventually_async("the changed file is used", 10, async || {
        write(json!([{"type": "Webhook", "name": "hook", "webhook": webhook}]));
        bob().await.code == 200
    })
    .await;
    // The cached decisions stay.
    assert_eq!(server.api.state.authorizers.reload(), Ok(false), "the text has not changed");
    // An invalid file changes nothing.
    write(json!([]));
    server.api.state.authorizers.reload().unwrap_err();
    assert_eq!(bob().await.code, 200);
    for status in ["success", "failure"] {
        let name = "apiserver_authorization_config_controller_automatic_reloads_total";
        let start = format!("{name}{{status=\"{status}\"}} ");
        eventually_async(&start, 10, async || {
            server.get("/metrics").await.body.as_str().unwrap().lines().any(|line| line.starts_with(&start))
        })
        .await;
    }
}

#[tokio::test]
async fn clients_that_read_only_protobuf_get_it() {
    let server = Fixture::new().await;
    server.post(CONFIG_MAPS, config_map("a", json!({}))).await;
    let get = async |path: String, accept: &str| {
        let request = Request::get(path).header("accept", accept);
        let answer = server.api.handle(request.body(Full::<Bytes>::default()).unwrap(), Some(admin())).await;
        let media = answer.headers()["content-type"].to_str().unwrap().to_owned();
        (answer.status().as_u16(), media, answer.into_body().collect().await.unwrap().to_bytes())
    };
    let protobuf = "application/vnd.kubernetes.protobuf";
    let (code, media, bytes) = get(format!("{CONFIG_MAPS}/a"), protobuf).await;
    assert_eq!((code, media.as_str()), (200, protobuf));
    let object = coracle_kinds::protobuf::decode(&bytes).unwrap();
    assert_eq!((&object["kind"], &object["metadata"]["name"]), (&json!("ConfigMap"), &json!("a")));
    let (code, media, bytes) = get(CONFIG_MAPS.to_owned(), protobuf).await;
    assert_eq!((code, media.as_str(), bytes.starts_with(b"k8s\0")), (200, protobuf, true));
    let (code, media, _) = get(CONFIG_MAPS.to_owned(), "application/vnd.kubernetes.protobuf,*/*").await;
    assert_eq!((code, media.as_str()), (200, "application/json"));
    let table = "application/json;as=Table;v=v1beta1;g=meta.k8s.io";
    let (code, _, bytes) = get(CONFIG_MAPS.to_owned(), table).await;
    let table: serde_json::Value = serde_json::from_slice(&bytes).unwrap();
    assert_eq!((code, &table["apiVersion"]), (200, &json!("meta.k8s.io/v1beta1")));
    let watch = format!(
        "{CONFIG_MAPS}?watch=1&timeoutSeconds=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true"
    );
    let (_, media, bytes) = get(watch.clone(), protobuf).await;
    assert_eq!(media, "application/vnd.kubernetes.protobuf;stream=watch");
    let length = u32::from_be_bytes(bytes[..4].try_into().unwrap()) as usize;
    assert!(bytes[4..4 + length].starts_with(b"\x0a\x05ADDED"), "{bytes:?}");
    let table = "application/json;as=Table;v=v1;g=meta.k8s.io";
    let (_, _, lines) = get(watch, table).await;
    let last = lines.split(|byte| *byte == b'\n').rfind(|line| !line.is_empty()).unwrap();
    let last: serde_json::Value = serde_json::from_slice(last).unwrap();
    let row = &last["object"]["rows"][0]["object"]["metadata"]["annotations"];
    assert_eq!((&last["type"], &row["k8s.io/initial-events-end"]), (&json!("BOOKMARK"), &json!("true")));
}

#[tokio::test]
async fn a_large_object_is_compressed() {
    let server = Fixture::new().await;
    let mut large = config_map("large", json!({}));
    large["data"]["key"] = "x".repeat(300_000).into();
    assert_eq!(server.post(CONFIG_MAPS, large).await.code, 201);
    let get = async |accepted: &str| {
        let request = Request::get(format!("{CONFIG_MAPS}/large")).header("accept-encoding", accepted);
        let answer = server.api.handle(request.body(Full::<Bytes>::default()).unwrap(), Some(admin())).await;
        let coding = answer.headers().contains_key("content-encoding");
        (coding, answer.into_body().collect().await.unwrap().to_bytes().len())
    };
    let (plain, compressed) = (get("identity").await, get("gzip").await);
    assert!(!plain.0 && compressed.0 && compressed.1 * 10 < plain.1, "{plain:?} {compressed:?}");
}

#[tokio::test]
async fn feature_gates_switch_compression_and_watches_that_begin_with_all_objects() {
    let server = with(|config| {
        config.features.response_compression = false;
        config.features.watch_list = false;
    })
    .await;
    let mut large = config_map("large", json!({}));
    large["data"]["key"] = "x".repeat(300_000).into();
    assert_eq!(server.post(CONFIG_MAPS, large).await.code, 201);
    let request = Request::get(format!("{CONFIG_MAPS}/large")).header("accept-encoding", "gzip");
    let answer = server.api.handle(request.body(Full::<Bytes>::default()).unwrap(), Some(admin())).await;
    assert!(!answer.headers().contains_key("content-encoding"));
    let watch = "?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true";
    let refused = server.get(&format!("{CONFIG_MAPS}{watch}")).await;
    assert_eq!(refused.code, 422, "{}", refused.body);
}

#[tokio::test]
async fn a_watch_whose_client_is_gone_is_removed_without_an_event() {
    let server = Fixture::new().await;
    let kind = coracle_kinds::kind::by_kind("v1", "ConfigMap").unwrap();
    let watchers = || server.api.state.cache.of(kind).unwrap().lock().watchers();
    let before = watchers();
    let request = Request::get(format!("{CONFIG_MAPS}?watch=1")).body(Full::<Bytes>::default()).unwrap();
    let answer = server.api.handle(request, Some(admin())).await;
    assert_eq!((answer.status().as_u16(), watchers()), (200, before + 1));
    drop(answer);
    assert_eq!(watchers(), before);
}

#[tokio::test]
async fn watches_end_after_their_queued_events_or_in_the_grace_period() {
    for grace in [0, 1_000_000] {
        let server = with(|config| config.options.watch_grace = Duration::from_secs(grace)).await;
        let request = Request::get(format!("{CONFIG_MAPS}?watch=1")).body(Full::<Bytes>::default()).unwrap();
        let mut events = server.api.handle(request, Some(admin())).await.into_body();
        for name in ["a", "b", "c"] {
            assert_eq!(server.post(CONFIG_MAPS, config_map(name, json!({}))).await.code, 201);
        }
        server.api.state.shutdown.cancel();
        let mut next = async || {
            let frame = tokio::time::timeout(Duration::from_secs(30), events.frame()).await.unwrap();
            let event: Value = serde_json::from_slice(&frame?.unwrap().into_data().unwrap()).unwrap();
            event["object"]["metadata"]["name"].as_str().map(str::to_owned)
        };
        for name in ["a", "b", "c"] {
            assert_eq!(next().await.as_deref(), Some(name), "a grace period of {grace} s");
        }
        if grace == 0 {
            assert_eq!(next().await, None);
        } else {
            server.post(CONFIG_MAPS, config_map("d", json!({}))).await;
            assert_eq!(next().await.as_deref(), Some("d"), "it still gets events");
        }
    }
}

#[tokio::test]
async fn a_server_that_stops_is_not_ready_but_answers() {
    let server = with(|config| config.shutdown_delay = Duration::from_secs(3600)).await;
    assert_eq!(server.get("/readyz/shutdown").await.code, 200);
    server.api.state.stopping.cancel();
    assert_eq!((anonymous(&server, "/readyz").await, anonymous(&server, "/livez").await), (500, 200));
    let excluded = server.get("/readyz?exclude=shutdown&verbose").await.body;
    assert!(excluded.as_str().unwrap().contains("[+]shutdown excluded: ok"), "{excluded}");
    assert_eq!(server.get(PODS).await.code, 200);
    assert!(!server.api.state.shutdown.is_cancelled());
    let server = with(|_| {}).await;
    server.api.state.stopping.cancel();
    server.api.state.shutdown.cancelled().await;
}

#[tokio::test]
async fn a_server_that_stops_can_ask_clients_to_send_requests_again() {
    let server = with(|config| config.options.send_retry_after = true).await;
    let send = async |path: &str, agent: &str| {
        let request = Request::get(path).header("authorization", "Bearer secret").header("user-agent", agent);
        server.api.handle_network(request.body(Full::<Bytes>::default()).unwrap()).await
    };
    let code = async |path: &str, agent: &str| send(path, agent).await.status().as_u16();
    let (running, _watch) = (send(PODS, "a").await, send(&format!("{PODS}?watch=1"), "a").await);
    assert_eq!(running.status(), 200);
    server.api.state.stopping.cancel();
    eventually_async("new requests are refused", 10, async || code(PODS, "a").await == 429).await;
    let refused = send(&format!("{PODS}?watch=1"), "a").await;
    for (name, value) in [("retry-after", "5"), ("connection", "close")] {
        assert_eq!(refused.headers()[name], value);
    }
    let text = refused.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(text, "The apiserver is shutting down, please try again later.\n");
    for (path, agent, expect) in [
        ("/livez", "a", 200),
        ("/readyz", "a", 500),
        ("/metrics", "a", 200),
        (PODS, "kube-apiserver/v1.36.0 (linux/amd64)", 200),
    ] {
        assert_eq!(code(path, agent).await, expect, "{path} {agent}");
    }
    // The watch does not delay the end of the listener.
    assert!(!server.api.state.shutdown.is_cancelled());
    drop(running);
    server.api.state.shutdown.cancelled().await;
}

#[tokio::test]
async fn a_server_that_stops_accepts_requests_before_it_refuses_them() {
    let server = with(|config| {
        config.options.send_retry_after = true;
        config.shutdown_delay = Duration::from_secs(3600);
    })
    .await;
    server.api.state.stopping.cancel();
    let request = Request::get(PODS).header("authorization", "Bearer secret");
    let request = request.body(Full::<Bytes>::default()).unwrap();
    assert_eq!(server.api.handle_network(request).await.status(), 200);
    assert_eq!(anonymous(&server, "/readyz").await, 500);
}

#[tokio::test]
async fn health_checks_have_upstreams_names_and_metrics() {
    let server = Fixture::new().await;
    for endpoint in ["/healthz", "/livez", "/readyz"] {
        let verbose = server.get(&format!("{endpoint}?verbose&exclude=log&exclude=none")).await.body;
        let verbose = verbose.as_str().unwrap();
        for line in [
            "[+]ping ok",
            "[+]log excluded: ok",
            "[+]poststarthook/rbac/bootstrap-roles ok",
            "[+]autoregister-completion ok",
            "warn: some health checks cannot be excluded: no matches",
        ] {
            assert!(verbose.lines().any(|one| one == line), "{line}: {verbose}");
        }
        assert_eq!(server.get(&format!("{endpoint}/poststarthook/rbac/bootstrap-roles")).await.body, "ok");
        assert_eq!(server.get(&format!("{endpoint}/ping/none")).await.code, 404);
        assert_eq!(server.get(&format!("{endpoint}/poststarthook")).await.code, 404);
    }
    server.api.state.stopping.cancel();
    assert_eq!(server.get("/readyz").await.code, 500);
    let text = server.get("/metrics/slis").await.body;
    let text = text.as_str().unwrap();
    for line in [
        "kubernetes_healthcheck{name=\"shutdown\",type=\"readyz\"} 0",
        "kubernetes_healthchecks_total{name=\"ping\",status=\"success\",type=\"readyz\"} 2",
        "kubernetes_healthchecks_total{name=\"shutdown\",status=\"error\",type=\"readyz\"} 1",
    ] {
        assert!(text.lines().any(|one| one == line), "{line}: {text}");
    }
    assert!(!text.contains("none"), "{text}");
}

#[tokio::test]
async fn etcd_is_probed_by_all_endpoints_and_the_embedded_store_is_not() {
    for (is_shared, alive) in [(true, 500), (false, 200)] {
        let directory = tempfile::tempdir().unwrap();
        let store = Embedded::open(&directory.path().join("store"), EmbeddedOptions::default()).unwrap();
        let is_broken = Arc::<AtomicBool>::default();
        let store = Breakable { store, is_broken: is_broken.clone(), is_full: Arc::default(), is_shared };
        // Each check makes a probe.
        let configure = |config: &mut ApiserverConfig| {
            (config.options.store.health_timeout, config.options.store.ready_timeout) =
                (Duration::ZERO, Duration::ZERO);
        };
        let server = Fixture { api: open_on(Arc::new(store), directory.path(), configure).await, directory };
        let checks = ["/livez/etcd", "/healthz/etcd", "/readyz/etcd", "/readyz/etcd-readiness"];
        for path in checks {
            assert_eq!(server.get(path).await.code, 200, "{path}");
        }
        is_broken.store(true, Ordering::SeqCst);
        for path in checks {
            assert_eq!(server.get(path).await.code, alive, "{path}");
        }
        assert_eq!((anonymous(&server, "/livez").await, anonymous(&server, "/readyz").await), (alive, alive));
        assert_eq!(anonymous(&server, "/livez?exclude=etcd").await, 200);
        assert_eq!(server.get("/readyz/store").await.code, 200, "the store reports no failure");
    }
}

#[tokio::test]
async fn key_management_services_have_a_health_check() {
    let server = Fixture::new().await;
    assert_eq!(server.get("/readyz/kms-providers").await.code, 404);
    let failing = crate::EncryptionHealth(Arc::new(|| Err::<(), String>("down".to_owned())));
    let server = with(|config| config.encryption_health = Some(failing)).await;
    for (path, code) in [
        ("/healthz/kms-providers", 500),
        ("/livez/kms-providers", 404),
        ("/readyz/kms-providers", 500),
        ("/livez", 200),
        ("/readyz", 500),
        ("/readyz?exclude=kms-providers", 200),
    ] {
        assert_eq!(server.get(path).await.code, code, "{path}");
    }
    let paths = server.get("/").await.body["paths"].clone();
    let has = |path: &str| paths.as_array().unwrap().iter().any(|one| one == path);
    assert!(has("/readyz/kms-providers") && !has("/livez/kms-providers"), "{paths}");
}

#[tokio::test]
async fn a_watch_over_a_web_socket_has_a_message_for_each_event() {
    use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
    use futures::StreamExt as _;
    use tokio_tungstenite::tungstenite::{client::IntoClientRequest as _, protocol::Message};
    let server = Fixture::new().await;
    let (client, connection) = tokio::io::duplex(1 << 16);
    let api = server.api.clone();
    let service = hyper::service::service_fn(move |request: Request<hyper::body::Incoming>| {
        let api = api.clone();
        async move { Ok::<_, std::convert::Infallible>(api.handle(request, None).await) }
    });
    let connection = hyper_util::rt::TokioIo::new(connection);
    let serving = hyper::server::conn::http1::Builder::new().serve_connection(connection, service);
    tokio::spawn(serving.with_upgrades());
    let mut request = format!("ws://server{CONFIG_MAPS}?watch=1").into_client_request().unwrap();
    // A token from the file of static tokens, in the form that a browser sends.
    let token = BASE64_URL_SAFE_NO_PAD.encode("secret");
    let protocols = format!("base64url.bearer.authorization.k8s.io.{token}, json");
    request.headers_mut().insert("sec-websocket-protocol", protocols.parse().unwrap());
    let (mut socket, response) = tokio_tungstenite::client_async(request, client).await.unwrap();
    assert_eq!(response.headers()["sec-websocket-protocol"], "json");
    server.post(CONFIG_MAPS, config_map("seen", json!({}))).await;
    server.delete(&format!("{CONFIG_MAPS}/seen"), json!({})).await;
    let mut events = Vec::new();
    while events.len() < 2 {
        let message = socket.next().await.unwrap().unwrap();
        let Message::Text(text) = message else { panic!("{message:?}") };
        let event: Value = serde_json::from_str(&text).unwrap();
        if event["object"]["metadata"]["name"] == "seen" {
            events.push(event["type"].clone());
        }
    }
    assert_eq!(events, ["ADDED", "DELETED"]);
    // The watch counts as running until its connection is closed.
    let running = async || {
        let text = server.get("/metrics").await.body.as_str().unwrap().to_owned();
        let mut lines = text.lines().filter(|line| line.starts_with("apiserver_longrunning_requests{"));
        let labels = ["resource=\"configmaps\"", "verb=\"WATCH\""];
        let line = lines.find(|line| labels.iter().all(|label| line.contains(label))).unwrap();
        line.rsplit(' ').next().unwrap().to_owned()
    };
    assert_eq!(running().await, "1");
    drop(socket);
    eventually_async("no watch runs", 10, async || running().await == "0").await;
}
