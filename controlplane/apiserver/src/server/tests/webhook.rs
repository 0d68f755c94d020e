//! Admission webhooks: a real HTTPS server in this process.

use std::sync::Mutex;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use http_body_util::Full;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio_rustls::TlsAcceptor;

use super::*;

const CONFIGURATIONS: &str = "/apis/admissionregistration.k8s.io/v1";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// A webhook and the requests that it has received.
pub(super) struct Webhook {
    pub(super) url: String,
    pub(super) ca_bundle: String,
    /// The header `Authorization` of each request, or an empty text without this header, and the `request` of its
    /// review.
    seen: Arc<Mutex<Vec<(String, Value)>>>,
}

impl Webhook {
    /// Starts a webhook that answers each request by a function.
    pub(super) async fn start(answer: fn(&Value) -> Value) -> Self {
        let (acceptor, ca_bundle) = tls();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("https://127.0.0.1:{}/hook", listener.local_addr().unwrap().port());
        let seen: Arc<Mutex<Vec<(String, Value)>>> = Arc::default();
        let ours = seen.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let Ok(stream) = acceptor.accept(stream).await else { continue };
                let seen = seen.clone();
                let service = service_fn(move |request: Request<Incoming>| {
                    let seen = seen.clone();
                    async move {
                        let header = request.headers().get("authorization");
                        let header = header.map_or("", |value| value.to_str().unwrap()).to_owned();
                        let body = request.into_body().collect().await.unwrap().to_bytes();
                        let review: Value = serde_json::from_slice(&body).unwrap();
                        let mut response = answer(&review["request"]);
                        response["uid"] = review["request"]["uid"].clone();
                        seen.lock().unwrap().push((header, review["request"].clone()));
                        let review = json!({"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response});
                        Ok::<_, std::convert::Infallible>(http::Response::new(Full::<Bytes>::from(
                            review.to_string(),
                        )))
                    }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        Self { url, ca_bundle, seen: ours }
    }

    /// A configuration with one webhook for config maps. `more` has additional fields of the webhook.
    pub(super) fn configuration(&self, more: Value) -> Value {
        let mut hook = json!({
            "name": "test.example.com", "sideEffects": "None", "admissionReviewVersions": ["v1"],
            "clientConfig": {"url": self.url, "caBundle": self.ca_bundle},
            "rules": [{"operations": ["*"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["configmaps"]}],
        });
        hook.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"metadata": {"name": "test"}, "webhooks": [hook]})
    }

    fn requests(&self) -> Vec<Value> {
        self.seen.lock().unwrap().iter().map(|(_, request)| request.clone()).collect()
    }

    /// The header `Authorization` of each request, or an empty text without this header.
    pub(super) fn credentials(&self) -> Vec<String> {
        self.seen.lock().unwrap().iter().map(|(header, _)| header.clone()).collect()
    }
}

/// TLS with a new certificate, and the `caBundle` with it.
pub(super) fn tls() -> (TlsAcceptor, String) {
    let (acceptor, certificate) = crate::test_tls::acceptor();
    (acceptor, BASE64_STANDARD.encode(certificate))
}

pub(super) async fn configure(server: &Fixture, kind: &str, configuration: Value) {
    let made = server.post(&format!("{CONFIGURATIONS}/{kind}webhookconfigurations"), configuration).await;
    assert_eq!(made.code, 201, "{}", made.body);
}

pub(super) fn map(name: &str) -> Value {
    json!({"metadata": {"name": name}, "data": {"a": "b"}})
}

#[tokio::test]
async fn a_webhook_learns_whether_a_deletion_is_a_dry_run() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|_request| json!({"allowed": true})).await;
    configure(&server, "validating", webhook.configuration(json!({}))).await;
    server.post(MAPS, map("a")).await;
    let path = format!("{MAPS}/a");
    server.delete(&path, json!({"dryRun": ["All"]})).await;
    server.call("DELETE", &format!("{path}?dryRun=All"), "", None).await;
    server.delete(&format!("{path}?dryRun=All"), json!({})).await;
    let deletions = webhook.requests().into_iter().filter(|request| request["operation"] == "DELETE");
    let dry_runs: Vec<Value> = deletions.map(|request| request["dryRun"].clone()).collect();
    assert_eq!(dry_runs, [json!(true), json!(true), json!(false)]);
}

#[tokio::test]
async fn a_patch_without_operations_changes_nothing_and_allows_a_deletion() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(
        |_request| json!({"allowed": true, "patchType": "JSONPatch", "patch": BASE64_STANDARD.encode("[]")}),
    )
    .await;
    configure(&server, "mutating", webhook.configuration(json!({}))).await;
    assert_eq!(server.post(MAPS, map("a")).await.body["data"], json!({"a": "b"}));
    let deleted = server.delete(&format!("{MAPS}/a"), json!({})).await;
    assert_eq!(deleted.code, 200, "{}", deleted.body);
}

