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
    // The limit applies to updates of a claim that is not being deleted.
    let refused = server.merge(&path, json!({"metadata": {"labels": {"a": "b"}}})).await;
    assert_eq!(refused.code, 403, "{}", refused.body);
    let marked = server.delete(&path, json!({})).await;
    assert!(marked.body["metadata"]["deletionTimestamp"].is_string(), "{}", marked.body);
    let released = server.merge(&path, json!({"metadata": {"finalizers": null}})).await;
    assert_eq!(released.code, 200, "{}", released.body);
    assert_eq!(server.get(&path).await.code, 404);
}
