//! The controller against an API that refuses a write.

use std::collections::BTreeSet;
use std::convert::Infallible;

use http::{Request, Response};
use serde_json::Value;
use tokio::sync::OnceCell;

use super::*;
use crate::caches::Caches;
use crate::config::ControllersConfig;

/// Grants every status patch with what the test has given it, but refuses one pod's once: somebody was faster.
#[derive(Clone, Default)]
struct Api {
    objects: Arc<Mutex<BTreeMap<String, Value>>>,
    refuses: Arc<Mutex<BTreeSet<String>>>,
}

impl Api {
    fn put(&self, path: &str, object: &Value) {
        lock(&self.objects).insert(path.to_owned(), object.clone());
    }

    async fn answer(&self, request: Request<kube::client::Body>) -> Response<String> {
        let (head, body) = request.into_parts();
        let path = head.uri.path().trim_end_matches("/status").to_owned();
        if lock(&self.refuses).remove(&path) {
            let conflict = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 409,
                "reason": "Conflict", "message": "the object has been modified"});
            let mut response = Response::new(conflict.to_string());
            *response.status_mut() = http::StatusCode::CONFLICT;
            return response;
        }
        let patch: Value = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
        let mut objects = lock(&self.objects);
        let object = objects.get_mut(&path).unwrap();
        for part in ["spec", "status"] {
            for (name, value) in patch[part].as_object().into_iter().flatten() {
                object[part][name] = value.clone();
            }
        }
        let version: u64 = object["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
        object["metadata"]["resourceVersion"] = json!((version + 100).to_string());
        Response::new(object.to_string())
    }

    fn context(&self, config: ControllersConfig) -> Context {
        let api = self.clone();
        let service = tower::service_fn(move |request| {
            let api = api.clone();
            async move { Ok::<_, Infallible>(api.answer(request).await) }
        });
        let client = kube::Client::new(service, "default");
        Context {
            recorder: coracle_events::recorder(client.clone()).0,
            client,
            caches: Caches::new(),
            config,
            lifecycle: Arc::new(Lifecycle::new()),
            last_ranges: Mutex::default(),
            kinds: OnceCell::new(),
        }
    }

    fn ready(&self, path: &str) -> String {
        lock(&self.objects)[path]["status"]["conditions"][0]["status"].as_str().unwrap().to_owned()
    }
}

fn of(kind: &str, name: &str, version: u64) -> Value {
    json!({"apiVersion": "v1", "kind": kind, "spec": {"nodeName": "n"},
        "metadata": {"name": name, "uid": name, "resourceVersion": version.to_string()},
        "status": {"conditions": [{"type": "Ready", "status": "True"}]}})
}

#[tokio::test]
async fn no_pod_of_a_lost_node_stays_ready_though_a_write_is_refused() {
    let api = Api::default();
    let context = api.context(ControllersConfig {
        node_monitor_grace: Duration::ZERO,
        node_startup_grace: Duration::ZERO,
        ..ControllersConfig::default()
    });
    let node = of("Node", "n", 1);
    api.put("/api/v1/nodes/n", &node);
    context.caches.nodes.written(serde_json::from_value(node).unwrap());
    let paths = ["a", "b", "c"].map(|name| format!("/api/v1/namespaces/default/pods/{name}"));
    for (version, (name, path)) in (2..).zip(["a", "b", "c"].iter().zip(&paths)) {
        let mut pod = of("Pod", name, version);
        pod["metadata"]["namespace"] = json!("default");
        api.put(path, &pod);
        context.caches.pods.written(serde_json::from_value(pod).unwrap());
    }
    lock(&api.refuses).insert(paths[1].clone());
    let key = Key::new("", "n");
    assert!(reconcile(&context, key.clone()).await.is_err_and(|error| error.is_conflict()));
    assert_eq!(api.ready("/api/v1/nodes/n"), "Unknown");
    // What the queue does with what failed.
    assert!(reconcile(&context, key).await.is_ok());
    assert_eq!(paths.map(|path| api.ready(&path)), ["False", "False", "False"]);
}
