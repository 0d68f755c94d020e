//! The audit log of requests.

use std::{fs, time::Duration};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use coracle_connections::{ConnectionPermit, Connections, Limits};
use tokio::{net::TcpListener, task::JoinSet};

use super::*;
use crate::{
    audit::{AuditBatch, AuditTruncateConfig, AuditWebhookConfig},
    authn::service_account::Claims,
};

/// A server that records the requests of one user in the mode `blocking`. The webhook accepts connections, and never
/// answers.
struct WithSilentWebhook {
    api: Apiserver,
    webhook: TcpListener,
    _directory: tempfile::TempDir,
}

impl WithSilentWebhook {
    async fn start(user: &str) -> Self {
        let webhook = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let directory = tempfile::tempdir().unwrap();
        let [file, policy_file] = ["webhook", "policy.yaml"].map(|name| directory.path().join(name));
        let cluster = json!({"server": format!("http://{}", webhook.local_addr().unwrap())});
        let content = json!({"clusters": [{"name": "c", "cluster": cluster}], "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c"}}]});
        fs::write(&file, content.to_string()).unwrap();
        let rules = json!([{"level": "Metadata", "users": [user]}]);
        let policy = json!({"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "rules": rules});
        fs::write(&policy_file, policy.to_string()).unwrap();
        let mode = coracle_audit::Mode::Blocking;
        let config =
            AuditWebhookConfig { file, mode, batch: AuditBatch::default(), truncate: None, backoff: None };
        let log_mode = coracle_audit::Mode::Batch;
        let log_batch = AuditBatch::default();
        let audit = AuditConfig {
            policy_file,
            log: None,
            log_mode,
            log_batch,
            log_truncate: None,
            webhook: Some(config),
        };
        let api = open_with(directory.path(), |config| config.audit = Some(audit)).await;
        Self { api, webhook, _directory: directory }
    }
}

/// A server whose audit policy has these rules. Its log is `audit.log` in its directory.
pub(super) async fn with_rules(rules: &str) -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let audit = config_of(directory.path(), rules);
    let api = open_with(directory.path(), |config| config.audit = Some(audit)).await;
    Fixture { api, directory }
}

/// Writes a policy with these rules. The log is `audit.log` in the directory.
pub(super) fn config_of(directory: &std::path::Path, rules: &str) -> AuditConfig {
    let policy_file = directory.join("policy.yaml");
    let text =
        format!("apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: {rules}");
    fs::write(&policy_file, text).unwrap();
    let path = directory.join("audit.log");
    let log = coracle_audit::LogOptions { path, max_bytes: 1 << 20, max_backups: 0, max_age: Duration::ZERO };
    let log_mode = coracle_audit::Mode::Blocking;
    let log_batch = AuditBatch::default();
    AuditConfig { policy_file, log: Some(log), log_mode, log_batch, log_truncate: None, webhook: None }
}

/// The first `count` events of a path. Waits until the log has them.
pub(super) async fn events(server: &Fixture, path: &str, count: usize) -> Vec<Value> {
    eventually_async(&format!("{count} events of {path}"), 10, async || {
        let text = fs::read_to_string(server.directory.path().join("audit.log")).unwrap();
        // The last line may be incomplete.
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let found: Vec<Value> =
            lines.filter(|event| event["requestURI"].as_str().unwrap().starts_with(path)).collect();
        (found.len() >= count).then_some(found)
    })
    .await
}

#[tokio::test]
async fn requests_for_deprecated_versions_are_annotated() {
    let server = with_rules("[{level: Metadata}]").await;
    let endpoints = "/api/v1/namespaces/default/endpoints";
    server.get(endpoints).await;
    server.get(CONFIG_MAPS).await;
    let deprecated = async |path: &str| {
        events(&server, path, 1).await[0]["annotations"]["k8s.io/deprecated"].as_str().map(str::to_owned)
    };
    assert_eq!(deprecated(endpoints).await.as_deref(), Some("true"));
    assert_eq!(deprecated(CONFIG_MAPS).await, None);
}

