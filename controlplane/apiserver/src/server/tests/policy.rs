//! Admission policies in CEL.

use super::*;
use crate::remote::tests::Hook;

const GROUP: &str = "/apis/admissionregistration.k8s.io/v1";
const MAPS: &str = "/api/v1/namespaces/default/configmaps";

fn constraints(resource: &str) -> Value {
    json!({"resourceRules": [{"operations": ["CREATE", "UPDATE"], "apiGroups": ["*"], "apiVersions": ["*"],
        "resources": [resource]}]})
}

async fn make(server: &Fixture, plural: &str, name: &str, spec: Value) {
    let object = json!({"metadata": {"name": name}, "spec": spec});
    let made = server.post(&format!("{GROUP}/{plural}"), object).await;
    assert_eq!(made.code, 201, "{}", made.body);
}

async fn bind(server: &Fixture, sort: &str, name: &str, more: Value) {
    let mut spec = json!({"policyName": "p"});
    if sort == "validating" {
        spec["validationActions"] = json!(["Deny"]);
    }
    spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    make(server, &format!("{sort}admissionpolicybindings"), name, spec).await;
}

fn map(name: &str, data: Value) -> Value {
    json!({"metadata": {"name": name}, "data": data})
}

#[tokio::test]
async fn a_refused_default_object_does_not_prevent_the_others() {
    const SERVICE: &str = "/api/v1/namespaces/default/services/kubernetes";
    const ENDPOINTS: &str = "/api/v1/namespaces/default/endpoints/kubernetes";
    let server = Fixture::new().await;
    let spec = json!({"matchConstraints": constraints("services"), "validations": [{"expression": "false"}]});
    make(&server, "validatingadmissionpolicies", "p", spec).await;
    bind(&server, "validating", "b", json!({})).await;
    for path in [SERVICE, ENDPOINTS] {
        assert_eq!(server.delete(path, json!({})).await.code, 200, "{path}");
    }
    eventually_async("the addresses are written again", 20, async || server.get(ENDPOINTS).await.code == 200)
        .await;
    assert_eq!(server.get(SERVICE).await.code, 404);
    // The refused service is created as soon as the policy no longer refuses it.
    let removed = server.delete(&format!("{GROUP}/validatingadmissionpolicybindings/b"), json!({})).await;
    assert_eq!(removed.code, 200, "{}", removed.body);
    eventually_async("the service is created again", 20, async || server.get(SERVICE).await.code == 200)
        .await;
}

#[tokio::test]
async fn a_validating_policy_denies_and_follows_changes() {
    let server = Fixture::new().await;
    let spec = json!({
        "matchConstraints": constraints("configmaps"),
        "variables": [{"name": "size", "expression": "size(object.data)"}],
        "validations": [
            {"expression": "variables.size < 2", "messageExpression": "'size is ' + string(variables.size)"},
            {"expression": "!('bad' in object.data)", "message": "bad is bad", "reason": "Forbidden"},
        ],
    });
    make(&server, "validatingadmissionpolicies", "p", spec).await;
    let two = || map("m", json!({"a": "1", "b": "2"}));
    // A policy without a binding has no effect.
    let dry = server.post(&format!("{MAPS}?dryRun=All"), two()).await;
    assert_eq!(dry.code, 201, "{}", dry.body);
    bind(&server, "validating", "b", json!({})).await;
    let refused = server.post(MAPS, two()).await;
    assert_eq!((refused.code, &refused.body["reason"]), (422, &json!("Invalid")), "{}", refused.body);
    assert_eq!(
        refused.body["message"],
        "configmaps \"m\" is forbidden: ValidatingAdmissionPolicy 'p' with binding 'b' denied request: size is 2"
    );
    let refused = server.post(MAPS, map("m", json!({"bad": ""}))).await;
    assert_eq!((refused.code, &refused.body["reason"]), (403, &json!("Forbidden")), "{}", refused.body);
    assert_eq!(server.post(MAPS, map("m", json!({"a": "1"}))).await.code, 201);
    let path = format!("{GROUP}/validatingadmissionpolicies/p");
    let more = json!({"spec": {"validations": [{"expression": "variables.size < 3"}]}});
    let changed = server.merge(&path, more).await;
    assert_eq!((changed.code, &changed.body["metadata"]["generation"]), (200, &json!(2)), "{}", changed.body);
    assert_eq!(server.merge(&format!("{MAPS}/m"), json!({"data": {"b": "2"}})).await.code, 200);
    // Warn instead of deny.
    let warn = json!({"spec": {"validationActions": ["Warn", "Audit"]}});
    assert_eq!(server.merge(&format!("{GROUP}/validatingadmissionpolicybindings/b"), warn).await.code, 200);
    let warned = server.merge(&format!("{MAPS}/m"), json!({"data": {"c": "3"}})).await;
    assert_eq!(warned.code, 200, "{}", warned.body);
    assert!(warned.headers["warning"].to_str().unwrap().contains("failed expression: variables.size < 3"));
    let text = server.get("/metrics").await.body.as_str().unwrap().to_owned();
    let passed = "apiserver_validating_admission_policy_check_total{enforcement_action=\"allow\"";
    assert!(!text.contains(passed), "upstream counts failures only: {text}");
    for (action, number) in [("audit", 1), ("deny", 2), ("warn", 1)] {
        let labels = format!(
            "enforcement_action=\"{action}\",error_type=\"invalid_error\",policy=\"p\",policy_binding=\"b\""
        );
        let line = format!("apiserver_validating_admission_policy_check_total{{{labels}}} {number}");
        assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
    }
}

