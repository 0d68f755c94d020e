//! Authentication and authorization.

use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use coracle_token_signer::{TokenSigner, testing::FakeSigner};

use super::*;
use crate::authn::token_keys::TokenKeys;

#[tokio::test]
async fn an_external_signer_signs_and_its_new_keys_are_fetched_for_tokens_of_the_issuer() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("signer.sock").display().to_string();
    let behaviour = FakeSigner::serve(&socket);
    let signer = TokenSigner::connect(&socket, CancellationToken::new()).await.unwrap();
    let server = Fixture::new().await.again_with(|config| config.token_signer = Some(signer)).await;
    let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let asked = json!({"spec": {"expirationSeconds": 86_400}});
    let answer = server.post(path, asked.clone()).await;
    assert_eq!((answer.code, answer.body["spec"]["expirationSeconds"].as_i64()), (201, Some(7200)));
    let status = async |token: &str| {
        let header = format!("Bearer {token}");
        let request = Request::get("/api/v1").header("authorization", header);
        server.api.handle(request.body(Full::<Bytes>::default()).unwrap(), None).await.status()
    };
    let token = answer.body["status"]["token"].as_str().unwrap().to_owned();
    assert_eq!(status(&token).await, 200);
    let answer = server.get("/openid/v1/jwks").await;
    assert_eq!(answer.headers["content-type"], "application/jwk-set+json");
    assert_eq!(answer.headers["cache-control"], "no-cache, private", "the signer changes its keys");
    let set = answer.body;
    assert_eq!((&set["keys"][0]["kid"], &set["keys"][0]["alg"]), (&json!("a"), &json!("ES256")));
    // Another API server gets a token that is signed with a new key.
    let other = TokenSigner::connect(&socket, CancellationToken::new()).await.unwrap();
    behaviour.lock().unwrap().published.push(("b".to_owned(), false));
    behaviour.lock().unwrap().key_id = "b".to_owned();
    let claims = token.split('.').nth(1).map(|claims| BASE64_URL_SAFE_NO_PAD.decode(claims).unwrap());
    let mut claims: Value = serde_json::from_slice(&claims.unwrap()).unwrap();
    let renewed = other.sign(&claims).await.unwrap();
    claims["iss"] = "https://elsewhere".into();
    let foreign = other.sign(&claims).await.unwrap();
    let before = behaviour.lock().unwrap().fetches;
    assert_eq!(status(&foreign).await, 401);
    assert_eq!(behaviour.lock().unwrap().fetches, before, "a token of another issuer causes no call");
    assert_eq!(status(&renewed).await, 200);
    assert_eq!(behaviour.lock().unwrap().fetches, before + 1);
    behaviour.lock().unwrap().is_forging = true;
    assert_eq!(server.post(path, asked).await.code, 500);
}

#[tokio::test]
async fn requests_that_no_authorizer_allows_are_refused() {
    let server = Fixture::new().await;
    let refused = server.get_as(User::new("bob", &[]), PODS).await;
    assert_eq!(
        (refused.code, refused.body["message"].as_str().unwrap()),
        (
            403,
            "pods is forbidden: User \"bob\" cannot list resource \"pods\" in API group \"\" in the namespace \"default\""
        )
    );
    assert_eq!(server.get_as(User::new("bob", &[]), "/api/v1").await.code, 200);
    let anonymous = |path: &str| Request::get(path.to_owned()).body(Full::<Bytes>::default()).unwrap();
    for (path, code) in [("/readyz", 200), ("/version", 200), ("/api/v1", 403), (PODS, 403)] {
        assert_eq!(server.api.handle(anonymous(path), None).await.status(), code, "{path}");
    }
    for (token, code) in [("secret", 200), ("wrong", 401)] {
        let mut request = anonymous(PODS);
        request.headers_mut().insert("authorization", format!("Bearer {token}").parse().unwrap());
        assert_eq!(server.api.handle(request, None).await.status(), code, "{token}");
    }
}

