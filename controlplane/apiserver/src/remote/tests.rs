//! A webhook in this process, on the loopback interface.

use std::{
    convert::Infallible,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use futures::FutureExt as _;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use serde_json::json;

use super::*;

/// A server that answers each request by a function of its body.
pub(crate) struct Hook {
    directory: tempfile::TempDir,
    pub(crate) calls: Arc<AtomicUsize>,
    /// The bodies of the requests.
    pub(crate) bodies: Arc<Mutex<Vec<Value>>>,
}

impl Hook {
    pub(crate) async fn start(answer: impl Fn(&Value) -> (u16, String) + Send + Sync + 'static) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let (calls, bodies) = (Arc::<AtomicUsize>::default(), Arc::<Mutex<Vec<Value>>>::default());
        let (counter, seen, answer) = (calls.clone(), bodies.clone(), Arc::new(answer));
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (counter, seen, answer) = (counter.clone(), seen.clone(), answer.clone());
                let service = service_fn(move |request: Request<Incoming>| {
                    let (counter, seen, answer) = (counter.clone(), seen.clone(), answer.clone());
                    async move {
                        counter.fetch_add(1, Ordering::SeqCst);
                        let body = request.into_body().collect().await.unwrap().to_bytes();
                        let body: Value = serde_json::from_slice(&body).unwrap();
                        let (code, text) = answer(&body);
                        seen.lock().unwrap().push(body);
                        let mut response = Response::new(Full::<Bytes>::from(text));
                        *response.status_mut() = StatusCode::from_u16(code).unwrap();
                        Ok::<_, Infallible>(response)
                    }
                });
                tokio::spawn(
                    hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service),
                );
            }
        });
        let directory = tempfile::tempdir().unwrap();
        let file = json!({
            "clusters": [{"name": "c", "cluster": {"server": url}}], "current-context": "x",
            "contexts": [{"name": "x", "context": {"cluster": "c"}}],
        });
        std::fs::write(directory.path().join("config"), file.to_string()).unwrap();
        Self { directory, calls, bodies }
    }

    /// The kubeconfig file.
    pub(crate) fn file(&self) -> std::path::PathBuf {
        self.directory.path().join("config")
    }

    pub(crate) fn count(&self) -> usize {
        self.calls.load(Ordering::SeqCst)
    }

    fn remote(&self) -> Remote {
        Remote::read(&self.file(), Duration::from_secs(60)).unwrap()
    }
}

#[tokio::test]
async fn temporary_failures_are_tried_again_and_final_ones_are_not() {
    let failing = Hook::start(|_| (500, String::new())).await;
    assert!(failing.remote().post(&json!({})).await.is_err());
    assert_eq!(failing.count(), 1 + BACKOFFS.len());
    let refusing = Hook::start(|_| (403, String::new())).await;
    assert!(refusing.remote().post(&json!({})).await.is_err());
    assert_eq!(refusing.count(), 1);
    let working = Hook::start(|body| (200, body.to_string())).await;
    assert_eq!(working.remote().post(&json!({"a": 1})).await.unwrap(), json!({"a": 1}));
}

#[tokio::test]
async fn a_failed_connection_is_tried_again_only_if_requested() {
    let hook = Hook::start(|_| (200, "{}".to_owned())).await;
    let reserved = coracle_testing::ClosedPort::reserve();
    let closed = reserved.address();
    let file = json!({
        "clusters": [{"name": "c", "cluster": {"server": format!("http://{closed}")}}], "current-context": "x",
        "contexts": [{"name": "x", "context": {"cluster": "c"}}],
    });
    std::fs::write(hook.file(), file.to_string()).unwrap();
    let attempt = async |remote: Remote| remote.attempt(Bytes::from("{}")).await.err().unwrap().is_temporary;
    assert!(!attempt(hook.remote()).await);
    assert!(attempt(hook.remote().with_connection_retries()).await);
}

#[tokio::test]
async fn one_source_leaves_calls_for_others() {
    let hook = Hook::start(|_| (200, "{}".to_owned())).await;
    let remote = hook.remote();
    let next = || remote.calls.acquire("", "source:1".into()).now_or_never().flatten();
    let held: Vec<_> = std::iter::from_fn(next).collect();
    assert_eq!(held.len(), MAX_CONCURRENT_CALLS / 2);
    let body = json!({});
    let post = |owner: &str| Box::pin(request_owner::scope(owner.into(), remote.post(&body)));
    assert!(post("source:1").now_or_never().is_none() && hook.count() == 0);
    assert_eq!(post("source:2").await, Ok(json!({})));
}

#[tokio::test]
async fn look_ups_of_a_host_have_the_limits_of_other_look_ups() {
    let hook = Hook::start(|_| (200, "{}".to_owned())).await;
    let (by_address, body) = (hook.remote(), json!({}));
    let file = std::fs::read_to_string(hook.file()).unwrap().replace("127.0.0.1", "localhost");
    std::fs::write(hook.file(), file).unwrap();
    let remote = hook.remote();
    let slots = crate::resolver::occupy().await;
    let mut call = Box::pin(remote.post(&body));
    // Later calls that need no look-up overtake it.
    for _ in 0..10 {
        tokio::select! {
            biased;
            early = call.as_mut() => panic!("all slots are occupied: {early:?}"),
            answer = by_address.post(&body) => assert_eq!(answer, Ok(json!({}))),
        }
    }
    assert_eq!(hook.count(), 10, "all slots are occupied");
    drop(slots);
    assert_eq!(call.await, Ok(json!({})));
}

#[tokio::test]
async fn garbage_and_large_answers_are_errors() {
    let garbage = Hook::start(|_| (200, "<html>".to_owned())).await;
    assert!(garbage.remote().post(&json!({})).await.unwrap_err().contains("not JSON"));
    let large = Hook::start(|_| (200, " ".repeat(MAX_RESPONSE + 1))).await;
    assert!(large.remote().post(&json!({})).await.unwrap_err().contains("larger"));
    assert_eq!(large.count(), 1);
}
