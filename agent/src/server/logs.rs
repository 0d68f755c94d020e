//! `/containerLogs`: logs of containers, from the files that the runtime writes in the CRI format.

pub(super) mod container;
mod files;
mod follow;
mod line;
mod options;
mod output;

use std::convert::Infallible;
use std::sync::Arc;

use bytes::Bytes;
use coracle_proto::cri;
use futures::StreamExt;
use http::{Response, StatusCode, header};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use k8s_openapi::api::core::v1::{ContainerStatus, Pod};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::backend::Backend;
use super::respond::text;
use crate::runtime::Body;
pub(crate) use line::Line;
use options::Options;

/// Maximum chunks that wait for a slow reader.
const MAX_WAITING_CHUNKS: usize = 2;

pub(super) async fn answer(
    backend: &Backend,
    namespace: &str,
    name: &str,
    container: &str,
    query: &str,
) -> Response<Body> {
    let options = match Options::of(query, jiff::Timestamp::now()) {
        Ok(options) => options,
        Err(reason) => {
            return text(
                StatusCode::UNPROCESSABLE_ENTITY,
                serde_json::json!({"message": "Invalid request.", "reason": reason}).to_string(),
            );
        }
    };
    let Some(pod) = backend.pods.pod(namespace, name) else {
        return text(StatusCode::NOT_FOUND, format!("pod \"{name}\" does not exist\n"));
    };
    if !container::is_in(&pod, container) {
        return text(
            StatusCode::NOT_FOUND,
            format!("container \"{container}\" not found in pod \"{name}\"\n"),
        );
    }
    match find(backend, &pod, container, &options).await {
        Ok(found) => stream(backend, found, options).await,
        Err(reason) => text(StatusCode::BAD_REQUEST, reason),
    }
}

/// The container whose log is requested. The reasons of a failure are the kubelet's.
async fn find(
    backend: &Backend,
    pod: &Pod,
    name: &str,
    options: &Options,
) -> Result<cri::ContainerStatus, String> {
    let pod_name = pod.metadata.name.as_deref().unwrap_or_default();
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let all = container::find(backend, uid, name).await.map_err(|status| status.message().to_owned())?;
    let started = all.into_iter().filter(|c| c.state != i32::from(cri::ContainerState::ContainerCreated));
    let chosen = started.into_iter().nth(usize::from(options.previous));
    let Some(chosen) = chosen else {
        return Err(match (options.previous, waiting(pod, name).as_deref()) {
            (true, _) => format!("previous terminated container \"{name}\" in pod \"{pod_name}\" not found"),
            (false, Some("ErrImagePull")) => format!(
                "container \"{name}\" in pod \"{pod_name}\" is waiting to start: image can't be pulled"
            ),
            (false, Some("ImagePullBackOff")) => format!(
                "container \"{name}\" in pod \"{pod_name}\" is waiting to start: trying and failing to pull image"
            ),
            (false, reason) => format!(
                "container \"{name}\" in pod \"{pod_name}\" is waiting to start: {}",
                reason.unwrap_or("ContainerCreating")
            ),
        });
    };
    let request = cri::ContainerStatusRequest { container_id: chosen.id, verbose: false };
    let status =
        backend.runtime.container_status(request).await.map_err(|status| status.message().to_owned())?;
    status.status.ok_or_else(|| format!("container \"{name}\" in pod \"{pod_name}\" has no status"))
}

fn waiting(pod: &Pod, name: &str) -> Option<String> {
    let status = pod.status.as_ref()?;
    let mut all = status
        .container_statuses
        .iter()
        .chain(&status.init_container_statuses)
        .chain(&status.ephemeral_container_statuses)
        .flatten();
    let found: &ContainerStatus = all.find(|status| status.name == name)?;
    found.state.as_ref()?.waiting.as_ref()?.reason.clone()
}

async fn stream(backend: &Backend, of: cri::ContainerStatus, options: Options) -> Response<Body> {
    let (sender, receiver) = mpsc::channel::<Bytes>(MAX_WAITING_CHUNKS);
    let ended =
        if options.follow { container::ended(backend, &of.id).await } else { container::Ended::of_stopped() };
    let reading = follow::read(of.log_path.into(), options, (ended, Arc::clone(&backend.logs)), sender);
    tokio::spawn(async move {
        if let Err(error) = reading.await {
            tracing::warn!(error = coracle_error_chain::chain(&error), "cannot read a container's log");
        }
    });
    let frames = ReceiverStream::new(receiver).map(|chunk| Ok::<_, Infallible>(Frame::data(chunk)));
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain"));
    response
}

/// Fuzz target: a client's query, and then the lines of a log.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let mut lines = data.split(|byte| *byte == b'\n');
    let query = String::from_utf8_lossy(lines.next().unwrap_or_default());
    let options = Options::of(&query, jiff::Timestamp::UNIX_EPOCH).unwrap_or_default();
    let (mut printer, mut printed) = (line::Printer::new(&options), Vec::new());
    lines.for_each(|line| printer.print(line, &mut printed));
    // A printed line has its time and its text, without the other fields.
    assert!(printed.len() <= data.len() && printed.len() <= options.limit.unwrap_or(usize::MAX));
}