#[tokio::test]
async fn passwords_identify_users_if_there_is_a_file_and_wrong_ones_are_limited() {
    let request = |path: &str, header: &str| {
        let request = Request::get(path).header("authorization", header);
        request.body(Full::<Bytes>::default()).unwrap()
    };
    let (right, wrong) = ("Basic ZXZlOnB3", "Basic ZXZlOnB4");
    let off = Fixture::new().await;
    let reply = off.api.handle(request("/version", right), None).await;
    assert!(reply.status() == 401 && !reply.headers().contains_key("www-authenticate"));
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("passwords");
    std::fs::write(&file, "pw,eve,7,system:masters\n").unwrap();
    let api = open_with(directory.path(), |config| config.password_file = Some(file)).await;
    assert_eq!(api.handle(request(PODS, right), None).await.status(), 200);
    let challenged = async |path: &str, header: &str| {
        let reply = api.handle(request(path, header), None).await;
        let challenge = reply.headers().get("www-authenticate").cloned();
        challenge.is_some_and(|text| text == "Basic realm=\"kubernetes-master\"") && reply.status() == 401
    };
    // A request with a wrong password is refused. It does not count as anonymous. A password is not accepted as a
    // token.
    assert!(challenged("/version", wrong).await && challenged("/version", "Bearer eve:pw").await);
    let audiences = api.state.authenticators.tokens.audiences.clone();
    assert_eq!(api.state.authenticators.token_user(&api.state.cache, "eve:pw", &audiences).await, None);
    let mut last = api.handle(request(PODS, wrong), None).await;
    while last.status() == 401 {
        last = api.handle(request(PODS, wrong), None).await;
    }
    assert!(last.status() == 429 && last.headers().contains_key("retry-after"));
    assert_eq!(api.handle(request(PODS, "Bearer secret"), None).await.status(), 200);
}

#[tokio::test]
async fn a_node_reads_what_its_pods_need_and_writes_itself_alone() {
    let server = Fixture::new().await;
    server.post("/api/v1/namespaces/default/secrets", json!({"metadata": {"name": "s"}})).await;
    let path = "/api/v1/namespaces/default/secrets/s";
    assert_eq!(server.get_as(node("n1"), path).await.code, 403);
    let mut user = pod("p");
    user["spec"]["volumes"] = json!([{"name": "v", "secret": {"secretName": "s"}}]);
    server.post(PODS, user).await;
    server
        .post(&format!("{PODS}/p/binding"), json!({"metadata": {"name": "p"}, "target": {"name": "n1"}}))
        .await;
    assert_eq!(server.get_as(node("n1"), path).await.code, 200);
    assert_eq!(server.get_as(node("n2"), path).await.code, 403);
    let request = |name: &str| {
        let body = json!({"metadata": {"name": name}}).to_string();
        Request::post("/api/v1/nodes").body(Full::from(body)).unwrap()
    };
    assert_eq!(server.send(node("n1"), request("n1")).await.code, 201);
    assert_eq!(server.send(node("n1"), request("n2")).await.code, 403);
    let delete = || Request::delete(format!("{PODS}/p")).body(Full::default()).unwrap();
    assert_eq!(server.send(node("n2"), delete()).await.code, 403);
    assert_eq!(server.send(node("n1"), delete()).await.code, 200);
}

#[tokio::test]
async fn a_token_is_invalid_after_its_pod_is_deleted() {
    let server = Fixture::new().await;
    let made = server.post(PODS, pod("p")).await.body;
    let bound = json!({"kind": "Pod", "apiVersion": "v1", "name": "p", "uid": made["metadata"]["uid"]});
    let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let answer = server.post(path, json!({"spec": {"boundObjectRef": bound}})).await;
    assert_eq!(answer.code, 201, "{}", answer.body);
    let token = answer.body["status"]["token"].as_str().unwrap().to_owned();
    let request = || {
        let header = format!("Bearer {token}");
        Request::get("/api/v1").header("authorization", header).body(Full::<Bytes>::default()).unwrap()
    };
    assert_eq!(server.api.handle(request(), None).await.status(), 200);
    server.delete(&format!("{PODS}/p"), json!({"gracePeriodSeconds": 0})).await;
    assert_eq!(server.api.handle(request(), None).await.status(), 401);
}

#[tokio::test]
async fn a_node_gets_tokens_of_its_own_pods_by_their_uid() {
    let server = Fixture::new().await;
    let uid = server.post(PODS, pod("p")).await.body["metadata"]["uid"].clone();
    let binding = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n1"}});
    server.post(&format!("{PODS}/p/binding"), binding).await;
    let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let own =
        json!({"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": uid}}});
    let without_uid = json!({"spec": {"boundObjectRef": {"apiVersion": "v1", "kind": "Pod", "name": "p"}}});
    for (of, request, code) in
        [("n1", &own, 201), ("n1", &without_uid, 403), ("n1", &json!({"spec": {}}), 403), ("n2", &own, 403)]
    {
        let request = Request::post(path).body(Full::from(request.to_string())).unwrap();
        let answer = server.send(node(of), request).await;
        assert_eq!(answer.code, code, "{of}: {}", answer.body);
    }
}