#[tokio::test]
async fn requests_are_counted_by_their_level() {
    let server = with_rules("[{level: Request, users: [ann]}, {level: Metadata, users: [bob]}]").await;
    for user in ["ann", "ann", "bob"] {
        server.get_as(User::new(user, &["system:masters"]), CONFIG_MAPS).await;
    }
    let metrics = server.get("/metrics").await.body;
    for (level, count) in [("Metadata", 1), ("Request", 2), ("RequestResponse", 0)] {
        let line = format!("apiserver_audit_level_total{{level=\"{level}\"}} {count}\n");
        assert!(metrics.as_str().unwrap().contains(&line), "{line}");
    }
}

#[tokio::test]
async fn an_event_has_the_request_its_decision_and_its_result() {
    let rules = "[{level: RequestResponse, resources: [{resources: [configmaps]}], omitManagedFields: true}, {level: Metadata}]";
    let server = with_rules(rules).await;
    let made = server.post(CONFIG_MAPS, config_map("a", json!({}))).await;
    let event = &events(&server, CONFIG_MAPS, 1).await[0];
    assert_eq!((&event["level"], &event["stage"]), (&json!("RequestResponse"), &json!("ResponseComplete")));
    assert_eq!((&event["verb"], &event["user"]["username"]), (&json!("create"), &json!("admin")));
    let reference =
        json!({"resource": "configmaps", "namespace": "default", "name": "a", "apiVersion": "v1"});
    assert_eq!(event["objectRef"], reference);
    assert_eq!(event["responseStatus"], json!({"metadata": {}, "code": 201}));
    assert_eq!(event["requestObject"]["data"], json!({"key": "a"}));
    assert_eq!(event["responseObject"]["metadata"]["uid"], made.body["metadata"]["uid"]);
    assert!(event["responseObject"]["metadata"]["managedFields"].is_null());
    assert_eq!(event["annotations"]["authorization.k8s.io/decision"], "allow");
    assert_eq!(made.headers["audit-id"].to_str().unwrap(), event["auditID"].as_str().unwrap());
    // A list is streamed; its bytes reach the client as well as the log.
    let list = server.get(CONFIG_MAPS).await;
    let event = &events(&server, CONFIG_MAPS, 2).await[1];
    assert_eq!(
        event["responseObject"]["items"].as_array().unwrap().len(),
        list.body["items"].as_array().unwrap().len()
    );
    server.get(&format!("{CONFIG_MAPS}/none")).await;
    let event = &events(&server, &format!("{CONFIG_MAPS}/none"), 1).await[0];
    assert_eq!(
        (&event["responseStatus"]["code"], &event["responseStatus"]["reason"]),
        (&json!(404), &json!("NotFound"))
    );
}

#[tokio::test]
async fn a_blocking_log_has_the_event_of_each_response() {
    let server = with_rules("[{level: Metadata}]").await;
    for name in ["a", "b", "c"] {
        assert_eq!(server.post(CONFIG_MAPS, config_map(name, json!({}))).await.code, 201);
        let text = fs::read_to_string(server.directory.path().join("audit.log")).unwrap();
        assert!(text.contains(&format!("\"name\":\"{name}\"")), "{text}");
    }
}

#[tokio::test]
async fn a_large_event_of_the_log_is_shortened() {
    let directory = tempfile::tempdir().unwrap();
    let mut audit = config_of(directory.path(), "[{level: Request, resources: [{resources: [configmaps]}]}]");
    audit.log_truncate = Some(AuditTruncateConfig { max_event_bytes: 4096, max_batch_bytes: 4096 });
    let api = open_with(directory.path(), |config| config.audit = Some(audit)).await;
    let server = Fixture { api, directory };
    let large = |name: &str, size: usize| {
        let mut object = config_map(name, json!({}));
        object["data"]["key"] = "x".repeat(size).into();
        object
    };
    for (name, size) in [("small", 1), ("large", 8192)] {
        assert_eq!(server.post(CONFIG_MAPS, large(name, size)).await.code, 201);
    }
    server.get(&format!("{CONFIG_MAPS}?labelSelector={}", "x".repeat(8192))).await;
    let found = events(&server, CONFIG_MAPS, 3).await;
    assert_eq!(found[0]["requestObject"]["data"]["key"], "x");
    assert!(found[1]["requestObject"].is_null(), "{}", found[1]);
    // A long query does not hide the request.
    assert!(found[2]["requestURI"].as_str().unwrap().ends_with("...TRUNCATED"), "{}", found[2]);
    assert!(found[2]["verb"] == "list" && found[2]["responseStatus"]["code"].is_number(), "{}", found[2]);
    assert_eq!(found[1]["objectRef"]["name"], "large");
    let marks = [&found[0], &found[1]].map(|event| event["annotations"]["audit.k8s.io/truncated"].clone());
    assert_eq!(marks, [Value::Null, json!("true")]);
    let metrics = server.get("/metrics").await.body;
    let line = "apiserver_audit_error_total{plugin=\"truncate\"} 0\n";
    assert!(metrics.as_str().unwrap().contains(line), "{metrics}");
}

