//! RBAC: permissions, privilege escalation, and the default roles and bindings.

use super::{
    custom_resources::{definition, established},
    *,
};

const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
const API: &str = "rbac.authorization.k8s.io";

fn ann() -> User {
    User::new("ann", &["dev"])
}

fn rule(verbs: &[&str], resources: &[&str]) -> Value {
    json!({"verbs": verbs, "apiGroups": ["", API], "resources": resources})
}

impl Fixture {
    /// A role (without a namespace a cluster role).
    async fn role(&self, namespace: &str, name: &str, rules: Value) {
        let path = at(namespace, "roles");
        let made = self.post(&path, json!({"metadata": {"name": name}, "rules": rules})).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }

    async fn bind(&self, namespace: &str, kind: &str, role: &str, user: &str) {
        let made = self.post(&at(namespace, "rolebindings"), binding(kind, role, user)).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }

    async fn code(&self, user: User, path: &str) -> u16 {
        self.get_as(user, path).await.code
    }

    async fn review(&self, user: User, plural: &str, spec: Value) -> Value {
        let path = format!("/apis/authorization.k8s.io/v1/{plural}");
        self.post_as(user, &path, json!({"spec": spec})).await.body["status"].clone()
    }

    async fn merge_as(&self, user: User, path: &str, body: Value) -> Answer {
        let request = Request::patch(path).header("content-type", "application/merge-patch+json");
        self.send(user, request.body(Full::new(body.to_string().into())).unwrap()).await
    }

    async fn post_as(&self, user: User, path: &str, body: Value) -> Answer {
        let request = Request::post(path).header("content-type", "application/json");
        self.send(user, request.body(Full::new(body.to_string().into())).unwrap()).await
    }
}

fn at(namespace: &str, plural: &str) -> String {
    match namespace {
        "" => format!("{RBAC}/cluster{plural}"),
        namespace => format!("{RBAC}/namespaces/{namespace}/{plural}"),
    }
}

fn binding(kind: &str, role: &str, user: &str) -> Value {
    json!({"metadata": {"name": format!("{role}-{user}").replace(':', "-")},
        "roleRef": {"kind": kind, "name": role}, "subjects": [{"kind": "User", "name": user}]})
}

/// The comparison of many rules may take tenths of a second.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_role_with_many_rules_is_refused_while_too_many_wait_for_a_slot() {
    let server = Fixture::new().await;
    server.role("default", "makers", json!([rule(&["create"], &["roles"])])).await;
    server.bind("default", "Role", "makers", "rules-eve").await;
    let rules: Value = (0..21).map(|_| rule(&["create"], &["roles"])).collect();
    let post = async |name: &str| {
        let role = json!({"metadata": {"name": name}, "rules": rules});
        server.post_as(User::new("rules-eve", &[]), &at("default", "roles"), role).await.code
    };
    let occupied = crate::offload::occupy_bodies("rules-eve").await;
    assert_eq!(post("a").await, 429);
    drop(occupied);
    assert_eq!(post("b").await, 201);
}

#[tokio::test]
async fn a_user_has_the_permissions_of_its_bindings_in_their_namespaces() {
    let server = Fixture::new().await;
    let pods = "/api/v1/namespaces/default/pods";
    assert_eq!(server.code(ann(), pods).await, 403);
    server.role("default", "reader", json!([rule(&["get", "list"], &["pods", "pods/log"])])).await;
    server.bind("default", "Role", "reader", "ann").await;
    assert_eq!(server.code(ann(), pods).await, 200);
    assert_eq!(server.code(ann(), &format!("{pods}/p")).await, 404);
    for path in ["/api/v1/pods", "/api/v1/namespaces/kube-system/pods", "/api/v1/namespaces/default/secrets"]
    {
        assert_eq!(server.code(ann(), path).await, 403, "{path}");
    }
    assert_eq!(server.code(ann(), &format!("{pods}/p/status")).await, 403);
    assert_eq!(server.post_as(ann(), pods, pod("p")).await.code, 403);
    // One object of a kind, in all namespaces.
    let mut one = rule(&["get"], &["configmaps"]);
    one["resourceNames"] = json!(["c"]);
    server.role("", "one", json!([one, {"verbs": ["get"], "nonResourceURLs": ["/metrics"]}])).await;
    server.bind("", "ClusterRole", "one", "ann").await;
    assert_eq!(server.code(ann(), "/api/v1/namespaces/kube-system/configmaps/c").await, 404);
    assert_eq!(server.code(ann(), "/api/v1/namespaces/kube-system/configmaps/d").await, 403);
    assert_ne!(server.code(ann(), "/metrics").await, 403);
    assert_eq!(server.code(User::new("ben", &[]), "/metrics").await, 403);
    // A removed permission has effect at once.
    let path = format!("{}/reader-ann", at("default", "rolebindings"));
    assert_eq!(server.delete(&path, json!({})).await.code, 200);
    assert_eq!(server.code(ann(), pods).await, 403);
}