#[tokio::test]
async fn policies_see_valid_objects_only() {
    let server = Fixture::new().await;
    let mut fixed = map("fixed", json!({"a": "1"}));
    fixed["immutable"] = true.into();
    assert_eq!(server.post(MAPS, fixed).await.code, 201);
    let validations = json!([{"expression": "false", "message": "the policy denies"}]);
    let spec = json!({"matchConstraints": constraints("configmaps"), "validations": validations});
    make(&server, "validatingadmissionpolicies", "p", spec).await;
    bind(&server, "validating", "b", json!({})).await;
    let path = format!("{MAPS}/fixed");
    for (answer, is_valid) in [
        (server.post(MAPS, map("a", json!({}))).await, true),
        (server.post(MAPS, map("Not a name", json!({}))).await, false),
        (server.merge(&path, json!({"metadata": {"labels": {"a": "b"}}})).await, true),
        (server.merge(&path, json!({"data": {"a": "2"}})).await, false),
    ] {
        let message = answer.body["message"].as_str().unwrap_or_default();
        assert_eq!((answer.code, message.contains("the policy denies")), (422, is_valid), "{message}");
    }
}

#[tokio::test]
async fn parameters_come_from_objects() {
    let server = Fixture::new().await;
    let spec = json!({
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"}, "matchConstraints": constraints("secrets"),
        "validations": [{"expression": "params == null || object.metadata.name.startsWith(params.data.prefix)"}],
    });
    make(&server, "validatingadmissionpolicies", "p", spec).await;
    let reference =
        json!({"selector": {"matchLabels": {"params": "yes"}}, "parameterNotFoundAction": "Deny"});
    bind(&server, "validating", "b", json!({"paramRef": reference})).await;
    let secret = |name: &str| json!({"metadata": {"name": name}});
    let secrets = "/api/v1/namespaces/default/secrets";
    let refused = server.post(secrets, secret("a")).await;
    let message = refused.body["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("failed to configure binding: no params found"), "{message}");
    let mut params = map("params", json!({"prefix": "x-"}));
    params["metadata"]["labels"] = json!({"params": "yes"});
    assert_eq!(server.post(MAPS, params).await.code, 201);
    assert_eq!(server.post(secrets, secret("a")).await.code, 422);
    assert_eq!(server.post(secrets, secret("x-a")).await.code, 201);
    // A tenant can make parameters, so their number is limited.
    for number in 0..20 {
        let mut params = map(&format!("params-{number}"), json!({"prefix": "x-"}));
        params["metadata"]["labels"] = json!({"params": "yes"});
        assert_eq!(server.post(MAPS, params).await.code, 201);
    }
    let refused = server.post(secrets, secret("x-b")).await;
    let message = refused.body["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("finds 21 params, of which at most 20"), "{message}");
    // The limit also applies to a policy that ignores failures: its binding acts as if a validation had failed.
    let policy = format!("{GROUP}/validatingadmissionpolicies/p");
    assert_eq!(server.merge(&policy, json!({"spec": {"failurePolicy": "Ignore"}})).await.code, 200);
    let refused = server.post(secrets, secret("x-b")).await;
    let message = refused.body["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("finds 21 params, of which at most 20"), "{message}");
    let warn = json!({"spec": {"validationActions": ["Warn"]}});
    assert_eq!(server.merge(&format!("{GROUP}/validatingadmissionpolicybindings/b"), warn).await.code, 200);
    let warned = server.post(secrets, secret("x-b")).await;
    assert_eq!(warned.code, 201, "{}", warned.body);
    assert!(warned.headers["warning"].to_str().unwrap().contains("finds 21 params"));
    let spec = json!({
        "paramKind": {"apiVersion": "v1", "kind": "ConfigMap"}, "matchConstraints": constraints("secrets"),
        "failurePolicy": "Ignore", "reinvocationPolicy": "Never",
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression":
            "[JSONPatch{op: 'add', path: '/metadata/labels', value: {'a': 'b'}}]"}}],
    });
    make(&server, "mutatingadmissionpolicies", "p", spec).await;
    bind(&server, "mutating", "b", json!({"paramRef": reference})).await;
    let refused = server.post(secrets, secret("x-c")).await;
    let message = refused.body["message"].as_str().unwrap_or_default().to_owned();
    assert!(message.contains("finds 21 params, of which at most 20"), "{message}");
}

