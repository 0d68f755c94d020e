//! Exec, attach and port-forward: checked here, exchanged for the runtime's token, served by the runtime.

use bytes::Bytes;
use coracle_error_chain::chain;
use coracle_proto::cri;
use futures::future::BoxFuture;
use http::uri::PathAndQuery;
use http::{Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;

use super::logs::container;
use super::route::{Target, flag, values};
use super::{Backend, Body, Refused, Streams, text};

pub(super) async fn exec(backend: &Backend, target: &Target, request: Request<Incoming>) -> Response<Body> {
    let query = request.uri().query().unwrap_or_default().to_owned();
    let container_id = match running(backend, target).await {
        Ok(id) => id,
        Err(refused) => return refused.answer(),
    };
    let tty = flag(&query, &["tty"]);
    let wanted = cri::ExecRequest {
        container_id,
        cmd: values(&query, &["command"]).collect(),
        tty,
        stdin: flag(&query, &["input", "stdin"]),
        stdout: flag(&query, &["output", "stdout"]),
        // A terminal has one output only.
        stderr: flag(&query, &["error", "stderr"]) && !tty,
    };
    if !wanted.stdin && !wanted.stdout && !wanted.stderr {
        return text(StatusCode::BAD_REQUEST, "you must specify at least 1 of stdin, stdout, stderr");
    }
    match backend.runtime.exec(wanted).await {
        Ok(answer) => backend.streams.stream(&answer.url, request).await,
        Err(status) => Refused::by_runtime(&status).answer(),
    }
}

pub(super) async fn attach(backend: &Backend, target: &Target, request: Request<Incoming>) -> Response<Body> {
    let query = request.uri().query().unwrap_or_default().to_owned();
    let container_id = match running(backend, target).await {
        Ok(id) => id,
        Err(refused) => return refused.answer(),
    };
    let tty = flag(&query, &["tty"]);
    let wanted = cri::AttachRequest {
        container_id,
        tty,
        stdin: flag(&query, &["input", "stdin"]),
        stdout: flag(&query, &["output", "stdout"]),
        stderr: flag(&query, &["error", "stderr"]) && !tty,
    };
    if !wanted.stdin && !wanted.stdout && !wanted.stderr {
        return text(StatusCode::BAD_REQUEST, "you must specify at least 1 of stdin, stdout, stderr");
    }
    match backend.runtime.attach(wanted).await {
        Ok(answer) => backend.streams.stream(&answer.url, request).await,
        Err(status) => Refused::by_runtime(&status).answer(),
    }
}

pub(super) async fn port_forward(
    backend: &Backend,
    (namespace, name): (&str, &str),
    request: Request<Incoming>,
) -> Response<Body> {
    let Some(uid) = backend.pods.pod(namespace, name).and_then(|pod| pod.metadata.uid.clone()) else {
        return text(StatusCode::NOT_FOUND, "pod does not exist");
    };
    let filter = cri::PodSandboxFilter {
        state: Some(cri::PodSandboxStateValue { state: cri::PodSandboxState::SandboxReady.into() }),
        label_selector: [("io.kubernetes.pod.uid".to_owned(), uid)].into(),
        ..Default::default()
    };
    let listed = backend.runtime.list_pod_sandbox(cri::ListPodSandboxRequest { filter: Some(filter) }).await;
    let sandbox = match listed {
        Ok(list) => list.items.into_iter().max_by_key(|sandbox| sandbox.created_at),
        Err(status) => return Refused::by_runtime(&status).answer(),
    };
    let Some(sandbox) = sandbox else {
        return text(StatusCode::INTERNAL_SERVER_ERROR, format!("pod not found (\"{name}_{namespace}\")"));
    };
    let query = request.uri().query().unwrap_or_default();
    let ports = values(query, &["port", "ports"])
        .flat_map(|list| list.split(',').map(str::parse::<i32>).collect::<Vec<_>>());
    let Ok(port) = ports.collect::<Result<Vec<i32>, _>>() else {
        return text(StatusCode::BAD_REQUEST, "port is not a number");
    };
    match backend.runtime.port_forward(cri::PortForwardRequest { pod_sandbox_id: sandbox.id, port }).await {
        Ok(answer) => backend.streams.stream(&answer.url, request).await,
        Err(status) => Refused::by_runtime(&status).answer(),
    }
}

/// The id of the running container.
async fn running(backend: &Backend, target: &Target) -> Result<String, Refused> {
    let pod = backend.pods.pod(&target.namespace, &target.pod);
    let uid = pod
        .and_then(|pod| pod.metadata.uid.clone())
        .filter(|uid| target.uid.as_ref().is_none_or(|wanted| wanted == uid));
    let Some(uid) = uid else { return Err(Refused(StatusCode::NOT_FOUND, "pod does not exist".to_owned())) };
    let found = container::find(backend, &uid, &target.container)
        .await
        .map_err(|status| Refused::by_runtime(&status))?;
    let running = found.into_iter().find(|c| c.state == i32::from(cri::ContainerState::ContainerRunning));
    let absent = || {
        Refused(StatusCode::INTERNAL_SERVER_ERROR, format!("container not found (\"{}\")", target.container))
    };
    running.map(|container| container.id).ok_or_else(absent)
}

/// The request as the runtime expects it: its own path with the token, the caller's query.
fn retarget(url: &str, request: &mut Request<Incoming>) -> Option<Uri> {
    let url: Uri = url.parse().ok()?;
    let query = request.uri().query().or(url.query()).map(|query| format!("?{query}")).unwrap_or_default();
    let path = PathAndQuery::try_from(format!("{}{query}", url.path())).ok()?;
    *request.uri_mut() = Uri::from(path);
    Some(url)
}

fn bad_url(url: &str) -> Response<Body> {
    text(StatusCode::BAD_GATEWAY, format!("the runtime answered with the address {url:?}"))
}

impl Streams for coracle_cri::Runtime {
    fn stream(&self, url: &str, mut request: Request<Incoming>) -> BoxFuture<'static, Response<Body>> {
        let (runtime, url) = (self.clone(), url.to_owned());
        Box::pin(async move {
            if retarget(&url, &mut request).is_none() {
                return bad_url(&url);
            }
            coracle_cri::Runtime::stream(&runtime, request).await.map(BodyExt::boxed_unsync)
        })
    }
}