#[tokio::test]
async fn no_user_grants_permissions_that_the_user_does_not_have() {
    let server = Fixture::new().await;
    let manage = json!([rule(&["*"], &["roles", "rolebindings"]), rule(&["get"], &["pods"])]);
    server.role("default", "manager", manage).await;
    server.role("default", "secrets", json!([rule(&["get"], &["secrets"])])).await;
    server.role("default", "pods", json!([rule(&["get"], &["pods"])])).await;
    server.bind("default", "Role", "manager", "ann").await;
    let (roles, bindings) = (at("default", "roles"), at("default", "rolebindings"));
    // The wildcard includes `escalate` and `bind`. Without these verbs a user can grant only rules that the user has.
    let path = format!("{roles}/manager");
    let plain = json!({"rules": [
        rule(&["create", "get", "update", "patch"], &["roles", "rolebindings"]), rule(&["get"], &["pods"])]});
    assert_eq!(server.merge(&path, plain).await.code, 200);
    let role = |name: &str, resource: &str| json!({"metadata": {"name": name}, "rules": [rule(&["get"], &[resource])]});
    assert_eq!(server.post_as(ann(), &roles, role("a", "pods")).await.code, 201);
    let refused = server.post_as(ann(), &roles, role("b", "secrets")).await;
    assert_eq!(refused.code, 403);
    let message = refused.body["message"].as_str().unwrap();
    assert!(
        message.contains("user \"ann\" (groups=[\"dev\" \"system:authenticated\"]) is attempting to grant"),
        "{message}"
    );
    assert!(message.contains("{APIGroups:[\"\"], Resources:[\"secrets\"], Verbs:[\"get\"]}"), "{message}");
    assert_eq!(server.post_as(ann(), &bindings, binding("Role", "pods", "ben")).await.code, 201);
    assert_eq!(server.post_as(ann(), &bindings, binding("Role", "secrets", "ben")).await.code, 403);
    assert_eq!(
        server.post_as(ann(), &bindings, binding("ClusterRole", "cluster-admin", "ann")).await.code,
        403
    );
    assert_eq!(server.post_as(ann(), &bindings, binding("Role", "gone", "ben")).await.code, 404);
    assert_eq!(server.code(User::new("ben", &[]), "/api/v1/namespaces/default/pods/p").await, 404);
    // With the verb `bind` for one role the user can bind that role.
    let mut bind = rule(&["bind"], &["roles"]);
    bind["resourceNames"] = json!(["secrets"]);
    server.role("default", "binder", json!([bind])).await;
    server.bind("default", "Role", "binder", "ann").await;
    assert_eq!(server.post_as(ann(), &bindings, binding("Role", "secrets", "ben")).await.code, 201);
    // An update of finalizers needs no check of the rules.
    let finalizers = json!({"metadata": {"finalizers": ["example.com/f"]}});
    assert_eq!(server.merge_as(ann(), &format!("{roles}/secrets"), finalizers).await.code, 200);
    // An update of labels is checked, because labels add the rules of a role to an aggregated role.
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    assert_eq!(server.merge_as(ann(), &format!("{roles}/secrets"), labels.clone()).await.code, 403);
    assert_eq!(server.merge_as(ann(), &format!("{roles}/pods"), labels).await.code, 200);
}

#[tokio::test]
async fn the_verb_escalate_for_one_role_does_not_apply_to_generated_names() {
    let server = Fixture::new().await;
    let mut escalate = rule(&["escalate"], &["roles"]);
    escalate["resourceNames"] = json!(["one"]);
    server.role("default", "writer", json!([escalate, rule(&["create"], &["roles"])])).await;
    server.bind("default", "Role", "writer", "ann").await;
    let roles = at("default", "roles");
    let post = async |metadata: Value| {
        let role = json!({"metadata": metadata, "rules": [rule(&["get"], &["secrets"])]});
        server.post_as(ann(), &roles, role).await.code
    };
    assert_eq!(post(json!({"generateName": "one"})).await, 403);
    assert_eq!(post(json!({"name": "one"})).await, 201);
}