#[tokio::test]
async fn a_webhook_gets_the_options_of_the_request() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|_request| json!({"allowed": true})).await;
    configure(&server, "validating", webhook.configuration(json!({}))).await;
    let one = format!("{MAPS}/a");
    server.post(&format!("{MAPS}?fieldManager=m&fieldValidation=Strict"), map("a")).await;
    server.merge(&format!("{one}?fieldManager=n&dryRun=All"), json!({"data": {"c": "d"}})).await;
    server.delete(&one, json!({"propagationPolicy": "Background", "gracePeriodSeconds": 3})).await;
    server.post(MAPS, map("a")).await;
    server.call("DELETE", &format!("{one}?propagationPolicy=Orphan"), "", None).await;
    let options: Vec<Value> = webhook.requests().iter().map(|request| request["options"].clone()).collect();
    let version = "meta.k8s.io/v1";
    assert_eq!(
        options,
        [
            json!({"kind": "CreateOptions", "apiVersion": version, "fieldManager": "m", "fieldValidation": "Strict"}),
            json!({"kind": "UpdateOptions", "apiVersion": version, "fieldManager": "n", "dryRun": ["All"]}),
            json!({"kind": "DeleteOptions", "apiVersion": version, "propagationPolicy": "Background",
                "gracePeriodSeconds": 3}),
            json!({"kind": "CreateOptions", "apiVersion": version}),
            json!({"kind": "DeleteOptions", "apiVersion": version, "propagationPolicy": "Orphan"}),
        ]
    );
}

#[tokio::test]
async fn validating_admission_has_the_generated_name() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|_request| json!({"allowed": true})).await;
    for kind in ["mutating", "validating"] {
        configure(&server, kind, webhook.configuration(json!({}))).await;
    }
    let made = server.post(MAPS, json!({"metadata": {"generateName": "m-"}})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let name = &made.body["metadata"]["name"];
    let names: Vec<[Value; 2]> = webhook
        .requests()
        .iter()
        .map(|request| [request["name"].clone(), request["object"]["metadata"]["name"].clone()])
        .collect();
    assert_eq!(names, [[Value::Null, Value::Null], [name.clone(), name.clone()]]);
}

#[tokio::test]
async fn a_validating_webhook_refuses_and_warns() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|request| match request["name"].as_str() {
        Some("bad") => {
            json!({"allowed": false, "status": {"code": 403, "reason": "Forbidden", "message": "no"}})
        }
        _ => json!({"allowed": true, "warnings": ["careful"]}),
    })
    .await;
    configure(&server, "validating", webhook.configuration(json!({}))).await;
    let refused = server.post(MAPS, map("bad")).await;
    assert_eq!((refused.code, &refused.body["reason"]), (403, &json!("Forbidden")));
    assert_eq!(refused.body["message"], "admission webhook \"test.example.com\" denied the request: no");
    assert_eq!(server.get(&format!("{MAPS}/bad")).await.code, 404);
    let good = server.post(MAPS, map("good")).await;
    assert_eq!((good.code, good.headers["warning"].to_str().unwrap()), (201, "299 - \"careful\""));
    assert_eq!(server.delete(&format!("{MAPS}/good"), json!({})).await.code, 200);
    let requests = webhook.requests();
    let operations: Vec<&Value> = requests.iter().map(|request| &request["operation"]).collect();
    assert_eq!(operations, ["CREATE", "CREATE", "DELETE"]);
    let create = &requests[1];
    assert_eq!(create["kind"], json!({"group": "", "version": "v1", "kind": "ConfigMap"}));
    assert_eq!(create["requestResource"], json!({"group": "", "version": "v1", "resource": "configmaps"}));
    assert_eq!((&create["namespace"], &create["object"]["data"]["a"]), (&json!("default"), &json!("b")));
    assert_eq!(create["userInfo"]["username"], "admin");
    assert_eq!((&requests[2]["object"], &requests[2]["oldObject"]["data"]["a"]), (&Value::Null, &json!("b")));
}

