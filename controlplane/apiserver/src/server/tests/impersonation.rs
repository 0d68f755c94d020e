//! Impersonation, credentials, and the verbs of streams into pods.

use super::*;

const SELF: &str = "/apis/authentication.k8s.io/v1/selfsubjectreviews";
const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";

async fn grant(server: &Fixture, user: &str, rules: Value) {
    let role = json!({"metadata": {"name": user}, "rules": rules});
    assert_eq!(server.post(&format!("{RBAC}/clusterroles"), role).await.code, 201);
    let binding = json!({"metadata": {"name": user},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": user},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}]});
    assert_eq!(server.post(&format!("{RBAC}/clusterrolebindings"), binding).await.code, 201);
}

async fn whoami(server: &Fixture, user: &str, headers: &[(&str, &str)]) -> Answer {
    let mut request = Request::post(SELF);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    server.send(User::new(user, &[]), request.body(Full::from("{}")).unwrap()).await
}

#[tokio::test]
async fn uid_and_extra_values_are_impersonated_with_the_right_to() {
    let server = Fixture::new().await;
    grant(&server, "full", json!([
        {"verbs": ["impersonate"], "apiGroups": [""], "resources": ["users"], "resourceNames": ["ben"]},
        {"verbs": ["impersonate"], "apiGroups": ["authentication.k8s.io"], "resources": ["uids"], "resourceNames": ["7"]},
        {"verbs": ["impersonate"], "apiGroups": ["authentication.k8s.io"], "resources": ["userextras/scopes"],
            "resourceNames": ["view", "edit"]},
    ])).await;
    let good = [
        ("impersonate-user", "ben"),
        ("impersonate-uid", "7"),
        ("impersonate-extra-scopes", "view"),
        ("impersonate-extra-Scopes", "edit"),
    ];
    let answer = whoami(&server, "full", &good).await;
    let expect = json!({"username": "ben", "uid": "7", "groups": ["system:authenticated"],
        "extra": {"scopes": ["view", "edit"]}});
    assert_eq!((answer.code, &answer.body["status"]["userInfo"]), (201, &expect), "{}", answer.body);
    for bad in [
        ("impersonate-uid", "8"),
        ("impersonate-extra-scopes", "admin"),
        ("impersonate-extra-other", "view"),
        ("impersonate-extra-authentication.kubernetes.io%2fnode-name", "n1"),
        ("impersonate-group", "system:masters"),
    ] {
        let refused = whoami(&server, "full", &[("impersonate-user", "ben"), bad]).await;
        assert_eq!(refused.code, 403, "{bad:?}: {}", refused.body);
    }
    for alone in [("impersonate-uid", "7"), ("impersonate-extra-scopes", "view"), ("impersonate-group", "g")]
    {
        assert_eq!(whoami(&server, "full", &[alone]).await.code, 400, "{alone:?}");
    }
    assert_eq!(
        whoami(&server, "full", &[("impersonate-user", "ben"), ("impersonate-user", "root")]).await.code,
        400
    );
    assert_eq!(
        whoami(&server, "full", &[("impersonate-user", "ben"), ("impersonate-other", "x")]).await.code,
        400
    );
}

#[tokio::test]
async fn the_right_to_impersonate_a_user_does_not_include_its_extras() {
    let server = Fixture::new().await;
    grant(&server, "some", json!([{"verbs": ["impersonate"], "apiGroups": [""], "resources": ["users"]}]))
        .await;
    assert_eq!(whoami(&server, "some", &[("impersonate-user", "ben")]).await.code, 201);
    let forged = [
        ("impersonate-user", "ben"),
        ("impersonate-extra-authentication.kubernetes.io%2Fcredential-id", "JTI=x"),
    ];
    assert_eq!(whoami(&server, "some", &forged).await.code, 403);
}

/// The rules for a mode: for these values of a resource, and for lists of config maps.
fn constrained(mode: &str, resource: &str, names: Value) -> Value {
    json!([
        {"verbs": [format!("impersonate:{mode}")], "apiGroups": ["authentication.k8s.io"], "resources": [resource],
            "resourceNames": names},
        {"verbs": [format!("impersonate-on:{mode}:list")], "apiGroups": [""], "resources": ["configmaps"]},
    ])
}

async fn get_as(server: &Fixture, user: User, headers: &[(&str, &str)], path: &str) -> Answer {
    let mut request = Request::get(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    server.send(user, request.body(Full::default()).unwrap()).await
}

#[tokio::test]
async fn constrained_impersonation_is_for_the_allowed_requests_only() {
    let server = Fixture::new().await;
    grant(&server, "agent", constrained("user-info", "users", json!(["ben"]))).await;
    let reads =
        json!([{"verbs": ["get", "list"], "apiGroups": [""], "resources": ["configmaps", "secrets"]}]);
    grant(&server, "ben", reads).await;
    let ask = async |headers: &[(&str, &str)], path: &str| {
        get_as(&server, User::new("agent", &[]), headers, path).await
    };
    let ben = ("impersonate-user", "ben");
    assert_eq!(ask(&[ben], CONFIG_MAPS).await.code, 200);
    for path in [format!("{CONFIG_MAPS}/a").as_str(), "/api/v1/namespaces/default/secrets"] {
        let refused = ask(&[ben], path).await;
        let message = refused.body["message"].as_str().unwrap();
        assert!(refused.code == 403 && message.contains("cannot impersonate-on:user-info:"), "{message}");
    }
    for other in [
        ("impersonate-group", "g"),
        ("impersonate-uid", "7"),
        ("impersonate-extra-acme.io%2Fa", "b"),
        ("impersonate-extra-scopes", "b"),
    ] {
        assert_eq!(ask(&[ben, other], CONFIG_MAPS).await.code, 403, "{other:?}");
    }
    assert_eq!(ask(&[("impersonate-user", "ann")], CONFIG_MAPS).await.code, 403);
    let server = server.again_with(|config| config.features.constrained_impersonation = false).await;
    let refused = get_as(&server, User::new("agent", &[]), &[ben], CONFIG_MAPS).await;
    let message = refused.body["message"].as_str().unwrap();
    assert!(message.contains("cannot impersonate resource \"users\""), "{message}");
}

#[tokio::test]
async fn the_mode_of_users_is_not_for_accounts_nodes_and_administrators() {
    let server = Fixture::new().await;
    let any = json!([{"verbs": ["impersonate:user-info", "impersonate-on:user-info:list", "impersonate-on:user-info:create"],
        "apiGroups": ["*"], "resources": ["*"]}]);
    grant(&server, "agent", any).await;
    let ben = ("impersonate-user", "ben");
    let groups = ["a", "b", "c", "d"].map(|group| ("impersonate-group", group));
    let [a, b, c, d] = groups;
    let answer = whoami(&server, "agent", &[ben, a, b, c, d, ("impersonate-extra-acme.io%2Fa", "b")]).await;
    let expect = json!({"username": "ben", "groups": ["a", "b", "c", "d", "system:authenticated"],
        "extra": {"acme.io/a": ["b"]}});
    assert_eq!((answer.code, &answer.body["status"]["userInfo"]), (201, &expect), "{}", answer.body);
    for refused in [
        vec![("impersonate-user", "system:node:n1")],
        vec![("impersonate-user", "system:serviceaccount:default:default")],
        vec![ben, ("impersonate-group", "system:masters")],
        vec![ben, ("impersonate-extra-scopes", "b")],
    ] {
        assert_eq!(whoami(&server, "agent", &refused).await.code, 403, "{refused:?}");
    }
}

#[tokio::test]
async fn an_account_impersonates_only_the_node_of_its_pod() {
    let server = Fixture::new().await;
    let name = "system:serviceaccount:default:agent";
    let mut rules = constrained("associated-node", "nodes", json!([]));
    rules[0].as_object_mut().unwrap().remove("resourceNames");
    grant(&server, name, rules).await;
    let lists = json!([{"verbs": ["list"], "apiGroups": [""], "resources": ["configmaps"]}]);
    grant(&server, "system:node:n1", lists.clone()).await;
    let mut agent = User::new(name, &["system:serviceaccounts"]);
    agent.extra.insert("authentication.kubernetes.io/node-name".to_owned(), vec!["n1".to_owned()]);
    let node = |name: &'static str| [("impersonate-user", name)];
    assert_eq!(get_as(&server, agent.clone(), &node("system:node:n1"), CONFIG_MAPS).await.code, 200);
    // Refused: another node, another user, an account without a node, and another request.
    grant(&server, "system:node:n2", lists).await;
    assert_eq!(get_as(&server, agent.clone(), &node("system:node:n2"), CONFIG_MAPS).await.code, 403);
    assert_eq!(get_as(&server, agent.clone(), &node("ben"), CONFIG_MAPS).await.code, 403);
    let elsewhere = User::new(name, &["system:serviceaccounts"]);
    assert_eq!(get_as(&server, elsewhere, &node("system:node:n1"), CONFIG_MAPS).await.code, 403);
    assert_eq!(get_as(&server, agent, &node("system:node:n1"), &format!("{CONFIG_MAPS}/a")).await.code, 403);
}

#[tokio::test]
async fn impersonated_nodes_and_accounts_have_their_groups() {
    let server = Fixture::new().await;
    let review = |mode: &str| {
        json!({"verbs": [format!("impersonate-on:{mode}:create")], "apiGroups": ["authentication.k8s.io"],
            "resources": ["selfsubjectreviews"]})
    };
    for (user, mode, resource, name) in
        [("nodes", "arbitrary-node", "nodes", "n1"), ("accounts", "serviceaccount", "serviceaccounts", "web")]
    {
        let mut rules = constrained(mode, resource, json!([name]));
        rules[1] = review(mode);
        grant(&server, user, rules).await;
    }
    let groups = async |user: &str, impersonated: &str| {
        let answer = whoami(&server, user, &[("impersonate-user", impersonated)]).await;
        (answer.code, answer.body["status"]["userInfo"]["groups"].clone())
    };
    let node = json!(["system:nodes", "system:authenticated"]);
    assert_eq!(groups("nodes", "system:node:n1").await, (201, node));
    assert_eq!(groups("nodes", "system:node:n2").await.0, 403);
    let account = json!(["system:serviceaccounts", "system:serviceaccounts:default", "system:authenticated"]);
    assert_eq!(groups("accounts", "system:serviceaccount:default:web").await, (201, account));
    assert_eq!(groups("accounts", "system:serviceaccount:default:other").await.0, 403);
}

#[tokio::test]
async fn a_stream_into_a_pod_needs_the_verb_create_with_every_method() {
    let server = Fixture::new().await;
    server.post(PODS, pod("p")).await;
    let streams = ["pods/exec", "pods/attach", "pods/portforward"];
    for (user, verbs) in
        [("reader", json!(["get"])), ("maker", json!(["create"])), ("both", json!(["get", "create"]))]
    {
        grant(&server, user, json!([{"verbs": verbs, "apiGroups": [""], "resources": streams}])).await;
    }
    for sub in ["exec", "attach", "portforward"] {
        let path = format!("{PODS}/p/{sub}?command=id&stdout=1&ports=80");
        let ask = |user: &'static str, method: &'static str| {
            let request = Request::builder().method(method).uri(&path).header("upgrade", "websocket");
            server.send(User::new(user, &[]), request.body(Full::default()).unwrap())
        };
        let refused = ask("reader", "GET").await;
        let message = refused.body["message"].as_str().unwrap();
        assert!(refused.code == 403 && message.contains("cannot create resource"), "{sub}: {message}");
        // The pod has no node, so allowed requests fail with the error about the missing node.
        for (user, method, code) in
            [("reader", "POST", 403), ("maker", "GET", 403), ("maker", "POST", 400), ("both", "GET", 400)]
        {
            assert_eq!(ask(user, method).await.code, code, "{sub}: {user} {method}");
        }
    }
}

#[tokio::test]
async fn a_stream_through_the_proxy_of_a_node_needs_create() {
    let server = Fixture::new().await;
    for (user, verbs) in [("reader", json!(["get"])), ("both", json!(["get", "create"]))] {
        let rules = json!([{"verbs": verbs, "apiGroups": [""], "resources": ["nodes/proxy"]}]);
        grant(&server, user, rules).await;
    }
    let path = "/api/v1/nodes/n/proxy/exec/default/p/c?command=id&output=1";
    let ask = |user: &'static str, upgrade: bool| {
        let mut request = Request::get(path);
        if upgrade {
            request = request.header("upgrade", "websocket");
        }
        server.send(User::new(user, &[]), request.body(Full::default()).unwrap())
    };
    assert_eq!(ask("reader", true).await.code, 403);
    // There is no such node.
    assert_eq!(ask("reader", false).await.code, 404);
    assert_eq!(ask("both", true).await.code, 404);
}

#[tokio::test]
async fn a_review_shows_the_credential() {
    let server = Fixture::new().await;
    let made =
        server.post("/api/v1/namespaces/default/serviceaccounts/default/token", json!({"spec": {}})).await;
    let token = made.body["status"]["token"].clone();
    let review = json!({"spec": {"token": token}});
    let answer = server.post("/apis/authentication.k8s.io/v1/tokenreviews", review).await;
    let extra = &answer.body["status"]["user"]["extra"]["authentication.kubernetes.io/credential-id"];
    assert!(extra[0].as_str().unwrap().starts_with("JTI="), "{}", answer.body);
    let other = json!({"spec": {"token": token, "audiences": ["other"]}});
    let answer = server.post("/apis/authentication.k8s.io/v1/tokenreviews", other).await;
    assert_ne!(answer.body["status"]["authenticated"], true);
}

#[tokio::test]
async fn the_unread_events_of_an_impersonated_user_count_for_the_caller() {
    let server = Fixture::new().await;
    let [caller, other] =
        ["default:default", "other:other"].map(|name| format!("system:serviceaccount:{name}"));
    let impersonates = json!({"verbs": ["impersonate"], "apiGroups": [""], "resources": ["serviceaccounts"]});
    let watches = json!({"verbs": ["watch"], "apiGroups": [""], "resources": ["configmaps"]});
    grant(&server, &caller, json!([impersonates])).await;
    grant(&server, &other, json!([watches])).await;
    let made =
        server.post("/api/v1/namespaces/default/serviceaccounts/default/token", json!({"spec": {}})).await;
    let token = made.body["status"]["token"].as_str().unwrap();
    let request = Request::get("/api/v1/namespaces/default/configmaps?watch=1")
        .header("authorization", format!("Bearer {token}"))
        .header("impersonate-user", &other);
    let watch = server.api.handle(request.body(Full::<Bytes>::default()).unwrap(), None).await;
    assert_eq!(watch.status(), 200);
    let map = json!({"metadata": {"name": "large"}, "data": {"a": "x".repeat(500_000)}});
    assert_eq!(server.post("/api/v1/namespaces/default/configmaps", map).await.code, 201);
    let permit = server.api.state.in_flight.watch(&User::new(&caller, &[]), 1, 0).unwrap().unwrap();
    let counts = async || permit.reader().bytes_of_owner() >= 500_000;
    eventually_async("the event counts", 10, counts).await;
    drop(watch);
}