#[tokio::test]
async fn aggregation_gives_no_rights_that_the_writer_does_not_have() {
    let server = Fixture::new().await;
    server.role("", "manager", json!([rule(&["get", "update", "patch"], &["clusterroles"])])).await;
    let manager = json!({"metadata": {"name": "m"}, "roleRef": {"kind": "ClusterRole", "name": "manager"},
        "subjects": [{"kind": "User", "name": "ann"}]});
    assert_eq!(server.post(&at("", "rolebindings"), manager).await.code, 201);
    server.role("", "secrets", json!([rule(&["get"], &["secrets"])])).await;
    let roles = at("", "roles");
    let selects = json!({"metadata": {"name": "all"},
        "aggregationRule": {"clusterRoleSelectors": [{"matchLabels": {"a": "b"}}]}});
    assert_eq!(server.post(&roles, selects).await.code, 201);
    let labels = json!({"metadata": {"labels": {"a": "b"}}});
    assert_eq!(server.merge_as(ann(), &format!("{roles}/secrets"), labels).await.code, 403);
    // Without its aggregation rule the role would keep rules that the administrator removes later.
    let fixed = json!({"aggregationRule": null, "rules": []});
    assert_eq!(server.merge_as(ann(), &format!("{roles}/all"), fixed).await.code, 403);
}

#[tokio::test]
async fn reviews_return_what_roles_allow_for_any_verb() {
    let server = Fixture::new().await;
    server.role("default", "r", json!([rule(&["get", "dance"], &["pods"])])).await;
    server.bind("default", "Role", "r", "ann").await;
    let asks = async |verb: &str, namespace: &str| {
        let attributes = json!({"verb": verb, "resource": "pods", "namespace": namespace});
        let spec = json!({"resourceAttributes": attributes});
        server.review(ann(), "selfsubjectaccessreviews", spec).await["allowed"] == true
    };
    assert!(asks("get", "default").await && asks("dance", "default").await);
    assert!(!asks("sing", "default").await && !asks("get", "kube-system").await);
    let rules = server.review(ann(), "selfsubjectrulesreviews", json!({"namespace": "default"})).await;
    let resources = rules["resourceRules"].as_array().unwrap();
    assert!(resources.contains(&rule(&["get", "dance"], &["pods"])), "{rules}");
    assert!(rules["nonResourceRules"].to_string().contains("/healthz"));
    assert_eq!(rules["incomplete"], false);
    let rules = server.review(node("n1"), "selfsubjectrulesreviews", json!({"namespace": "default"})).await;
    assert_eq!(rules["incomplete"], true);
    assert_eq!(rules["evaluationError"], "node authorizer does not support user rule resolution");
}

#[tokio::test]
async fn impersonation_needs_the_right_to_the_user() {
    let server = Fixture::new().await;
    let as_ben = async |user: User, group: Option<&str>| {
        let mut request = Request::get("/api/v1/namespaces/default/pods").header("impersonate-user", "ben");
        if let Some(group) = group {
            request = request.header("impersonate-group", group);
        }
        server.send(user, request.body(Full::default()).unwrap()).await
    };
    let refused = as_ben(ann(), None).await;
    // The error of the first mode is returned.
    let message = refused.body["message"].as_str().unwrap();
    assert!(message.contains("cannot impersonate-on:user-info:list resource \"pods\""), "{message}");
    let mut one = rule(&["impersonate"], &["users"]);
    one["resourceNames"] = json!(["ben"]);
    server.role("", "ben", json!([one])).await;
    server.bind("", "ClusterRole", "ben", "ann").await;
    server.role("default", "r", json!([rule(&["list"], &["pods"])])).await;
    server.bind("default", "Role", "r", "ben").await;
    assert_eq!(as_ben(ann(), None).await.code, 200);
    assert_eq!(as_ben(ann(), Some("system:masters")).await.code, 403);
    assert_eq!(as_ben(admin(), Some("dev")).await.code, 200);
    // Groups and uids cannot be impersonated without a user.
    for (name, value) in [("impersonate-group", "dev"), ("impersonate-uid", "1")] {
        let request = Request::get("/api/v1/namespaces/default/pods").header(name, value);
        let answer = server.send(admin(), request.body(Full::default()).unwrap()).await;
        assert_eq!(answer.code, 400, "{name}");
    }
}