#[tokio::test]
async fn a_strict_log_that_cannot_be_written_refuses_requests_before_they_run() {
    let directory = tempfile::tempdir().unwrap();
    let policy_file = directory.path().join("policy.yaml");
    let rules = "[{level: Metadata, users: [ann]}]";
    let text = format!("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules: {rules}");
    fs::write(&policy_file, text).unwrap();
    let path = "/dev/full".into();
    let log = coracle_audit::LogOptions { path, max_bytes: 1 << 20, max_backups: 0, max_age: Duration::ZERO };
    let log_mode = coracle_audit::Mode::BlockingStrict;
    let log_batch = AuditBatch::default();
    let audit =
        AuditConfig { policy_file, log: Some(log), log_mode, log_batch, log_truncate: None, webhook: None };
    let api = open_with(directory.path(), |config| config.audit = Some(audit)).await;
    let server = Fixture { api, directory };
    let of = |user: &str| server.get_as(User::new(user, &["system:masters"]), CONFIG_MAPS);
    let refused = of("ann").await;
    assert_eq!((refused.code, &refused.body["reason"]), (500, &json!("InternalError")));
    assert!(refused.body["message"].as_str().unwrap().contains("failed to store audit event"));
    assert_eq!(of("unrecorded").await.code, 200);
    // A refused request has no event of its response.
    assert_eq!(server.api.state.auditor.as_ref().unwrap().counts(), [1, 0, 1, 1]);
}

#[tokio::test]
async fn requests_of_one_user_that_wait_for_a_blocking_webhook_are_limited() {
    let server = WithSilentWebhook::start("eve").await;
    let (mut requests, own) = (JoinSet::new(), 512);
    for _ in 0..own + 20 {
        let api = server.api.clone();
        requests.spawn(async move {
            let request = Request::get("/version").body(Full::<Bytes>::default()).unwrap();
            api.handle(request, Some(User::new("eve", &[]))).await.status().as_u16()
        });
    }
    for _ in 0..20 {
        assert_eq!(requests.join_next().await.unwrap().unwrap(), 429);
    }
    assert_eq!(requests.len(), own);
    assert_eq!(server.api.state.auditor.as_ref().unwrap().counts()[3], 20);
}

#[tokio::test]
async fn anonymous_clients_of_one_source_leave_calls_of_a_blocking_webhook_for_others() {
    let server = WithSilentWebhook::start("system:anonymous").await;
    let limits = Limits { total: 8, per_source: 4, unauthenticated: 8, unauthenticated_per_source: 4 };
    let port = Connections::new(limits);
    let [eve, bob] = [1, 2].map(|host| Arc::new(port.admit(IpAddr::from([10, 0, 0, host])).unwrap()));
    let mut requests = JoinSet::new();
    let mut send = |permit: &Arc<ConnectionPermit>| {
        let request = Request::get("/livez").extension(permit.clone());
        let request = request.body(Full::<Bytes>::default()).unwrap();
        let api = server.api.clone();
        requests.spawn(async move { api.handle(request, None).await });
    };
    (0..60).for_each(|_| send(&eve));
    let mut calls = Vec::new();
    for _ in 0..50 {
        calls.push(server.webhook.accept().await.unwrap());
    }
    send(&bob);
    // The calls of the first source end after 30 s.
    let call = tokio::time::timeout(Duration::from_secs(20), server.webhook.accept()).await;
    assert!(call.is_ok(), "a client of another source waits");
}

