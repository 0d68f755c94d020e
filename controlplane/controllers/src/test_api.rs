//! A simulated API server for tests of controllers: fixed objects, and a log of the writes.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};

use http::{Method, Response, StatusCode};
use serde_json::{Value, json};

use crate::config::ControllersConfig;
use crate::context::Context;

/// A write request.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Write {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) body: Value,
}

/// A context with empty caches, whose client sends its requests to the simulated API.
pub(crate) struct TestApi {
    pub(crate) context: Context,
    writes: Arc<Mutex<Vec<Write>>>,
}

impl TestApi {
    /// An API with these objects by path. Further pages of a list have the path `LIST?continue=TOKEN`. Reads of other
    /// paths return 404. A write is logged, does not change any object, and returns the object of its path.
    pub(crate) fn new(objects: &[(&str, Value)]) -> Self {
        let objects: BTreeMap<String, Value> =
            objects.iter().map(|(path, object)| ((*path).to_owned(), object.clone())).collect();
        let (objects, writes) = (Arc::new(objects), Arc::<Mutex<Vec<Write>>>::default());
        let log = writes.clone();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            let (objects, log) = (objects.clone(), log.clone());
            async move {
                let (head, body) = request.into_parts();
                if head.method != Method::GET {
                    let body =
                        serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap_or_default();
                    let (method, path) = (head.method.to_string(), head.uri.path().to_owned());
                    let write = Write { method, path, body };
                    log.lock().unwrap_or_else(PoisonError::into_inner).push(write);
                }
                Ok::<_, Infallible>(answer(&objects, &head))
            }
        });
        let client = kube::Client::new(service, "default");
        let recorder = coracle_events::recorder(client.clone(), "").0;
        let context = Context::new(client, recorder, ControllersConfig::default());
        Self { context, writes }
    }

    /// The writes so far.
    pub(crate) fn writes(&self) -> Vec<Write> {
        self.writes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn answer(objects: &BTreeMap<String, Value>, head: &http::request::Parts) -> Response<String> {
    if head.method == Method::DELETE {
        let deleted = json!({"kind": "Status", "apiVersion": "v1", "status": "Success"});
        return Response::new(deleted.to_string());
    }
    let path = head.uri.path().trim_end_matches("/status");
    let token = head.uri.query().unwrap_or_default().split('&').find(|pair| pair.starts_with("continue="));
    let key = token.map_or_else(|| path.to_owned(), |token| format!("{path}?{token}"));
    if let Some(object) = objects.get(&key) {
        return Response::new(object.to_string());
    }
    let missing = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404,
        "reason": "NotFound", "message": "not found", "details": {"name": path.rsplit('/').next()}});
    let mut response = Response::new(missing.to_string());
    *response.status_mut() = StatusCode::NOT_FOUND;
    response
}