#[tokio::test]
async fn the_range_of_a_node_is_not_chosen_by_the_node() {
    let server = Fixture::new().await;
    let range = json!({"podCIDR": "10.9.0.0/24", "podCIDRs": ["10.9.0.0/24"]});
    let request = |method: &str, path: &str, body: Value| {
        let media = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
        let request = Request::builder().method(method).uri(path).header("content-type", media);
        request.body(Full::from(body.to_string())).unwrap()
    };
    let (all, own) = ("/api/v1/nodes", "/api/v1/nodes/n1");
    let with_range = json!({"metadata": {"name": "n1"}, "spec": range});
    let send = |request| server.send(node("n1"), request);
    assert_eq!(send(request("POST", all, with_range)).await.code, 403);
    assert_eq!(send(request("POST", all, json!({"metadata": {"name": "n1"}}))).await.code, 201);
    assert_eq!(send(request("PATCH", own, json!({"spec": range}))).await.code, 403);
    assert_eq!(server.merge(own, json!({"spec": range})).await.code, 200);
    // A node may change other fields of its Node after the range is set.
    let other = json!({"metadata": {"annotations": {"a": "b"}}});
    for path in [own, "/api/v1/nodes/n1/status"] {
        assert_eq!(send(request("PATCH", path, other.clone())).await.code, 200, "{path}");
    }
}

#[tokio::test]
async fn a_review_of_a_very_long_token_is_answered_without_authentication() {
    let server = Fixture::new().await;
    let review = async |bytes: usize| {
        let spec = json!({"token": "x".repeat(bytes)});
        let answer = server.post("/apis/authentication.k8s.io/v1/tokenreviews", json!({"spec": spec})).await;
        assert_eq!((answer.code, &answer.body["status"]["authenticated"]), (201, &Value::Null));
        answer.body["status"]["error"].clone()
    };
    assert_eq!(review(64 << 10).await, "invalid bearer token");
    assert_eq!(review((64 << 10) + 1).await, "the token has more than 65536 bytes");
}

#[tokio::test]
async fn a_token_is_requested_for_the_account_with_this_uid() {
    let server = Fixture::new().await;
    let account = "/api/v1/namespaces/default/serviceaccounts/default";
    let uid = server.get(account).await.body["metadata"]["uid"].clone();
    let path = format!("{account}/token");
    let made = server.post(&path, json!({"metadata": {"uid": uid}, "spec": {}})).await;
    assert_eq!((made.code, &made.body["metadata"]["uid"]), (201, &uid), "{}", made.body);
    let refused = server.post(&path, json!({"metadata": {"uid": "former"}, "spec": {}})).await;
    assert_eq!((refused.code, &refused.body["reason"]), (409, &json!("Conflict")), "{}", refused.body);
    let start = "Operation cannot be fulfilled on TokenRequest.authentication.k8s.io \"default\": the UID in the token \
        request (former) does not match";
    assert!(refused.body["message"].as_str().unwrap().starts_with(start), "{}", refused.body);
}

#[tokio::test]
async fn a_review_of_a_token_names_only_audiences_of_the_token() {
    let server = Fixture::new().await;
    let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let made = server.post(path, json!({"spec": {"audiences": ["a", "b"]}})).await;
    let review = async |audiences: Value| {
        let spec = json!({"token": made.body["status"]["token"], "audiences": audiences});
        let answer = server.post("/apis/authentication.k8s.io/v1/tokenreviews", json!({"spec": spec})).await;
        answer.body["status"].clone()
    };
    assert_eq!(review(json!(["c", "b"])).await["audiences"], json!(["b"]));
    assert_eq!(review(json!(["b", "a"])).await["audiences"], json!(["b", "a"]));
    assert_ne!(review(json!(["c", "d"])).await["authenticated"], true);
    let many: Vec<String> = (0..40).map(|number| number.to_string()).chain(["a".to_owned()]).collect();
    assert_ne!(review(json!(many)).await["authenticated"], true);
}

