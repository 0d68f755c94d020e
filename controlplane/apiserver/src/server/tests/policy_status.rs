//! The status of validating admission policies.

use super::*;

const POLICIES: &str = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies";

fn policy(name: &str, group: &str, resource: &str, validations: Value) -> Value {
    let rule =
        json!({"operations": ["*"], "apiGroups": [group], "apiVersions": ["v1"], "resources": [resource]});
    json!({"metadata": {"name": name}, "spec": {
        "matchConstraints": {"resourceRules": [rule]}, "validations": validations}})
}

/// Makes a policy. Returns its path.
async fn make(server: &Fixture, policy: Value) -> String {
    let made = server.post(POLICIES, policy).await;
    assert_eq!(made.code, 201, "{}", made.body);
    format!("{POLICIES}/{}", made.body["metadata"]["name"].as_str().unwrap())
}

/// Waits until the status of a policy meets the condition. Returns the policy.
async fn until(server: &Fixture, path: &str, holds: impl Fn(&Value) -> bool) -> Value {
    eventually_async(path, 10, async || {
        Some(server.get(path).await.body).filter(|body| holds(&body["status"]))
    })
    .await
}

fn observes(generation: i64) -> impl Fn(&Value) -> bool {
    move |status| status["observedGeneration"] == generation
}

#[tokio::test]
async fn a_policy_gets_warnings_about_types() {
    let server = Fixture::new().await;
    let expression = |text: &str| json!([{"expression": text}]);
    let path =
        make(&server, policy("p", "apps", "deployments", expression("object.spec.replicas > 1"))).await;
    let right = until(&server, &path, observes(1)).await;
    assert_eq!(right["status"], json!({"observedGeneration": 1, "typeChecking": {}}));
    let manager = right["metadata"]["managedFields"].as_array().unwrap().iter();
    let mut manager = manager.filter(|entry| entry["subresource"] == "status");
    assert_eq!(manager.next().unwrap()["manager"], "validatingadmissionpolicy-status");
    let wrong = json!([{"expression": "object.spec.replicas > '1'",
        "messageExpression": "'wants replicas > 1, got ' + object.spec.replicas"}]);
    let changed = server.merge(&path, json!({"spec": {"validations": wrong}})).await;
    assert_eq!((changed.code, &changed.body["metadata"]["generation"]), (200, &json!(2)), "{}", changed.body);
    let checked = until(&server, &path, observes(2)).await;
    let warnings = checked["status"]["typeChecking"]["expressionWarnings"].as_array().unwrap().clone();
    let fields: Vec<&Value> = warnings.iter().map(|warning| &warning["fieldRef"]).collect();
    assert_eq!(fields, ["spec.validations[0].expression", "spec.validations[0].messageExpression"]);
    for (warning, part) in
        warnings.iter().zip(["'_>_' applied to '(int, string)'", "'_+_' applied to '(string, int)'"])
    {
        let text = warning["warning"].as_str().unwrap();
        assert!(text.starts_with("apps/v1, Kind=Deployment: ") && text.contains(part), "{text}");
    }
    let repaired = json!({"spec": {"validations": expression("object.spec.replicas > 1")}});
    assert_eq!(server.merge(&path, repaired).await.code, 200);
    let repaired = until(&server, &path, observes(3)).await;
    assert_eq!(repaired["status"], json!({"observedGeneration": 3, "typeChecking": {}}));
}

#[tokio::test]
async fn a_policy_is_checked_again_when_its_resource_appears() {
    let server = Fixture::new().await;
    let wrong = json!([{"expression": "object.spec.maxRetries < 10 && object.metadata.labels['a'] == 'b'"}]);
    let path = make(&server, policy("p", "example.com", "cups", wrong)).await;
    let unknown = until(&server, &path, observes(1)).await;
    assert_eq!(unknown["status"]["typeChecking"], json!({}));
    let definition = json!({"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "cups.example.com"},
        "spec": {"group": "example.com", "scope": "Namespaced", "names": {"plural": "cups", "kind": "Cup"},
            "versions": [{"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": {
                "type": "object", "properties": {"spec": {"type": "object", "properties": {
                    "replicas": {"type": "integer"}}}}}}}]}});
    let definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
    let made = server.post(definitions, definition).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let warned = |status: &Value| status["typeChecking"]["expressionWarnings"].is_array();
    let checked = until(&server, &path, warned).await;
    let text =
        checked["status"]["typeChecking"]["expressionWarnings"][0]["warning"].as_str().unwrap().to_owned();
    assert!(text.starts_with("example.com/v1, Kind=Cup: ERROR: "), "{text}");
    assert!(text.contains("undefined field 'maxRetries'"), "{text}");
}