#[tokio::test]
async fn a_mutating_policy_changes_the_object() {
    let server = Fixture::new().await;
    let spec = json!({
        "reinvocationPolicy": "Never", "matchConstraints": constraints("deployments"),
        "matchConditions": [{"name": "n", "expression": "object.metadata.name != 'skip'"}],
        "mutations": [
            {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": "Object{spec: Object.spec{replicas: 7}}"}},
            {"patchType": "JSONPatch", "jsonPatch": {"expression":
                "[JSONPatch{op: 'test', path: '/spec/replicas', value: 7}, \
                 JSONPatch{op: 'add', path: '/metadata/annotations', value: {'a/b': string(object.spec.replicas)}}]"}},
            {"patchType": "JSONPatch", "jsonPatch": {"expression":
                "[JSONPatch{op: 'test', path: '/spec/replicas', value: 8}, JSONPatch{op: 'remove', path: '/spec'}]"}},
        ],
    });
    make(&server, "mutatingadmissionpolicies", "p", spec).await;
    bind(&server, "mutating", "b", json!({})).await;
    let deployment = |name: &str| {
        json!({"metadata": {"name": name}, "spec": {
            "selector": {"matchLabels": {"a": "b"}},
            "template": {"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}},
        }})
    };
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let made = server.post(deployments, deployment("d")).await;
    assert_eq!((made.code, &made.body["spec"]["replicas"]), (201, &json!(7)), "{}", made.body);
    assert_eq!(made.body["metadata"]["annotations"], json!({"a/b": "7"}));
    assert_eq!(made.body["spec"]["template"]["spec"]["containers"][0]["image"], "i");
    assert_eq!(server.post(deployments, deployment("skip")).await.body["spec"]["replicas"], 1);
}

#[tokio::test]
async fn a_mutating_policy_changes_the_replicas_of_a_scale() {
    let server = Fixture::new().await;
    let deployments = "/apis/apps/v1/namespaces/default/deployments";
    let template =
        json!({"metadata": {"labels": {"a": "b"}}, "spec": {"containers": [{"name": "c", "image": "i"}]}});
    let spec = json!({"selector": {"matchLabels": {"a": "b"}}, "template": template});
    let made = server.post(deployments, json!({"metadata": {"name": "d"}, "spec": spec})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let spec = json!({
        "reinvocationPolicy": "Never", "matchConstraints": constraints("deployments/scale"),
        "matchConditions": [{"name": "n", "expression": "object.kind == 'Scale' && object.spec.replicas > 5"}],
        "mutations": [
            {"patchType": "ApplyConfiguration", "applyConfiguration": {"expression": "Object{spec: Object.spec{replicas: 0}}"}},
            {"patchType": "JSONPatch", "jsonPatch": {"expression":
                "[JSONPatch{op: 'replace', path: '/spec/replicas', value: object.spec.replicas + 4}]"}},
        ],
    });
    make(&server, "mutatingadmissionpolicies", "p", spec).await;
    bind(&server, "mutating", "b", json!({})).await;
    for (sent, stored) in [(9, 4), (2, 2)] {
        let scaled =
            server.merge(&format!("{deployments}/d/scale"), json!({"spec": {"replicas": sent}})).await;
        assert_eq!((scaled.code, &scaled.body["spec"]["replicas"]), (200, &stored.into()), "{}", scaled.body);
        let deployment = server.get(&format!("{deployments}/d")).await.body;
        assert_eq!(deployment["spec"]["replicas"], stored, "{deployment}");
    }
}

#[tokio::test]
async fn a_prefix_of_a_name_excludes_no_object_from_a_mutating_policy() {
    let server = Fixture::new().await;
    let mut matched = constraints("configmaps");
    matched["excludeResourceRules"] = json!([{"operations": ["CREATE"], "apiGroups": ["*"], "apiVersions": ["*"],
        "resources": ["configmaps"], "resourceNames": ["skip"]}]);
    let expression = "[JSONPatch{op: 'add', path: '/metadata/labels', value: {'a': 'b'}}]";
    let spec = json!({"reinvocationPolicy": "Never", "matchConstraints": matched,
        "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": expression}}]});
    make(&server, "mutatingadmissionpolicies", "p", spec).await;
    bind(&server, "mutating", "b", json!({})).await;
    let excluded = server.post(MAPS, map("skip", json!({}))).await;
    assert_eq!((excluded.code, &excluded.body["metadata"]["labels"]), (201, &Value::Null));
    // The generated name differs from the excluded name: for example `skipx7f2d`.
    let generated = server.post(MAPS, json!({"metadata": {"generateName": "skip"}})).await;
    assert_eq!((generated.code, &generated.body["metadata"]["labels"]), (201, &json!({"a": "b"})));
}