#[tokio::test]
async fn a_review_checks_the_token_once_for_all_audiences() {
    let hook = crate::remote::tests::Hook::start(|_body| {
        let status = json!({"authenticated": true, "user": {"username": "ann"}, "audiences": ["b", "d"]});
        (200, json!({"status": status}).to_string())
    })
    .await;
    let directory = tempfile::tempdir().unwrap();
    let webhook = crate::authn::TokenWebhookConfig {
        file: hook.file(),
        cache: Duration::from_secs(120),
        version: "v1".to_owned(),
    };
    let api = open_with(directory.path(), |config| config.token_webhook = Some(webhook)).await;
    let server = Fixture { api, directory };
    let spec = json!({"token": "t", "audiences": ["a", "b", "c", "d"]});
    let answer = server.post("/apis/authentication.k8s.io/v1/tokenreviews", json!({"spec": spec})).await;
    assert_eq!(answer.body["status"]["audiences"], json!(["b", "d"]), "{}", answer.body);
    assert_eq!(hook.count(), 1);
}

#[tokio::test]
async fn the_use_of_a_token_in_a_secret_is_recorded_and_an_invalid_one_is_refused() {
    let server = Fixture::new().await;
    let account = server.get("/api/v1/namespaces/default/serviceaccounts/default").await.body;
    let claim = |name: &str| format!("kubernetes.io/serviceaccount/{name}");
    let TokenKeys::Own(key) = &server.api.state.authenticators.tokens.keys else { panic!("no key") };
    let create = async |name: &str| {
        let payload = json!({
            "iss": "kubernetes/serviceaccount",
            claim("namespace"): "default",
            claim("secret.name"): name,
            claim("service-account.name"): "default",
            claim("service-account.uid"): account["metadata"]["uid"],
        });
        let token = key.sign(&json!({"alg": "ES256", "typ": "JWT"}), &payload).unwrap();
        let secret = json!({
            "metadata": {"name": name, "annotations": {"kubernetes.io/service-account.name": "default"}},
            "type": "kubernetes.io/service-account-token",
            "stringData": {"token": token},
        });
        assert_eq!(server.post("/api/v1/namespaces/default/secrets", secret).await.code, 201);
        token
    };
    let (token, other) = (create("old").await, create("other").await);
    let path = "/api/v1/namespaces/default/secrets/old";
    let request = |token: &str| {
        let header = format!("Bearer {token}");
        Request::get("/api/v1").header("authorization", header).body(Full::<Bytes>::default()).unwrap()
    };
    let reply = server.api.handle(request(&token), None).await;
    assert!(reply.status() == 200 && !reply.headers().contains_key("warning"));
    let named = json!({"secrets": [{"name": "old"}]});
    assert_eq!(server.merge("/api/v1/namespaces/default/serviceaccounts/default", named).await.code, 200);
    let reply = server.api.handle(request(&token), None).await;
    assert!(reply.headers()["warning"].to_str().unwrap().contains("auto-generated secret-based tokens"));
    let labelled = async |path: &str| {
        eventually_async("the token has a label", 10, async || {
            Some(server.get(path).await.body).filter(|used| used["metadata"]["labels"].is_object())
        })
        .await
    };
    let used = labelled(path).await;
    let day = used["metadata"]["labels"]["kubernetes.io/legacy-token-last-used"].as_str().expect("a day");
    assert!(day.len() == 10 && *jiff::Timestamp::now().to_string() >= *day, "{day}");
    let version = used["metadata"]["resourceVersion"].clone();
    assert_eq!(server.api.handle(request(&token), None).await.status(), 200);
    // Uses are recorded in the order of their requests.
    assert_eq!(server.api.handle(request(&other), None).await.status(), 200);
    labelled("/api/v1/namespaces/default/secrets/other").await;
    assert_eq!(
        server.get(path).await.body["metadata"]["resourceVersion"],
        version,
        "the label changes only once a day"
    );
    let invalid = json!({"metadata": {"labels": {"kubernetes.io/legacy-token-invalid-since": "2026-11-23"}}});
    assert_eq!(server.merge(path, invalid).await.code, 200);
    assert_eq!(server.api.handle(request(&token), None).await.status(), 401);
}