/// CVE-2021-25735: webhooks for updates of nodes got the old node in place of the new node.
#[tokio::test]
async fn cve_2021_25735_a_webhook_judges_the_new_node_and_gets_the_old_one() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|request| {
        let is_good = |node: &str| request[node]["metadata"]["labels"]["a"] == "good";
        json!({"allowed": is_good("object"), "status": {"code": 403, "message": "no"}})
    })
    .await;
    let rules = json!([{"operations": ["*"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["nodes", "nodes/status"]}]);
    configure(&server, "validating", webhook.configuration(json!({"rules": rules}))).await;
    let labelled = |label: &str| json!({"metadata": {"name": "n", "labels": {"a": label}}});
    assert_eq!(server.post("/api/v1/nodes", labelled("good")).await.code, 201);
    for path in ["/api/v1/nodes/n", "/api/v1/nodes/n/status"] {
        assert_eq!(server.merge(path, labelled("bad")).await.code, 403, "{path}");
        let last = webhook.requests().pop().unwrap();
        let label = |node: &str| last[node]["metadata"]["labels"]["a"].clone();
        assert_eq!((label("object"), label("oldObject")), (json!("bad"), json!("good")), "{path}");
    }
    assert_eq!(server.get("/api/v1/nodes/n").await.body["metadata"]["labels"]["a"], "good");
}

#[tokio::test]
async fn a_mutating_webhook_changes_the_object() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|request| {
        let patch = match request["object"]["data"]["b"].is_null() {
            true => r#"[{"op": "add", "path": "/data/b", "value": "c"}]"#,
            false => "[]",
        };
        json!({"allowed": true, "patchType": "JSONPatch", "patch": BASE64_STANDARD.encode(patch)})
    })
    .await;
    let selector = json!({"matchLabels": {"mutate": "yes"}});
    configure(&server, "mutating", webhook.configuration(json!({"objectSelector": selector}))).await;
    assert_eq!(server.post(MAPS, map("plain")).await.body["data"], json!({"a": "b"}));
    let mut labelled = map("labelled");
    labelled["metadata"]["labels"] = json!({"mutate": "yes"});
    let made = server.post(MAPS, labelled).await;
    assert_eq!((made.code, &made.body["data"]), (201, &json!({"a": "b", "b": "c"})), "{}", made.body);
    assert_eq!(webhook.requests().len(), 1);
}

#[tokio::test]
async fn the_failure_policy_decides_about_failed_calls() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|_| json!({"allowed": "perhaps"})).await;
    configure(&server, "validating", webhook.configuration(json!({}))).await;
    let failed = server.post(MAPS, map("a")).await;
    assert_eq!(failed.code, 500);
    let message = failed.body["message"].as_str().unwrap();
    assert!(message.contains("failed calling webhook \"test.example.com\""), "{message}");
    let path = format!("{CONFIGURATIONS}/validatingwebhookconfigurations/test");
    assert_eq!(server.delete(&path, json!({})).await.code, 200);
    configure(&server, "validating", webhook.configuration(json!({"failurePolicy": "Ignore"}))).await;
    assert_eq!(server.post(MAPS, map("a")).await.code, 201);
}

#[tokio::test]
async fn invalid_configurations_are_refused() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|_| json!({"allowed": true})).await;
    for (more, field) in [
        (json!({"name": "short"}), "webhooks[0].name"),
        (json!({"sideEffects": null}), "webhooks[0].sideEffects"),
        (json!({"timeoutSeconds": 31}), "webhooks[0].timeoutSeconds"),
        (json!({"clientConfig": {}}), "webhooks[0].clientConfig"),
        (json!({"clientConfig": {"url": "http://x"}}), "webhooks[0].clientConfig.url"),
        (
            json!({"matchConditions": [{"name": "a", "expression": "params.x"}]}),
            "webhooks[0].matchConditions[0].expression",
        ),
        (json!({"admissionReviewVersions": ["v9"]}), "webhooks[0].admissionReviewVersions"),
        (json!({"rules": [rule("PATCH", "pods")]}), "webhooks[0].rules[0].operations[0]"),
    ] {
        let path = format!("{CONFIGURATIONS}/mutatingwebhookconfigurations");
        let refused = server.post(&path, webhook.configuration(more)).await;
        assert_eq!(
            (refused.code, &refused.body["details"]["causes"][0]["field"]),
            (422, &json!(field)),
            "{}",
            refused.body
        );
    }
}