#[tokio::test]
async fn bodies_of_proxied_requests_are_not_recorded() {
    let server = with_rules("[{level: Request}]").await;
    let path = "/api/v1/namespaces/default/services/none/proxy/upload";
    assert_eq!(server.post(path, config_map("a", json!({}))).await.code, 404);
    let event = &events(&server, path, 1).await[0];
    assert_eq!(event["level"], "Request");
    assert!(event["requestObject"].is_null(), "{event}");
}

#[tokio::test]
async fn each_kind_of_body_is_recorded() {
    let server = with_rules("[{level: Request, omitManagedFields: true}]").await;
    let yaml = "metadata: {name: a, managedFields: []}\ndata: {a: yaml}\nmore: 1\n";
    let request = Request::post(CONFIG_MAPS).header("content-type", "application/yaml");
    assert_eq!(server.send(admin(), request.body(Full::from(yaml)).unwrap()).await.code, 201);
    let sent = json!({"metadata": {"name": "a"}, "data": {"a": "yaml"}, "more": 1});
    assert_eq!(events(&server, CONFIG_MAPS, 1).await[0]["requestObject"], sent, "with its unknown fields");

    let scale = "/apis/apps/v1/namespaces/default/deployments/none/scale";
    let applied = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}});
    let applied_scale = json!({"apiVersion": "autoscaling/v1", "kind": "Scale", "spec": {"replicas": 1}});
    for (at, (method, path, media, body)) in [
        ("PUT", "configmaps/a", "json", config_map("a", json!({}))),
        ("PATCH", "configmaps/a", "json-patch+json", json!([{"op": "remove", "path": "/data"}])),
        ("PATCH", "configmaps/a", "merge-patch+json", json!({"data": {"a": "b"}})),
        ("PATCH", "configmaps/a", "strategic-merge-patch+json", json!({"data": null})),
        ("PATCH", "configmaps/a", "apply-patch+yaml", applied),
        ("DELETE", "configmaps/a", "json", json!({"gracePeriodSeconds": 0, "other": 1})),
        ("DELETE", "configmaps", "json", json!({"propagationPolicy": "Orphan"})),
        ("POST", "pods/none/eviction", "json", json!({"metadata": {"name": "none"}})),
        ("PATCH", scale, "apply-patch+yaml", applied_scale),
        ("PATCH", scale, "merge-patch+json", json!({"spec": {"replicas": 3}})),
    ]
    .into_iter()
    .enumerate()
    {
        let prefix = if path.starts_with('/') { "" } else { "/api/v1/namespaces/default/" };
        // The field manager distinguishes the events.
        let path = format!("{prefix}{path}?fieldManager=m{at}");
        let answer = server.call(method, &path, &format!("application/{media}"), Some(body.clone())).await;
        let event = &events(&server, &path, 1).await[0];
        assert_eq!(event["requestObject"], body, "{method} {path}: {}", answer.body);
    }
}