#[tokio::test]
async fn tokens_name_the_node_of_their_pod_and_end_with_a_node_that_they_are_bound_to() {
    let server = Fixture::new().await;
    let node = json!({"metadata": {"name": "n1"}});
    let uid = server.post("/api/v1/nodes", node).await.body["metadata"]["uid"].clone();
    server.post(PODS, pod("p")).await;
    let binding = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n1"}});
    server.post(&format!("{PODS}/p/binding"), binding).await;
    let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
    for (reference, outlives) in
        [(json!({"kind": "Pod", "name": "p"}), true), (json!({"kind": "Node", "name": "n1"}), false)]
    {
        server.post("/api/v1/nodes", json!({"metadata": {"name": "n1", "uid": uid}})).await;
        let uid = server.get("/api/v1/nodes/n1").await.body["metadata"]["uid"].clone();
        let made = server.post(path, json!({"spec": {"boundObjectRef": reference}})).await;
        let review = json!({"spec": {"token": made.body["status"]["token"]}});
        let reviews = "/apis/authentication.k8s.io/v1/tokenreviews";
        let user = server.post(reviews, review.clone()).await.body["status"]["user"].clone();
        assert_eq!(user["extra"]["authentication.kubernetes.io/node-name"], json!(["n1"]), "{user}");
        assert_eq!(user["extra"]["authentication.kubernetes.io/node-uid"], json!([uid]));
        server.delete("/api/v1/nodes/n1", json!({})).await;
        let status = server.post(reviews, review).await.body["status"].clone();
        assert_eq!(status["authenticated"] == true, outlives, "{reference}: {status}");
    }
}

#[tokio::test]
async fn anonymous_requests_are_limited_to_paths() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("authentication.yaml");
    let text = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n\
        anonymous: {enabled: true, conditions: [{path: /livez}]}\n";
    std::fs::write(&file, text).unwrap();
    let api = open_with(directory.path(), |config| config.authentication_file = Some(file)).await;
    for (path, code) in [("/livez", 200), ("/readyz", 401), ("/livez/", 401), ("/version", 401)] {
        let request = Request::get(path).body(Full::<Bytes>::default()).unwrap();
        assert_eq!(api.handle(request, None).await.status(), code, "{path}");
    }
}

#[tokio::test]
async fn a_changed_configuration_of_authentication_is_used_and_an_invalid_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("authentication.yaml");
    let write = |rest: &str| {
        let text = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n";
        let new = directory.path().join("new");
        std::fs::write(&new, format!("{text}{rest}\n")).unwrap();
        std::fs::rename(&new, &file).unwrap();
    };
    write("anonymous: {enabled: false}");
    let path = file.clone();
    let api = open_with(directory.path(), |config| config.authentication_file = Some(path)).await;
    let code = async || {
        let request = Request::get("/livez").body(Full::<Bytes>::default()).unwrap();
        api.handle(request, None).await.status()
    };
    let reloads = async |status: &str| {
        let name = "apiserver_authentication_config_controller_automatic_reloads_total";
        let start = format!("{name}{{status=\"{status}\"}} ");
        // The server tries a file that it cannot use again after each change in the directory.
        let is_counted = |line: &str| line.strip_prefix(&start).is_some_and(|count| count != "0");
        let metrics = async || {
            let request = Request::get("/metrics").body(Full::<Bytes>::default()).unwrap();
            let body = api.handle(request, Some(admin())).await.into_body();
            String::from_utf8(body.collect().await.unwrap().to_bytes().into()).unwrap()
        };
        eventually_async(&start, 10, async || metrics().await.lines().any(is_counted)).await;
    };
    assert_eq!(code().await, 401);
    write("anonymous: {enabled: true, conditions: [{path: /livez}]}");
    reloads("success").await;
    assert_eq!(code().await, 200);
    write("anonymous: {enabled: maybe}");
    reloads("failure").await;
    assert_eq!(code().await, 200);
}

#[tokio::test]
async fn tokens_of_a_former_issuer_are_valid_while_it_is_configured() {
    const OLD: &str = "https://kubernetes.default.svc";
    const NEW: &str = "https://tokens.example.com";
    let key = KeyPair::generate().unwrap().serialize_der();
    let with = |server: Fixture, issuers: &[&str]| {
        let (key, issuers) = (key.clone(), issuers.iter().map(|&one| one.to_owned()).collect());
        server.again_with(move |config| {
            config.service_account_key = key;
            config.options.token_issuers = issuers;
            config.options.keys_url = Some("https://keys.example.com".to_owned());
            config.options.max_token_seconds = Some(7200);
        })
    };
    let server = with(Fixture::new().await, &[]).await;
    let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
    let made = server.post(path, json!({"spec": {}})).await;
    let review = json!({"spec": {"token": made.body["status"]["token"]}});
    let reviews = "/apis/authentication.k8s.io/v1/tokenreviews";
    let server = with(server, &[NEW, OLD]).await;
    assert_eq!(server.post(reviews, review.clone()).await.body["status"]["authenticated"], true);
    let made = server.post(path, json!({"spec": {"expirationSeconds": 10_000}})).await;
    assert_eq!(made.body["spec"]["expirationSeconds"], 7200);
    let claims = made.body["status"]["token"].as_str().unwrap().split('.').nth(1).unwrap().to_owned();
    let claims: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(claims).unwrap()).unwrap();
    assert_eq!((&claims["iss"], &claims["aud"]), (&json!(NEW), &json!([NEW, OLD])));
    let document = server.get("/.well-known/openid-configuration").await.body;
    let keys = &document["jwks_uri"];
    assert_eq!((&document["issuer"], keys), (&json!(NEW), &json!("https://keys.example.com")));
    let server = with(server, &[NEW]).await;
    assert_ne!(server.post(reviews, review).await.body["status"]["authenticated"], true);
}

