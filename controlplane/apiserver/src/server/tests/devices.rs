//! Permissions for devices: admin access by a label of the namespace, and permissions for parts of a claim's status.

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
    // Existing claims can still be changed without the label.
    assert_eq!(server.merge(namespace, labelled(Value::Null)).await.code, 200);
    let marked = json!({"metadata": {"labels": {"a": "b"}}});
    for path in [format!("{CLAIMS}/admin"), of_plain] {
        assert_eq!(server.merge(&path, marked.clone()).await.code, 200, "{path}");
    }
}

/// Merges a status into the claim `c` as a user.
async fn merge_status(server: &Fixture, user: &User, status: Value) -> Answer {
    let request =
        Request::patch(format!("{CLAIMS}/c/status")).header("content-type", "application/merge-patch+json");
    let body = json!({"status": status}).to_string();
    server.send(user.clone(), request.body(Full::new(body.into())).unwrap()).await
}

/// Grants a user a permission in all namespaces.
async fn grant(server: &Fixture, user: &User, verb: &str, subresource: &str, name: Option<&str>) {
    const RBAC: &str = "/apis/rbac.authorization.k8s.io/v1";
    let role = format!("{}-{subresource}", user.name.replace(':', "-"));
    let rule = json!({"verbs": [verb], "apiGroups": ["resource.k8s.io"], "resourceNames": name.into_iter().collect::<Vec<_>>(),
        "resources": [format!("resourceclaims/{subresource}")]});
    let made = server
        .post(&format!("{RBAC}/clusterroles"), json!({"metadata": {"name": role}, "rules": [rule]}))
        .await;
    assert_eq!(made.code, 201, "{}", made.body);
    let binding = json!({"metadata": {"name": role}, "roleRef": {"kind": "ClusterRole", "name": role},
        "subjects": [{"kind": "User", "name": user.name}]});
    assert_eq!(server.post(&format!("{RBAC}/clusterrolebindings"), binding).await.code, 201);
}

#[tokio::test]
async fn parts_of_the_status_of_a_claim_need_their_own_permissions() {
    let server = Fixture::new().await;
    let made = server.post(CLAIMS, json!({"metadata": {"name": "c"}, "spec": spec(false)})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let scheduler = User::new("scheduler", &[]);
    let mut driver = User::new("system:serviceaccount:default:driver", &[]);
    let node = |name: &str| vec![name.to_owned()];
    driver.extra.insert("authentication.kubernetes.io/node-name".to_owned(), node("m"));
    grant(&server, &scheduler, "patch", "status", None).await;
    grant(&server, &driver, "patch", "status", None).await;
    // The server removes `status.devices` from a claim without an allocation. The permission to write this field is
    // checked only with an allocation.
    let early = json!({"devices": [{"driver": "other.example.com", "pool": "p", "device": "d"}]});
    let early = merge_status(&server, &driver, early).await;
    assert_eq!((early.code, &early.body["status"]["devices"]), (200, &Value::Null), "{}", early.body);
    let device = json!({"request": "r", "driver": "d.example.com", "pool": "p", "device": "d"});
    let term = json!({"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n"]}]});
    let allocation = json!({"devices": {"results": [device]}, "nodeSelector": {"nodeSelectorTerms": [term]}});
    let refused = merge_status(&server, &scheduler, json!({"allocation": allocation})).await;
    let cause = &refused.body["details"]["causes"][0];
    assert_eq!((refused.code, &cause["field"]), (422, &json!("status.allocation")), "{}", refused.body);
    let expect = "Forbidden: changing status.allocation or status.reservedFor requires \
        resource=\"resourceclaims/binding\", verb=\"patch\" permission: resourceclaims.resource.k8s.io is forbidden: \
        User \"scheduler\" cannot patch resource \"resourceclaims/binding\" in API group \"resource.k8s.io\" at the \
        cluster scope";
    assert_eq!(cause["message"], expect);
    grant(&server, &scheduler, "patch", "binding", None).await;
    let allocated = merge_status(&server, &scheduler, json!({"allocation": allocation})).await;
    assert_eq!(allocated.code, 200, "{}", allocated.body);
    // The driver's service account has the permission for the claims of the driver's own node.
    grant(&server, &driver, "associated-node:patch", "driver", Some("d.example.com")).await;
    let devices = json!({"devices": [{"driver": "d.example.com", "pool": "p", "device": "d"}]});
    let refused = merge_status(&server, &driver, devices.clone()).await;
    let cause = &refused.body["details"]["causes"][0];
    assert_eq!((refused.code, &cause["field"]), (422, &json!("status.devices")), "{}", refused.body);
    assert!(
        cause["message"].as_str().unwrap().contains("verb=\"[arbitrary-node:patch]\" permission: "),
        "{cause}"
    );
    driver.extra.insert("authentication.kubernetes.io/node-name".to_owned(), node("n"));
    let written = merge_status(&server, &driver, devices).await;
    assert_eq!(written.code, 200, "{}", written.body);
}

#[tokio::test]
async fn a_refusal_names_a_limited_number_of_drivers() {
    let server = Fixture::new().await;
    let made = server.post(CLAIMS, json!({"metadata": {"name": "c"}, "spec": spec(false)})).await;
    assert_eq!(made.code, 201, "{}", made.body);
    let result = json!({"request": "r", "driver": "d.example.com", "pool": "p", "device": "d"});
    let allocation = json!({"allocation": {"devices": {"results": [result]}}});
    let allocated = merge_status(&server, &admin(), allocation).await;
    assert_eq!(allocated.code, 200, "{}", allocated.body);
    let driver = User::new("driver", &[]);
    grant(&server, &driver, "patch", "status", None).await;
    let device =
        |number: u32| json!({"driver": format!("d{number}.example.com"), "pool": "p", "device": "d"});
    let devices: Vec<Value> = (0..40).map(device).collect();
    let refused = merge_status(&server, &driver, json!({"devices": devices})).await;
    let causes = refused.body["details"]["causes"].as_array().map(Vec::len);
    assert_eq!((refused.code, causes), (422, Some(32)), "{}", refused.body);
}