#[tokio::test]
async fn refusals_are_recorded_and_impersonated_users_are_named() {
    let server = with_rules("[{level: None, users: [quiet]}, {level: Metadata}]").await;
    let request = || Request::get("/api/v1/nodes").body(Full::<Bytes>::default()).unwrap();
    server.send(User::new("quiet", &[]), request()).await;
    server.send(User::new("ann", &[]), request()).await;
    let event = &events(&server, "/api/v1/nodes", 1).await[0];
    assert_eq!((&event["user"]["username"], &event["responseStatus"]["code"]), (&json!("ann"), &json!(403)));
    assert_eq!(event["annotations"]["authorization.k8s.io/decision"], "forbid");
    assert!(event["requestObject"].is_null() && event["responseObject"].is_null());
    let mut as_bob = request();
    as_bob.headers_mut().insert("impersonate-user", "bob".parse().unwrap());
    as_bob.headers_mut().insert("audit-id", "mine".parse().unwrap());
    server.send(admin(), as_bob).await;
    let event = &events(&server, "/api/v1/nodes", 2).await[1];
    assert_eq!((&event["user"]["username"], &event["auditID"]), (&json!("admin"), &json!("mine")));
    assert_eq!(event["impersonatedUser"]["username"], "bob");
    let metadata = json!({"impersonationConstraint": "impersonate:user-info"});
    assert_eq!(event["authenticationMetadata"], metadata);
    // A token that no authenticator recognizes.
    let mut unknown = request();
    unknown.headers_mut().insert("authorization", "Bearer wrong".parse().unwrap());
    assert_eq!(server.api.handle(unknown, None).await.status(), 401);
    let event = &events(&server, "/api/v1/nodes", 3).await[2];
    assert_eq!((&event["user"], &event["responseStatus"]["code"]), (&json!({}), &json!(401)));
    let anonymous = User::new("system:anonymous", &[]);
    let watches = std::iter::from_fn(|| server.api.state.in_flight.watch(&anonymous, 0, 0).ok());
    let watches: Vec<_> = watches.collect();
    let watch = Request::get("/api/v1/nodes?watch=1").body(Full::<Bytes>::default()).unwrap();
    assert_eq!(server.api.handle(watch, None).await.status(), 429);
    let event = &events(&server, "/api/v1/nodes", 4).await[3];
    assert_eq!(
        (&event["user"]["username"], &event["responseStatus"]["code"]),
        (&json!(anonymous.name), &json!(429))
    );
    drop(watches);
}

#[tokio::test]
async fn a_watch_is_recorded_when_it_starts_and_when_it_ends() {
    let server = with_rules("[{level: Metadata, verbs: [watch]}]").await;
    let path = format!("{CONFIG_MAPS}?watch=1");
    let request = Request::get(&path).body(Full::<Bytes>::default()).unwrap();
    let watch = server.api.handle(request, Some(admin())).await;
    let started = &events(&server, &path, 1).await[0];
    assert_eq!(started["stage"], "ResponseStarted");
    drop(watch);
    let ended = &events(&server, &path, 2).await[1];
    assert_eq!((&ended["stage"], &ended["auditID"]), (&json!("ResponseComplete"), &started["auditID"]));
}

#[tokio::test]
async fn annotations_of_webhooks_are_recorded_below_their_names() {
    let server = with_rules("[{level: Metadata}]").await;
    let webhook = super::webhook::Webhook::start(
        |_| json!({"allowed": true, "auditAnnotations": {"owner": "ann", "not a name": "x", "a/b": "x"}}),
    )
    .await;
    let path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
    assert_eq!(server.post(path, webhook.configuration(json!({}))).await.code, 201);
    assert_eq!(server.post(CONFIG_MAPS, config_map("a", json!({}))).await.code, 201);
    let event = &events(&server, CONFIG_MAPS, 1).await[0];
    let annotations = event["annotations"].as_object().unwrap();
    let names: Vec<&String> = annotations.keys().filter(|key| key.starts_with("test.example.com")).collect();
    assert_eq!(names, ["test.example.com/owner"]);
    assert_eq!(annotations["test.example.com/owner"], "ann");
}

#[tokio::test]
async fn an_annotation_that_a_webhook_repeats_for_many_objects_counts_once() {
    let server = with_rules("[{level: Metadata, verbs: [deletecollection]}]").await;
    let webhook = super::webhook::Webhook::start(
        |_| json!({"allowed": true, "auditAnnotations": {"owner": "x".repeat(30_000)}}),
    )
    .await;
    super::webhook::configure(&server, "validating", webhook.configuration(json!({}))).await;
    for number in 0..10 {
        let made = server.post(CONFIG_MAPS, config_map(&format!("m{number}"), json!({}))).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }
    assert_eq!(server.delete(CONFIG_MAPS, json!({})).await.code, 200);
    let annotations = &events(&server, CONFIG_MAPS, 1).await[0]["annotations"];
    assert_eq!(annotations["test.example.com/owner"].as_str().map(str::len), Some(30_000));
    assert_eq!(annotations["audit.k8s.io/truncated"], Value::Null);
}

