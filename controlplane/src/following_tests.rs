//! Discovery, OpenAPI, access, quota and garbage collection follow after a definition of a custom resource is created
//! or deleted.

use coracle_testing::eventually_async;
use http::{Method, Request, header};
use kube::Client;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::{ControlPlane, ControlPlaneConfig, ControllerSelection, start};

/// Number of times that the definition is created and deleted. The second definition must not show traces of the first.
const ROUNDS: u32 = 2;
/// Deadline of each effect in seconds, on a fast machine. Usually an effect follows within a second.
const SECONDS: u64 = 10;
const DEFINITIONS: &str = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions";
const DOCUMENT: &str = "/openapi/v3/apis/example.com/v1";
const VERSION: &str = "/apis/example.com/v1";

/// Clients of a control plane in this process.
struct Clients {
    admin: Client,
    /// A user who may list widgets.
    reader: Client,
    /// A user without permissions.
    stranger: Client,
}

/// The body of the response, or the code of the error.
async fn call(client: &Client, method: Method, path: &str, body: Option<&Value>) -> Result<String, u16> {
    let body = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
    let request =
        Request::builder().method(method).uri(path).header(header::CONTENT_TYPE, "application/json");
    match client.request_text(request.body(body).unwrap()).await {
        Ok(text) => Ok(text),
        Err(kube::Error::Api(status)) => Err(status.code),
        Err(error) => panic!("{path}: {error}"),
    }
}

fn definition() -> Value {
    let schema = json!({"type": "object", "x-kubernetes-preserve-unknown-fields": true});
    let version =
        json!({"name": "v1", "served": true, "storage": true, "schema": {"openAPIV3Schema": schema}});
    json!({
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": "widgets.example.com"},
        "spec": {
            "group": "example.com",
            "scope": "Namespaced",
            "names": {"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"},
            "versions": [version],
        },
    })
}

fn widget(name: &str, owners: Value) -> Value {
    json!({"apiVersion": "example.com/v1", "kind": "Widget", "metadata": {"name": name, "ownerReferences": owners}})
}

/// The path of the widgets of a namespace.
fn widgets(namespace: &str) -> String {
    format!("{VERSION}/namespaces/{namespace}/widgets")
}

// === impl Clients ===

impl Clients {
    fn of(plane: &ControlPlane) -> Self {
        Self {
            admin: plane.client("admin", &["system:masters"]),
            reader: plane.client("reader", &[]),
            stranger: plane.client("stranger", &[]),
        }
    }

    async fn get(&self, path: &str) -> Result<String, u16> {
        call(&self.admin, Method::GET, path, None).await
    }

    async fn create(&self, path: &str, object: &Value) -> Result<String, u16> {
        call(&self.admin, Method::POST, path, Some(object)).await
    }

    async fn delete(&self, path: &str) -> Result<String, u16> {
        call(&self.admin, Method::DELETE, path, None).await
    }

    /// Creates two namespaces, a quota of one widget in the first namespace, and the permission of the reader.
    async fn prepare(&self) {
        let rbac = "/apis/rbac.authorization.k8s.io/v1";
        let api = "rbac.authorization.k8s.io";
        for name in ["counted", "owned"] {
            let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            self.create("/api/v1/namespaces", &namespace).await.unwrap();
        }
        let quota = json!({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"},
            "spec": {"hard": {"count/widgets.example.com": "1"}}});
        self.create("/api/v1/namespaces/counted/resourcequotas", &quota).await.unwrap();
        let role = json!({"apiVersion": format!("{api}/v1"), "kind": "ClusterRole", "metadata": {"name": "readers"},
            "rules": [{"apiGroups": ["example.com"], "resources": ["widgets"], "verbs": ["list"]}]});
        self.create(&format!("{rbac}/clusterroles"), &role).await.unwrap();
        let binding = json!({"apiVersion": format!("{api}/v1"), "kind": "ClusterRoleBinding",
            "metadata": {"name": "readers"},
            "roleRef": {"apiGroup": api, "kind": "ClusterRole", "name": "readers"},
            "subjects": [{"apiGroup": api, "kind": "User", "name": "reader"}]});
        self.create(&format!("{rbac}/clusterrolebindings"), &binding).await.unwrap();
    }