#[tokio::test]
async fn limits_and_priorities_complete_pods() {
    let server = Fixture::new().await;
    let limits = json!([{"type": "Container", "default": {"cpu": "500m"}, "max": {"cpu": "1"}}]);
    let range = json!({"metadata": {"name": "l"}, "spec": {"limits": limits}});
    assert_eq!(server.post("/api/v1/namespaces/default/limitranges", range).await.code, 201);
    let class = json!({"metadata": {"name": "high"}, "value": 7, "globalDefault": true});
    let classes = "/apis/scheduling.k8s.io/v1/priorityclasses";
    assert_eq!(server.post(classes, class).await.code, 201);
    let second = json!({"metadata": {"name": "other"}, "value": 8, "globalDefault": true});
    assert_eq!(server.post(classes, second).await.code, 403);
    let pods = "/api/v1/namespaces/default/pods";
    let pod = |cpu: &str| {
        let resources = json!({"limits": {"cpu": cpu}});
        json!({"metadata": {"generateName": "p"}, "spec": {"containers": [{"name": "c", "image": "i", "resources": resources}]}})
    };
    let mut plain = pod("1");
    plain["spec"]["containers"][0]["resources"] = json!({});
    let made = server.post(pods, plain).await.body;
    assert_eq!(
        made["spec"]["containers"][0]["resources"],
        json!({"limits": {"cpu": "500m"}, "requests": {"cpu": "500m"}}),
        "{made}"
    );
    assert_eq!((&made["spec"]["priority"], &made["spec"]["priorityClassName"]), (&json!(7), &json!("high")));
    let refused = server.post(pods, pod("2")).await;
    assert!(
        refused.body["message"].as_str().unwrap().contains("maximum cpu usage per Container is 1"),
        "{}",
        refused.body
    );
}

fn rule(operation: &str, resource: &str) -> Value {
    json!({"operations": [operation], "apiGroups": [""], "apiVersions": ["v1"], "resources": [resource]})
}

#[tokio::test]
async fn a_mutating_webhook_cannot_change_what_was_judged_before() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|request| {
        let field = request["object"]["data"]["field"].as_str().unwrap_or_default();
        let patch = json!([{"op": "add", "path": format!("/metadata/{field}"), "value": "kube-system"}]);
        json!({"allowed": true, "patchType": "JSONPatch", "patch": BASE64_STANDARD.encode(patch.to_string())})
    })
    .await;
    configure(&server, "mutating", webhook.configuration(json!({}))).await;
    for metadata in [json!({"name": "a"}), json!({"generateName": "a"})] {
        for field in ["namespace", "name", "uid"] {
            let made = server.post(MAPS, json!({"metadata": metadata, "data": {"field": field}})).await;
            assert_eq!(made.code, 400, "{field}: {}", made.body);
        }
    }
}

#[tokio::test]
async fn a_webhook_of_the_status_changes_only_the_status() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|_| {
        let patch = json!([
            {"op": "add", "path": "/spec/activeDeadlineSeconds", "value": 5},
            {"op": "add", "path": "/status/message", "value": "webhook"},
        ]);
        json!({"allowed": true, "patchType": "JSONPatch", "patch": BASE64_STANDARD.encode(patch.to_string())})
    })
    .await;
    let pods = "/api/v1/namespaces/default/pods";
    assert_eq!(server.post(pods, pod("p")).await.code, 201);
    let rules = json!({"rules": [rule("UPDATE", "pods/status")]});
    configure(&server, "mutating", webhook.configuration(rules)).await;
    let updated = server.merge(&format!("{pods}/p/status"), json!({"status": {"reason": "r"}})).await;
    assert_eq!(updated.code, 200, "{}", updated.body);
    assert_eq!(updated.body["status"]["message"], "webhook");
    assert_eq!(updated.body["spec"]["activeDeadlineSeconds"], Value::Null, "{}", updated.body);
}