#[tokio::test]
async fn default_roles_and_bindings_are_restored_at_the_next_start() {
    let server = Fixture::new().await;
    let binding = format!("{}/kubeadm:kubelet-bootstrap", at("", "rolebindings"));
    let discovery = format!("{}/system:discovery", at("", "roles"));
    let monitoring = format!("{}/system:monitoring", at("", "roles"));
    assert_eq!(
        server.code(User::default(), "/api/v1/namespaces/kube-public/configmaps/cluster-info").await,
        403
    );
    let anonymous = User { name: "system:anonymous".to_owned(), ..User::default() };
    assert_eq!(server.code(anonymous, "/api/v1/namespaces/kube-public/configmaps/cluster-info").await, 404);
    assert_eq!(server.delete(&binding, json!({})).await.code, 200);
    let own = json!({"rules": [{"verbs": ["get"], "nonResourceURLs": ["/own"]}]});
    assert_eq!(server.merge(&discovery, own.clone()).await.code, 200);
    let left = json!({"metadata": {"annotations": {"rbac.authorization.kubernetes.io/autoupdate": "false"}},
        "rules": own["rules"]});
    assert_eq!(server.merge(&monitoring, left).await.code, 200);
    let server = server.again().await;
    assert_eq!(server.get(&binding).await.code, 200);
    let rules = server.get(&discovery).await.body["rules"].to_string();
    assert!(rules.contains("/own") && rules.contains("/openapi/*"), "{rules}");
    let kept = server.get(&monitoring).await.body;
    assert_eq!(kept["rules"], own["rules"]);
    // A start with nothing to do writes nothing.
    let before = server.get(&at("", "roles")).await.body["metadata"]["resourceVersion"].clone();
    let server = server.again().await;
    let list = server.get(&at("", "roles")).await.body;
    let newest = list["items"].as_array().unwrap().iter();
    let newest =
        newest.map(|role| role["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap());
    assert!(newest.max().unwrap() <= before.as_str().unwrap().parse().unwrap());
}

#[tokio::test]
async fn permissions_in_a_namespace_reach_no_cluster_scoped_object() {
    // All built-in versions are served.
    let all = RuntimeConfig::parse(&["api/all=true".to_owned()]).unwrap();
    let server = Fixture::new().await.again_with(|config| config.runtime_config = all).await;
    server.bind("default", "ClusterRole", "cluster-admin", "ann").await;
    let code = async |method: &str, path: &str| {
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        server.send(ann(), request.body(Full::new("{}".into())).unwrap()).await.code
    };
    for kind in coracle_kinds::KINDS {
        let version = match kind.group {
            "" => format!("/api/{}", kind.version),
            group => format!("/apis/{group}/{}", kind.version),
        };
        let below = format!("{version}/namespaces/default/{}", kind.plural);
        let methods = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"];
        if kind.namespaced {
            for method in methods {
                let path = format!("{version}/{}/default", kind.plural);
                assert_eq!(code(method, &path).await, 404, "{method} {path}");
            }
            continue;
        }
        for name in ["", "/default", "/other", "/default?watch=1", "?watch=1"] {
            for method in methods {
                let path = format!("{below}{name}");
                assert_eq!(code(method, &path).await, 404, "{method} {path}");
            }
        }
        for sub in kind.subresources {
            for method in methods {
                let path = format!("{below}/default/{}", sub.name);
                assert_eq!(code(method, &path).await, 404, "{method} {path}");
            }
        }
    }
    // The binding gives the permissions of an administrator in the namespace, including the Namespace itself.
    assert_eq!(code("GET", "/api/v1/namespaces/default/pods").await, 200);
    assert_eq!(code("GET", "/api/v1/namespaces/default").await, 200);
    assert_eq!(code("GET", "/api/v1/namespaces/kube-system").await, 403);
    assert_eq!(code("GET", "/api/v1/namespaces").await, 403);
}

/// CVE-2019-11247, CVE-2022-3162: paths below a namespace gave access to cluster-scoped custom resources.
#[tokio::test]
async fn permissions_in_a_namespace_reach_no_cluster_scoped_custom_resource() {
    let server = Fixture::new().await;
    established(&server, definition("foos", "Foo")).await;
    let mut wide = definition("wides", "Wide");
    wide["spec"]["scope"] = "Cluster".into();
    wide["spec"]["names"]["shortNames"] = json!(["w"]);
    established(&server, wide).await;
    let version = "/apis/example.com/v1";
    let object = json!({"apiVersion": "example.com/v1", "kind": "Wide", "metadata": {"name": "a"}});
    let made = server.post(&format!("{version}/wides"), object).await;
    assert_eq!(made.code, 201, "{}", made.body);
    server.bind("default", "ClusterRole", "cluster-admin", "ann").await;
    let code = async |method: &str, path: &str| {
        let path = format!("{version}{path}");
        let request = Request::builder().method(method).uri(path).header("content-type", "application/json");
        server.send(ann(), request.body(Full::new("{}".into())).unwrap()).await.code
    };
    for method in ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"] {
        for name in ["", "/a", "/other", "/a/status", "/a/scale", "/a?watch=1", "?watch=1"] {
            let path = format!("/namespaces/default/wides{name}");
            assert_eq!(code(method, &path).await, 404, "{method} {path}");
        }
        assert_eq!(code(method, "/foos/a").await, 404, "{method}: an object needs its namespace");
    }
    assert_eq!(code("GET", "/namespaces/default/foos").await, 200);
    for path in ["/wides", "/wides/a", "/foos", "/namespaces/kube-system/foos"] {
        assert_eq!(code("GET", path).await, 403, "{path}");
    }
}
