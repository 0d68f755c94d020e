//! Admin access to devices needs a label of the namespace.

use super::*;

const CLAIMS: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims";
const TEMPLATES: &str = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates";
const LABEL: &str = "resource.kubernetes.io/admin-access";

fn spec(is_admin: bool) -> Value {
    let exactly = json!({"deviceClassName": "c", "adminAccess": is_admin});
    json!({"devices": {"requests": [{"name": "r", "exactly": exactly}]}})
}

#[tokio::test]
async fn admin_access_to_devices_needs_the_label_of_the_namespace() {
    let server = Fixture::new().await;
    let claim = |name: &str, is_admin| json!({"metadata": {"name": name}, "spec": spec(is_admin)});
    let template = json!({"metadata": {"name": "t"}, "spec": {"spec": spec(true)}});
    let result =
        json!({"request": "r", "driver": "d.example.com", "pool": "p", "device": "d", "adminAccess": true});
    let status = json!({"status": {"allocation": {"devices": {"results": [result]}}}});
    let of_plain = format!("{CLAIMS}/plain/status");
    assert_eq!(server.post(CLAIMS, claim("plain", false)).await.code, 201);
    for (answer, field) in [
        (server.post(CLAIMS, claim("admin", true)).await, "spec.devices.requests[0].adminAccess"),
        (server.post(TEMPLATES, template.clone()).await, "spec.devices.requests[0].adminAccess"),
        (server.merge(&of_plain, status.clone()).await, "status.allocation.devices.results[0].adminAccess"),
    ] {
        assert_eq!((answer.code, &answer.body["details"]["causes"][0]["field"]), (422, &json!(field)));
        let message = answer.body["message"].as_str().unwrap();
        let expect = "Forbidden: admin access to devices requires the `resource.kubernetes.io/admin-access: true` \
            label on the containing namespace";
        assert!(message.contains(expect), "{message}");
    }
    let labelled = |value: Value| json!({"metadata": {"labels": {LABEL: value}}});
    let namespace = "/api/v1/namespaces/default";
    assert_eq!(server.merge(namespace, labelled(json!("false"))).await.code, 200);
    assert_eq!(server.post(CLAIMS, claim("admin", true)).await.code, 422);
    assert_eq!(server.merge(namespace, labelled(json!("true"))).await.code, 200);
    assert_eq!(server.post(CLAIMS, claim("admin", true)).await.code, 201);
    assert_eq!(server.post(TEMPLATES, template).await.code, 201);
    let allocated = server.merge(&of_plain, status).await;
    assert_eq!(allocated.code, 200, "{}", allocated.body);
    // Claims that exist can still be changed without the label.
    assert_eq!(server.merge(namespace, labelled(Value::Null)).await.code, 200);
    let marked = json!({"metadata": {"labels": {"a": "b"}}});
    for path in [format!("{CLAIMS}/admin"), of_plain] {
        assert_eq!(server.merge(&path, marked.clone()).await.code, 200, "{path}");
    }
}