#[tokio::test]
async fn a_webhook_changes_the_replicas_of_a_scale() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|request| {
        let replicas = request["object"]["spec"]["replicas"].as_i64().unwrap_or_default();
        let patch = json!([{"op": "replace", "path": "/spec/replicas", "value": replicas.min(3)}]);
        json!({"allowed": true, "patchType": "JSONPatch", "patch": BASE64_STANDARD.encode(patch.to_string())})
    })
    .await;
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let template =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let spec = json!({"selector": {"matchLabels": {"a": "b"}}, "template": template});
    let made = server.post(deployments, json!({"metadata": {"name": "d"}, "spec": spec})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let rule = json!({"operations": ["UPDATE"], "apiGroups": ["apps"], "apiVersions": ["v1"],
        "resources": ["deployments/scale"]});
    configure(&server, "mutating", webhook.configuration(json!({"rules": [rule]}))).await;
    for (sent, stored) in [(9, 3), (2, 2), (0, 0)] {
        let scaled =
            server.merge(&format!("{deployments}/d/scale"), json!({"spec": {"replicas": sent}})).await;
        assert_eq!(scaled.code, 200, "{}", scaled.body);
        assert_eq!(
            (&scaled.body["kind"], &scaled.body["spec"]["replicas"]),
            (&"Scale".into(), &stored.into())
        );
        let deployment = server.get(&format!("{deployments}/d")).await.body;
        assert_eq!(deployment["spec"]["replicas"], stored, "{deployment}");
    }
    let kinds: Vec<Value> =
        webhook.requests().iter().map(|request| request["object"]["kind"].clone()).collect();
    assert_eq!(kinds, ["Scale", "Scale", "Scale"]);
}

#[tokio::test]
async fn match_conditions_select_requests() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|_| json!({"allowed": false})).await;
    let conditions = json!({"matchConditions": [
        {"name": "name", "expression": "object.metadata.name != 'skip-me'"},
        {"name": "user", "expression": "request.userInfo.username == 'admin' && oldObject == null"},
        {"name": "may", "expression": "authorizer.requestResource.check('create').allowed()"},
    ]});
    configure(&server, "validating", webhook.configuration(conditions)).await;
    assert_eq!(server.post(MAPS, map("skip-me")).await.code, 201);
    assert_eq!(server.post(MAPS, map("other")).await.code, 400);
    assert_eq!(webhook.requests().len(), 1);
    let path = format!("{CONFIGURATIONS}/validatingwebhookconfigurations/test");
    assert_eq!(server.delete(&path, json!({})).await.code, 200);
    let failing = json!({"matchConditions": [{"name": "a", "expression": "object.none.x"}]});
    let made = webhook.configuration(failing);
    assert_eq!(
        server.post(&format!("{CONFIGURATIONS}/validatingwebhookconfigurations"), made).await.code,
        201
    );
    let refused = server.post(MAPS, map("third")).await;
    assert_eq!(refused.code, 403, "{}", refused.body);
    assert!(refused.body["message"].as_str().unwrap().contains("no such key: none"), "{}", refused.body);
}

#[tokio::test]
async fn subresources_with_objects_of_their_own_are_sent_to_webhooks() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|request| {
        let sub = request["subResource"].as_str().unwrap_or_default();
        json!({"allowed": !matches!(sub, "attach" | "token"), "status": {"message": "not here"}})
    })
    .await;
    let pods = "/api/v1/namespaces/default/pods";
    let account = json!({"metadata": {"name": "a"}});
    assert_eq!(server.post("/api/v1/namespaces/default/serviceaccounts", account).await.code, 201);
    assert_eq!(server.post(pods, pod("p")).await.code, 201);
    let every = json!({"operations": ["*"], "apiGroups": ["*"], "apiVersions": ["*"], "resources": ["*/*"]});
    configure(&server, "validating", webhook.configuration(json!({"rules": [every]}))).await;
    let binding = json!({"metadata": {"name": "p"}, "target": {"name": "n1"}});
    assert_eq!(server.post(&format!("{pods}/p/binding"), binding).await.code, 201);
    let attach = server.get(&format!("{pods}/p/attach?container=c&stdin=true")).await;
    let message = "admission webhook \"test.example.com\" denied the request: not here";
    assert_eq!((attach.code, &attach.body["message"]), (400, &json!(message)), "{}", attach.body);
    let request = json!({"spec": {"audiences": []}});
    let token = server.post("/api/v1/namespaces/default/serviceaccounts/a/token", request).await;
    assert_eq!((token.code, &token.body["message"]), (400, &json!(message)), "{}", token.body);
    let requests = webhook.requests();
    let of = |sub: &str| requests.iter().find(|request| request["subResource"] == sub).unwrap();
    assert_eq!(of("binding")["kind"], json!({"group": "", "version": "v1", "kind": "Binding"}));
    assert_eq!(of("binding")["object"]["target"]["name"], "n1");
    assert_eq!(of("attach")["operation"], "CONNECT");
    assert_eq!(
        of("attach")["object"],
        json!({"kind": "PodAttachOptions", "apiVersion": "v1", "stdin": true, "container": "c"})
    );
    assert_eq!(of("token")["object"]["kind"], "TokenRequest");
}