#[tokio::test]
async fn an_expression_asks_an_authorization_webhook() {
    let hook = Hook::start(|body| {
        let allowed = body["spec"]["user"] == "system:serviceaccount:default:robot"
            && body["spec"]["resourceAttributes"]["verb"] == "fly";
        (200, json!({"status": {"allowed": allowed}}).to_string())
    })
    .await;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("authorization.json");
    let webhook = json!({"timeout": "30s", "subjectAccessReviewVersion": "v1", "failurePolicy": "NoOpinion",
        "connectionInfo": {"type": "KubeConfigFile", "kubeConfigFile": hook.file()}});
    let file = json!({"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AuthorizationConfiguration",
        "authorizers": [{"type": "RBAC", "name": "rbac"}, {"type": "Webhook", "name": "hook", "webhook": webhook}]});
    std::fs::write(&path, file.to_string()).unwrap();
    let api = open_with(directory.path(), |config| config.authorization.file = Some(path)).await;
    let server = Fixture { api, directory };
    let check = "authorizer.serviceAccount('default', 'robot').group('').resource('configmaps').check";
    let validations = json!([
        {"expression": format!("{check}(object.data.verb).allowed()"), "message": "the robot may not do this"},
        {"expression": format!("!{check}('swim').allowed()")},
    ]);
    let spec = json!({"matchConstraints": constraints("configmaps"), "validations": validations});
    make(&server, "validatingadmissionpolicies", "p", spec).await;
    bind(&server, "validating", "b", json!({})).await;
    for (verb, code) in [("fly", 201), ("crawl", 422)] {
        let answer = server.post(MAPS, map(verb, json!({"verb": verb}))).await;
        assert_eq!(answer.code, code, "{verb}: {}", answer.body);
    }
    let bodies = hook.bodies.lock().unwrap().clone();
    let verbs = bodies.iter().map(|body| &body["spec"]["resourceAttributes"]["verb"]);
    let asked: Vec<&str> = verbs.filter_map(Value::as_str).collect();
    let of_robot: Vec<&str> =
        asked.into_iter().filter(|verb| ["fly", "swim", "crawl"].contains(verb)).collect();
    assert_eq!(of_robot, ["fly", "swim", "crawl"], "each check is sent once");
}

#[tokio::test]
async fn invalid_policies_are_refused() {
    let server = Fixture::new().await;
    let policy = |more: Value| {
        let mut spec =
            json!({"matchConstraints": constraints("pods"), "validations": [{"expression": "true"}]});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"metadata": {"name": "p"}, "spec": spec})
    };
    for (more, field) in [
        (json!({"validations": [{"expression": "object.x +"}]}), "spec.validations[0].expression"),
        (json!({"validations": [{"expression": "1"}]}), "spec.validations[0].expression"),
        (json!({"validations": [{"expression": "params.x"}]}), "spec.validations[0].expression"),
        (json!({"validations": []}), "spec.validations"),
        (json!({"variables": [{"name": "a b", "expression": "1"}]}), "spec.variables[0].name"),
        (json!({"variables": [{"name": "a", "expression": "variables.b"}]}), "spec.variables[0].expression"),
        (json!({"matchConstraints": null}), "spec.matchConstraints"),
        (json!({"failurePolicy": "Maybe"}), "spec.failurePolicy"),
        (json!({"matchConditions": [{"name": "", "expression": "true"}]}), "spec.matchConditions[0].name"),
    ] {
        let refused = server.post(&format!("{GROUP}/validatingadmissionpolicies"), policy(more)).await;
        let found = (refused.code, &refused.body["details"]["causes"][0]["field"]);
        assert_eq!(found, (422, &json!(field)), "{}", refused.body);
    }
    let binding = json!({"metadata": {"name": "b"}, "spec": {"policyName": "p", "validationActions": ["Deny", "Warn"]}});
    let refused = server.post(&format!("{GROUP}/validatingadmissionpolicybindings"), binding).await;
    assert_eq!(refused.body["details"]["causes"][0]["field"], "spec.validationActions", "{}", refused.body);
}