#[tokio::test]
async fn the_default_token_of_a_pod_can_be_extended() {
    let claims = async |server: &Fixture, spec: Value| {
        let path = "/api/v1/namespaces/default/serviceaccounts/default/token";
        let made = server.post(path, json!({"spec": spec})).await;
        assert_eq!(made.code, 201, "{}", made.body);
        let payload = made.body["status"]["token"].as_str().unwrap().split('.').nth(1).unwrap().to_owned();
        let claims: Value = serde_json::from_slice(&BASE64_URL_SAFE_NO_PAD.decode(payload).unwrap()).unwrap();
        let lasts = claims["exp"].as_i64().unwrap() - claims["iat"].as_i64().unwrap();
        let warns = claims["kubernetes.io"]["warnafter"].as_i64();
        (lasts, warns.map(|warns| warns - claims["iat"].as_i64().unwrap()))
    };
    let server = Fixture::new().await;
    assert_eq!(server.post(PODS, pod("p")).await.code, 201);
    let of_pod = json!({"expirationSeconds": 3607, "boundObjectRef": {"kind": "Pod", "apiVersion": "v1", "name": "p"}});
    assert_eq!(claims(&server, of_pod.clone()).await, (365 * 24 * 3600, Some(3607)));
    let with = |field: &str, value: Value| {
        let mut spec = of_pod.clone();
        spec[field] = value;
        spec
    };
    assert_eq!(claims(&server, with("expirationSeconds", 3600.into())).await, (3600, None));
    assert_eq!(claims(&server, with("audiences", json!(["vault"]))).await, (3607, None));
    assert_eq!(claims(&server, with("boundObjectRef", Value::Null)).await, (3607, None));
    let server = server.again_with(|config| config.options.extend_tokens = false).await;
    assert_eq!(claims(&server, of_pod).await, (3607, None));
}

#[tokio::test]
async fn an_issuer_of_settings_excludes_the_configuration_of_authentication() {
    let directory = tempfile::tempdir().unwrap();
    let oidc = crate::OidcConfig {
        issuer_url: "https://issuer.example".to_owned(),
        client_id: "app".to_owned(),
        username_claim: "sub".to_owned(),
        ..crate::OidcConfig::default()
    };
    let single = crate::server::open::single_issuer(&oidc, false).unwrap();
    assert_eq!(single.url, "https://issuer.example");
    assert!(crate::server::open::single_issuer(&oidc, true).is_err());
    let api = open_with(directory.path(), |config| config.oidc = Some(oidc)).await;
    let request = Request::get("/livez").body(Full::<Bytes>::default()).unwrap();
    assert_eq!(api.handle(request, None).await.status(), 200);
}

#[test]
fn a_large_configuration_of_authentication_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("authentication.yaml");
    let text = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\n#";
    for (size, is_allowed) in [(1 << 20, true), ((1 << 20) + 1, false)] {
        std::fs::write(&file, text.to_owned() + &"x".repeat(size - text.len())).unwrap();
        assert_eq!(crate::config::read_authentication(Some(&file)).is_ok(), is_allowed, "{size}");
    }
}

#[tokio::test]
async fn the_day_since_which_legacy_tokens_are_tracked_is_kept() {
    let server = Fixture::new().await;
    let path =
        "/api/v1/namespaces/kube-system/configmaps/kube-apiserver-legacy-service-account-token-tracking";
    let since = server.get(path).await.body["data"]["since"].clone();
    assert!(since.as_str().is_some_and(|day| day.len() == 10), "{since}");
    server.merge(path, json!({"data": {"since": "2026-01-01"}})).await;
    assert_eq!(server.again().await.get(path).await.body["data"]["since"], "2026-01-01");
}
