//! Admission plugins that are off by default.

use super::*;

async fn with(enabled: &[&str]) -> Fixture {
    let directory = tempfile::tempdir().unwrap();
    let enabled = enabled.iter().map(|&name| name.to_owned()).collect();
    let selection = PluginSelection { enabled, disabled: Vec::new() };
    let api = open_with(directory.path(), |config| config.admission_plugins = selection).await;
    let server = Fixture { api, directory };
    server.post("/api/v1/namespaces/default/serviceaccounts", json!({"metadata": {"name": "default"}})).await;
    server
}

#[tokio::test]
async fn images_are_always_pulled() {
    let server = with(&["AlwaysPullImages"]).await;
    let mut wanted = pod("p");
    wanted["spec"]["containers"][0]["imagePullPolicy"] = "Never".into();
    let made = server.post(PODS, wanted).await;
    assert_eq!(made.body["spec"]["containers"][0]["imagePullPolicy"], "Always", "{}", made.body);
}

#[tokio::test]
async fn external_addresses_of_services_are_denied() {
    let server = with(&["DenyServiceExternalIPs"]).await;
    let path = "/api/v1/namespaces/default/services";
    let spec = json!({"ports": [{"port": 80}], "externalIPs": ["192.0.2.9"]});
    let refused = server.post(path, json!({"metadata": {"name": "s"}, "spec": spec})).await;
    assert_eq!(refused.code, 403);
    assert!(
        refused.body["message"]
            .as_str()
            .unwrap()
            .ends_with("Use of external IPs is denied by admission control")
    );
    let made = server.post(path, json!({"metadata": {"name": "s"}, "spec": {"ports": [{"port": 80}]}})).await;
    assert_eq!(made.code, 201, "{}", made.body);
}

#[tokio::test]
async fn a_missing_namespace_is_created_with_its_first_object() {
    let server = with(&["NamespaceAutoProvision"]).await;
    let path = "/api/v1/namespaces/new/configmaps";
    let dry = server.post(&format!("{path}?dryRun=All"), config_map("a", json!({}))).await;
    assert_eq!(dry.code, 404, "{}", dry.body);
    assert_eq!(server.post(path, config_map("a", json!({}))).await.code, 201);
    assert_eq!(server.get("/api/v1/namespaces/new").await.body["status"]["phase"], "Active");
}

#[tokio::test]
async fn pods_run_on_the_nodes_of_their_namespace() {
    let server = with(&["PodNodeSelector"]).await;
    let annotations = json!({"scheduler.alpha.kubernetes.io/node-selector": "env=test"});
    server.merge("/api/v1/namespaces/default", json!({"metadata": {"annotations": annotations}})).await;
    assert_eq!(server.post(PODS, pod("p")).await.body["spec"]["nodeSelector"], json!({"env": "test"}));
    let mut other = pod("q");
    other["spec"]["nodeSelector"] = json!({"env": "prod"});
    assert_eq!(server.post(PODS, other).await.code, 403);
}

#[tokio::test]
async fn owners_are_changed_only_by_those_who_may_delete() {
    let server = with(&["OwnerReferencesPermissionEnforcement"]).await;
    let role = json!({"metadata": {"name": "writer"}, "rules": [{"apiGroups": [""], "resources": ["configmaps"],
        "verbs": ["create", "patch", "get"]}]});
    let roles = "/apis/rbac.authorization.k8s.io/v1/namespaces/default";
    assert_eq!(server.post(&format!("{roles}/roles"), role).await.code, 201);
    let reference = json!({"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "writer"});
    let subject = json!({"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": "ann"});
    let binding = json!({"metadata": {"name": "writer"}, "roleRef": reference, "subjects": [subject]});
    assert_eq!(server.post(&format!("{roles}/rolebindings"), binding).await.code, 201);
    server.post(CONFIG_MAPS, config_map("a", json!({}))).await;
    let owner = json!({"apiVersion": "v1", "kind": "Pod", "name": "p", "uid": "1"});
    let patch = json!({"metadata": {"ownerReferences": [owner]}});
    let request = |body: &Value| {
        let request = Request::patch(format!("{CONFIG_MAPS}/a"));
        request
            .header("content-type", "application/merge-patch+json")
            .body(Full::from(body.to_string()))
            .unwrap()
    };
    let refused = server.send(User::new("ann", &[]), request(&patch)).await;
    assert_eq!(refused.code, 403);
    let message = refused.body["message"].as_str().unwrap();
    assert!(message.contains("cannot set an ownerRef on a resource you can't delete"), "{message}");
    assert_eq!(server.send(User::new("ann", &[]), request(&json!({"data": {"x": "1"}}))).await.code, 200);
    assert_eq!(server.send(admin(), request(&patch)).await.code, 200);
}

#[tokio::test]
async fn an_ingress_gets_the_default_class() {
    let server = Fixture::new().await;
    let class = |name: &str, default: &str| {
        json!({"metadata": {"name": name, "annotations": {"ingressclass.kubernetes.io/is-default-class": default}},
            "spec": {"controller": "example.com/c"}})
    };
    for (name, default) in [("plain", "false"), ("usual", "true")] {
        let made = server.post("/apis/networking.k8s.io/v1/ingressclasses", class(name, default)).await;
        assert_eq!(made.code, 201, "{}", made.body);
    }
    let backend = json!({"service": {"name": "s", "port": {"number": 80}}});
    let ingress = json!({"metadata": {"name": "i"}, "spec": {"defaultBackend": backend}});
    let made = server.post("/apis/networking.k8s.io/v1/namespaces/default/ingresses", ingress).await;
    assert_eq!(made.body["spec"]["ingressClassName"], "usual", "{}", made.body);
}

#[tokio::test]
async fn objects_of_storage_that_may_be_in_use_are_protected_from_their_creation() {
    let server = Fixture::new().await;
    let volume = json!({"metadata": {"name": "v"}, "spec": {"capacity": {"storage": "1Mi"},
        "accessModes": ["ReadWriteOnce"], "hostPath": {"path": "/x"}}});
    let class = json!({"metadata": {"name": "c"}, "driverName": "d", "parameters": {"a": "b"}});
    for (path, object, finalizer) in [
        ("/api/v1/persistentvolumes", volume, "kubernetes.io/pv-protection"),
        ("/apis/storage.k8s.io/v1/volumeattributesclasses", class, "kubernetes.io/vac-protection"),
    ] {
        let made = server.post(path, object).await;
        assert_eq!(made.body["metadata"]["finalizers"], json!([finalizer]), "{}", made.body);
    }
}
