//! Tests of requests for objects that are being deleted, and in namespaces that are being deleted.

use super::*;

#[tokio::test]
async fn a_newer_limit_does_not_keep_a_claim_that_is_being_deleted() {
    let server = Fixture::new().await;
    let claims = "/api/v1/namespaces/default/persistentvolumeclaims";
    let spec = json!({"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "2Gi"}}});
    let claim = json!({"metadata": {"name": "c"}, "spec": spec});
    assert_eq!(server.post(claims, claim).await.code, 201);
    let limits = json!([{"type": "PersistentVolumeClaim", "max": {"storage": "1Gi"}}]);
    let range = json!({"metadata": {"name": "l"}, "spec": {"limits": limits}});
    let made = server.post("/api/v1/namespaces/default/limitranges", range).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let path = format!("{claims}/c");
    // While the claim is not being deleted, the limit applies to its updates.
    let refused = server.merge(&path, json!({"metadata": {"labels": {"a": "b"}}})).await;
    assert_eq!(refused.code, 403, "{}", refused.body);
    let marked = server.delete(&path, json!({})).await;
    assert!(marked.body["metadata"]["deletionTimestamp"].is_string(), "{}", marked.body);
    let released = server.merge(&path, json!({"metadata": {"finalizers": null}})).await;
    assert_eq!(released.code, 200, "{}", released.body);
    assert_eq!(server.get(&path).await.code, 404);
}

#[tokio::test]
async fn evictions_bindings_and_tokens_are_refused_in_a_namespace_that_is_being_deleted() {
    let server = Fixture::new().await;
    assert_eq!(server.post("/api/v1/namespaces", json!({"metadata": {"name": "n"}})).await.code, 201);
    let namespace = "/api/v1/namespaces/n";
    let account = json!({"metadata": {"name": "default"}});
    assert_eq!(server.post(&format!("{namespace}/serviceaccounts"), account).await.code, 201);
    assert_eq!(server.post(&format!("{namespace}/pods"), pod("p")).await.code, 201);
    let token = format!("{namespace}/serviceaccounts/default/token");
    assert_eq!(server.post(&token, json!({"spec": {}})).await.code, 201);
    assert_eq!(server.delete(namespace, json!({})).await.code, 200);
    let binding = json!({"metadata": {"name": "p"}, "target": {"kind": "Node", "name": "n1"}});
    let eviction = json!({"metadata": {"name": "p"}});
    for (path, body) in [
        (format!("{namespace}/pods/p/binding"), binding),
        (format!("{namespace}/pods/p/eviction"), eviction),
        (token, json!({"spec": {}})),
    ] {
        let refused = server.post(&path, body).await;
        assert_eq!(refused.code, 403, "{path}: {}", refused.body);
        let cause = &refused.body["details"]["causes"][0];
        assert_eq!(cause["reason"], "NamespaceTerminating", "{path}: {}", refused.body);
    }
    // The pod can still be deleted.
    assert_eq!(server.delete(&format!("{namespace}/pods/p"), json!({})).await.code, 200);
}
