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

#[tokio::test]
async fn a_watch_gets_the_time_of_a_deletion_without_grace_period_before_the_removal() {
    let server = Fixture::new().await;
    let list = server.get(PODS).await.body;
    let since = list["metadata"]["resourceVersion"].as_str().unwrap().to_owned();
    for name in ["pending", "bound"] {
        assert_eq!(server.post(PODS, pod(name)).await.code, 201);
    }
    let binding = json!({"metadata": {"name": "bound"}, "target": {"kind": "Node", "name": "n1"}});
    assert_eq!(server.post(&format!("{PODS}/bound/binding"), binding).await.code, 201);
    let dry_run = server.call("DELETE", &format!("{PODS}/pending?dryRun=All"), "", None).await;
    assert_eq!(dry_run.code, 200, "{}", dry_run.body);
    for (name, options) in [("pending", json!({})), ("bound", json!({"gracePeriodSeconds": 0}))] {
        let path = format!("{PODS}/{name}");
        let deleted = server.delete(&path, options).await;
        assert_eq!(deleted.code, 200, "{}", deleted.body);
        assert_eq!(server.get(&path).await.code, 404);
    }
    let events = server.watch(&format!("{PODS}?resourceVersion={since}")).await;
    for name in ["pending", "bound"] {
        let mut own: Vec<_> =
            events.iter().filter(|event| event["object"]["metadata"]["name"] == name).collect();
        let last = own.split_off(own.len() - 2);
        let types = last.iter().map(|event| event["type"].as_str().unwrap()).collect::<Vec<_>>();
        assert_eq!(types, ["MODIFIED", "DELETED"], "{name}");
        let [marked, removed] = [&last[0]["object"]["metadata"], &last[1]["object"]["metadata"]];
        for metadata in [marked, removed] {
            assert_eq!(metadata["deletionGracePeriodSeconds"], 0, "{name}");
            assert_eq!(metadata["deletionTimestamp"], marked["deletionTimestamp"], "{name}");
        }
        assert_ne!(marked["resourceVersion"], removed["resourceVersion"], "{name}");
        let before = own.iter().all(|event| event["object"]["metadata"]["deletionTimestamp"].is_null());
        assert!(before && marked["deletionTimestamp"].is_string(), "{name}: {events:?}");
    }
}