    /// The code of the error of a list, if it fails.
    async fn listed(&self, client: &Client) -> Option<u16> {
        call(client, Method::GET, &widgets("counted"), None).await.err()
    }

    /// The number of widgets that the quota counts.
    async fn used(&self) -> Value {
        let text = self.get("/api/v1/namespaces/counted/resourcequotas/q").await.unwrap();
        let quota: Value = serde_json::from_str(&text).unwrap();
        quota["status"]["used"]["count/widgets.example.com"].clone()
    }

    /// Creates a widget as soon as widgets are served.
    async fn create_widget(&self, namespace: &str, object: &Value) {
        let path = widgets(namespace);
        eventually_async("widgets to be served", SECONDS, async || self.create(&path, object).await.is_ok())
            .await;
    }

    async fn quota_follows(&self) {
        self.create_widget("counted", &widget("first", json!([]))).await;
        assert_eq!(self.create(&widgets("counted"), &widget("second", json!([]))).await, Err(403));
        eventually_async("the quota to count the widget", SECONDS, async || self.used().await == "1").await;
    }

    /// Waits until a widget is collected after its owner, a config map with the uid `owner`, was deleted.
    async fn collection_follows(&self, owner: &Value) {
        let owners = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner}]);
        self.create_widget("owned", &widget("owned", owners)).await;
        self.delete("/api/v1/namespaces/owned/configmaps/owner").await.unwrap();
        let path = format!("{}/owned", widgets("owned"));
        eventually_async("the widget to be collected", SECONDS, async || self.get(&path).await == Err(404))
            .await;
    }

    async fn create_definition(&self) {
        let owner = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "owner"}});
        let owner = self.create("/api/v1/namespaces/owned/configmaps", &owner).await.unwrap();
        let owner: Value = serde_json::from_str(&owner).unwrap();
        self.create(DEFINITIONS, &definition()).await.unwrap();
        let has = async |path: &str, text: &str| self.get(path).await.is_ok_and(|found| found.contains(text));
        tokio::join!(
            eventually_async("discovery", SECONDS, async || has(VERSION, "\"widgets\"").await),
            eventually_async("OpenAPI", SECONDS, async || has(DOCUMENT, "com.example.v1.Widget").await),
            eventually_async("a list", SECONDS, async || self.listed(&self.reader).await.is_none()),
            self.quota_follows(),
            self.collection_follows(&owner["metadata"]["uid"]),
        );
        assert_eq!(self.listed(&self.stranger).await, Some(403));
    }

    async fn delete_definition(&self) {
        let path = format!("{DEFINITIONS}/widgets.example.com");
        self.delete(&path).await.unwrap();
        let is_gone = async |path: &str| self.get(path).await == Err(404);
        tokio::join!(
            eventually_async("no discovery", SECONDS, async || is_gone(VERSION).await),
            eventually_async("no OpenAPI", SECONDS, async || is_gone(DOCUMENT).await),
            eventually_async("no list", SECONDS, async || self.listed(&self.reader).await == Some(404)),
            eventually_async("no use of the quota", SECONDS, async || self.used().await == "0"),
            eventually_async("no definition", SECONDS, async || is_gone(&path).await),
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_parts_follow_a_definition() {
    let directory = tempfile::tempdir().unwrap();
    let mut config = ControlPlaneConfig::new(directory.path());
    config.listen = "127.0.0.1:0".parse().unwrap();
    config.run_scheduler = false;
    config.controllers = ControllerSelection::parse(vec!["garbage-collector-controller".to_owned()]).unwrap();
    let shutdown = CancellationToken::new();
    let plane = start(config, shutdown.clone()).await.unwrap();
    let clients = Clients::of(&plane);
    clients.prepare().await;
    for _ in 0..ROUNDS {
        clients.create_definition().await;
        clients.delete_definition().await;
    }
    shutdown.cancel();
    plane.stopped().await;
}