#[tokio::test]
async fn connections_through_the_proxy_are_admitted() {
    let server = Fixture::new().await;
    let rule = json!({"operations": ["CONNECT"], "apiGroups": [""], "apiVersions": ["v1"], "resources": ["services/proxy"]});
    let spec = json!({
        "matchConstraints": {"resourceRules": [rule]},
        "validations": [{"expression": "object.kind == 'ServiceProxyOptions' && object.path != '/secret/x'"}],
    });
    make(&server, "validatingadmissionpolicies", "p", spec).await;
    bind(&server, "validating", "b", json!({})).await;
    let proxy = "/api/v1/namespaces/default/services/none/proxy";
    assert_eq!(server.get(&format!("{proxy}/secret/x")).await.code, 422);
    assert_eq!(server.get(&format!("{proxy}/y")).await.code, 404);
}

#[tokio::test]
async fn each_object_of_a_deleted_collection_has_a_budget_of_its_own() {
    let server = Fixture::new().await;
    // An expression costs a tenth of one length times a tenth of the other: 810,000. The ten validations of one object
    // cost more than 8 million. All objects together cost more than the limit of one request.
    let one = json!({"expression": "!oldObject.data.a.contains(oldObject.data.b)"});
    let spec = json!({
        "matchConstraints": {"resourceRules": [{"operations": ["DELETE"], "apiGroups": ["*"], "apiVersions": ["*"],
            "resources": ["configmaps"]}]},
        "validations": vec![one; 10],
    });
    make(&server, "validatingadmissionpolicies", "p", spec).await;
    bind(&server, "validating", "b", json!({})).await;
    for number in 0..13 {
        let mut object = map(&format!("m-{number}"), json!({"a": "x".repeat(9000), "b": "y".repeat(9000)}));
        object["metadata"]["labels"] = json!({"size": "large"});
        assert_eq!(server.post(MAPS, object).await.code, 201);
    }
    let large = format!("{MAPS}?labelSelector=size%3Dlarge");
    let deleted = server.delete(&large, json!({})).await;
    assert_eq!(deleted.code, 200, "{}", deleted.body);
    assert_eq!(server.get(&large).await.body["items"], json!([]));
}

#[tokio::test]
async fn the_object_of_a_subresource_has_the_namespace_of_the_request() {
    const NAMESPACE: &str = "/api/v1/namespaces/default";
    let server = Fixture::new().await;
    assert_eq!(server.post(&format!("{NAMESPACE}/pods"), pod("p")).await.code, 201);
    let mut matched = constraints("pods/binding");
    matched["resourceRules"][0]["resources"] =
        json!(["pods/binding", "pods/eviction", "serviceaccounts/token"]);
    let expression =
        "object.metadata.?namespace.orValue('') != 'default' || object.metadata.?name.orValue('') == ''";
    let spec = json!({"matchConstraints": matched, "validations": [{"expression": expression}]});
    make(&server, "validatingadmissionpolicies", "p", spec).await;
    bind(&server, "validating", "b", json!({})).await;
    let binding = json!({"metadata": {"name": "p"}, "target": {"name": "n"}});
    for (path, object) in [
        ("pods/p/binding", binding),
        ("pods/p/eviction", json!({"metadata": {"name": "p"}})),
        ("serviceaccounts/default/token", json!({"spec": {}})),
    ] {
        let refused = server.post(&format!("{NAMESPACE}/{path}"), object.clone()).await;
        assert_eq!(refused.code, 422, "{path}: {}", refused.body);
        let mut elsewhere = object;
        elsewhere["metadata"]["namespace"] = "kube-system".into();
        let refused = server.post(&format!("{NAMESPACE}/{path}"), elsewhere).await;
        assert_eq!(refused.code, 400, "{path}: {}", refused.body);
    }
    let other = json!({"metadata": {"name": "other"}, "spec": {}});
    let refused = server.post(&format!("{NAMESPACE}/serviceaccounts/default/token"), other).await;
    let cause = &refused.body["details"]["causes"][0]["field"];
    assert_eq!((refused.code, cause), (422, &json!("metadata.name")), "{}", refused.body);
}