#[tokio::test]
async fn annotations_of_webhooks_in_one_event_are_limited() {
    let server = with_rules("[{level: Metadata}]").await;
    let webhook = super::webhook::Webhook::start(|_| {
        let value = Value::from("x".repeat(30_000));
        let all: serde_json::Map<String, Value> =
            (0..10).map(|number| (format!("a{number}"), value.clone())).collect();
        json!({"allowed": true, "auditAnnotations": all})
    })
    .await;
    super::webhook::configure(&server, "validating", webhook.configuration(json!({}))).await;
    assert_eq!(server.post(CONFIG_MAPS, config_map("a", json!({}))).await.code, 201);
    let event = &events(&server, CONFIG_MAPS, 1).await[0];
    let annotations = event["annotations"].as_object().unwrap();
    assert_eq!(annotations.keys().filter(|key| key.starts_with("test.example.com")).count(), 8);
    assert_eq!(annotations["audit.k8s.io/truncated"], "true");
}

#[tokio::test]
async fn calls_of_webhooks_are_recorded_with_their_effects() {
    let server = with_rules("[{level: Request}]").await;
    let changing = super::webhook::Webhook::start(|_| {
        let patch = BASE64_STANDARD.encode(r#"[{"op":"add","path":"/data/b","value":"c"}]"#);
        json!({"allowed": true, "patchType": "JSONPatch", "patch": patch})
    })
    .await;
    let broken = super::webhook::Webhook::start(|_| json!({"allowed": "perhaps"})).await;
    let ignored = broken.configuration(json!({"failurePolicy": "Ignore"}));
    super::webhook::configure(&server, "mutating", changing.configuration(json!({}))).await;
    super::webhook::configure(&server, "validating", ignored).await;
    assert_eq!(server.post(CONFIG_MAPS, config_map("a", json!({}))).await.code, 201);
    let event = &events(&server, CONFIG_MAPS, 1).await[0];
    let of = |key: &str| event["annotations"][format!("{key}/round_0_index_0")].as_str();
    let head = r#"{"configuration":"test","webhook":"test.example.com""#;
    let mutation = format!(r#"{head},"mutated":true}}"#);
    assert_eq!(of("mutation.webhook.admission.k8s.io"), Some(mutation.as_str()));
    let patch = r#""patch":[{"op":"add","path":"/data/b","value":"c"}],"patchType":"JSONPatch"}"#;
    assert_eq!(of("patch.webhook.admission.k8s.io"), Some(format!("{head},{patch}").as_str()));
    assert_eq!(of("failed-open.validating.webhook.admission.k8s.io"), Some("test.example.com"));
    assert_eq!(of("failed-open.mutation.webhook.admission.k8s.io"), None);
}

#[tokio::test]
async fn uses_of_an_extended_token_after_its_first_hour_are_recorded_and_counted() {
    let server = with_rules("[{level: Metadata}]").await;
    let account = json!({"metadata": {"name": "default"}});
    let account = server.post("/api/v1/namespaces/default/serviceaccounts", account).await.body;
    let tokens = &server.api.state.authenticators.tokens;
    for (at, seconds) in [(1, 3607), (2, -60)] {
        let claims = Claims {
            namespace: "default",
            name: "default",
            uid: account["metadata"]["uid"].as_str().unwrap(),
            audiences: &tokens.audiences,
            seconds,
            extended: Some(7200),
            bound: json!({}),
        };
        let (token, _) = tokens.issue(&claims).await.unwrap();
        let request = Request::get("/api/v1/nodes").header("authorization", format!("Bearer {token}"));
        let answer = server.api.handle(request.body(Full::<Bytes>::default()).unwrap(), None).await;
        assert_eq!(answer.status(), 403);
        let event = &events(&server, "/api/v1/nodes", at).await[at - 1];
        let stale = event["annotations"]["authentication.k8s.io/stale-token"].as_str();
        match seconds {
            3607 => assert_eq!(stale, None),
            _ => {
                let late = stale.unwrap().strip_prefix(
                    "subject: system:serviceaccount:default:default, seconds after warning threshold: ",
                );
                assert!(late.unwrap().parse::<i64>().unwrap() >= 60, "{stale:?}");
            }
        }
    }
    let text = server.get("/metrics").await.body;
    for line in ["serviceaccount_stale_tokens_total 1", "serviceaccount_valid_tokens_total 1"] {
        assert!(text.as_str().unwrap().lines().any(|one| one == line), "{text}");
    }
}