/// Streams of a runtime in another process: the bytes are passed on as they are.
#[derive(Clone, Copy, Debug, Default)]
pub struct Proxy;

impl Streams for Proxy {
    fn stream(&self, url: &str, mut request: Request<Incoming>) -> BoxFuture<'static, Response<Body>> {
        let url = url.to_owned();
        Box::pin(async move {
            let Some(address) =
                retarget(&url, &mut request).and_then(|url| url.authority().map(ToString::to_string))
            else {
                return bad_url(&url);
            };
            match pass_on(&address, request).await {
                Ok(response) => response,
                Err(reason) => {
                    text(StatusCode::BAD_GATEWAY, format!("cannot reach the runtime's stream: {reason}"))
                }
            }
        })
    }
}

/// Sends the request there, and when it is upgraded, couples the two connections.
async fn pass_on(address: &str, mut request: Request<Incoming>) -> Result<Response<Body>, String> {
    let said = |error: &dyn std::error::Error| chain(error);
    let stream = TcpStream::connect(address).await.map_err(|e| said(&e))?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| said(&e))?;
    tokio::spawn(connection.with_upgrades());
    let mut onward = Request::new(Empty::<Bytes>::new());
    *onward.method_mut() = request.method().clone();
    *onward.uri_mut() = request.uri().clone();
    *onward.headers_mut() = request.headers().clone();
    let host = header::HeaderValue::from_str(address).map_err(|e| said(&e))?;
    onward.headers_mut().insert(header::HOST, host);
    let mut answer = sender.send_request(onward).await.map_err(|e| said(&e))?;
    if answer.status() != StatusCode::SWITCHING_PROTOCOLS {
        let (head, body) = answer.into_parts();
        let body = body.collect().await.map_err(|e| said(&e))?.to_bytes();
        return Ok(Response::from_parts(head, http_body_util::Full::new(body).boxed_unsync()));
    }
    let (theirs, ours) = (hyper::upgrade::on(&mut answer), hyper::upgrade::on(&mut request));
    tokio::spawn(async move {
        if let (Ok(theirs), Ok(ours)) = tokio::join!(theirs, ours) {
            // Either end hanging up is how a stream ends.
            let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(theirs), &mut TokioIo::new(ours)).await;
        }
    });
    Ok(answer.map(|_| Empty::new().boxed_unsync()))
}
