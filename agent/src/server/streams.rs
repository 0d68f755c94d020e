//! Exec, attach and port-forward. The kubelet API authorizes them, a CRI call prepares them, and the runtime serves
//! them.

use coracle_proto::cri;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;

use super::backend::Backend;
use super::logs::container;
use super::respond::{Refused, text};
use super::route::{Target, flag, values};
use crate::runtime::Body;

pub(super) async fn exec(backend: &Backend, target: &Target, request: Request<Incoming>) -> Response<Body> {
    let query = request.uri().query().unwrap_or_default().to_owned();
    let cri::AttachRequest { container_id, stdin, tty, stdout, stderr } =
        match streams_of(backend, target, &query).await {
            Ok(streams) => streams,
            Err(refused) => return refused.answer(),
        };
    let cmd = values(&query, &["command"]).collect();
    match backend.runtime.exec(cri::ExecRequest { container_id, cmd, tty, stdin, stdout, stderr }).await {
        Ok(answer) => backend.streams.stream(&answer.url, request).await,
        Err(error) => Refused::by_runtime(&error).answer(),
    }
}

pub(super) async fn attach(backend: &Backend, target: &Target, request: Request<Incoming>) -> Response<Body> {
    let query = request.uri().query().unwrap_or_default().to_owned();
    let streams = match streams_of(backend, target, &query).await {
        Ok(streams) => streams,
        Err(refused) => return refused.answer(),
    };
    match backend.runtime.attach(streams).await {
        Ok(answer) => backend.streams.stream(&answer.url, request).await,
        Err(error) => Refused::by_runtime(&error).answer(),
    }
}

/// The container of an exec or attach request, and the streams that its query selects.
async fn streams_of(backend: &Backend, target: &Target, query: &str) -> Result<cri::AttachRequest, Refused> {
    let container_id = running(backend, target).await?;
    let tty = flag(query, &["tty"]);
    let streams = cri::AttachRequest {
        container_id,
        tty,
        stdin: flag(query, &["input", "stdin"]),
        stdout: flag(query, &["output", "stdout"]),
        // A terminal has one output.
        stderr: flag(query, &["error", "stderr"]) && !tty,
    };
    if !streams.stdin && !streams.stdout && !streams.stderr {
        let why = "you must specify at least 1 of stdin, stdout, stderr";
        return Err(Refused(StatusCode::BAD_REQUEST, why.to_owned()));
    }
    Ok(streams)
}

pub(super) async fn port_forward(
    backend: &Backend,
    namespace: &str,
    name: &str,
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
        Err(error) => Refused::by_runtime(&error).answer(),
    }
}

/// The id of the running container that a request names. The error is the response.
pub(super) async fn running(backend: &Backend, target: &Target) -> Result<String, Refused> {
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