#[tokio::test]
async fn reviews_are_sent_to_webhooks_of_their_group() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|request| {
        let user = &request["object"]["spec"]["user"];
        json!({"allowed": user != "eve", "status": {"code": 403, "message": "not her"}})
    })
    .await;
    let rules = json!([{"operations": ["CREATE"], "apiGroups": ["authorization.k8s.io"], "apiVersions": ["v1"],
        "resources": ["subjectaccessreviews"]}]);
    configure(&server, "validating", webhook.configuration(json!({"rules": rules}))).await;
    let reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
    let ask = async |user: &str| {
        let attributes = json!({"verb": "get", "resource": "pods"});
        server.post(reviews, json!({"spec": {"user": user, "resourceAttributes": attributes}})).await
    };
    let refused = ask("eve").await;
    let message = "admission webhook \"test.example.com\" denied the request: not her";
    assert_eq!((refused.code, &refused.body["message"]), (403, &json!(message)), "{}", refused.body);
    let asked = ask("ann").await;
    assert_eq!((asked.code, &asked.body["status"]["allowed"]), (201, &json!(false)), "{}", asked.body);
    let own = json!({"spec": {"resourceAttributes": {"verb": "get", "resource": "pods"}}});
    let own = server.post("/apis/authorization.k8s.io/v1/selfsubjectaccessreviews", own).await;
    assert_eq!((own.code, &own.body["status"]["allowed"]), (201, &json!(true)), "{}", own.body);
    assert_eq!(webhook.requests().len(), 2);
}

#[tokio::test]
async fn a_mutating_webhook_changes_a_review_before_it_is_answered() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|_request| {
        let patch = json!([{"op": "add", "path": "/spec/groups", "value": ["system:masters"]}]);
        json!({"allowed": true, "patchType": "JSONPatch", "patch": BASE64_STANDARD.encode(patch.to_string())})
    })
    .await;
    let rules = json!([{"operations": ["CREATE"], "apiGroups": ["authorization.k8s.io"], "apiVersions": ["v1"],
        "resources": ["*"]}]);
    configure(&server, "mutating", webhook.configuration(json!({"rules": rules}))).await;
    let attributes = json!({"verb": "get", "resource": "pods"});
    let review = json!({"spec": {"user": "ann", "resourceAttributes": attributes}});
    let answer = server.post("/apis/authorization.k8s.io/v1/subjectaccessreviews", review).await;
    assert_eq!((answer.code, &answer.body["status"]["allowed"]), (201, &json!(true)), "{}", answer.body);
    assert_eq!(answer.body["spec"]["groups"], json!(["system:masters"]));
}

#[tokio::test]
async fn a_webhook_for_one_group_of_events_gets_those_of_the_other_group() {
    let server = Fixture::new().await;
    let webhook = Webhook::start(|_request| json!({"allowed": true})).await;
    let rules =
        json!([{"operations": ["*"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["events"]}]);
    configure(&server, "validating", webhook.configuration(json!({"rules": rules}))).await;
    let event = json!({"metadata": {"name": "e"}, "eventTime": "2026-01-01T00:00:00.000000Z", "action": "a",
        "reason": "r", "type": "Normal", "reportingController": "c.example.com/c", "reportingInstance": "i",
        "regarding": {"kind": "Pod", "namespace": "default", "name": "p"}, "note": "n"});
    let made = server.post("/apis/events.k8s.io/v1/namespaces/default/events", event).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let requests = webhook.requests();
    let [request] = requests.as_slice() else { panic!("{requests:?}") };
    assert_eq!(request["resource"], json!({"group": "", "version": "v1", "resource": "events"}));
    assert_eq!(request["requestResource"]["group"], "events.k8s.io");
    assert_eq!(request["object"]["message"], "n");
}
