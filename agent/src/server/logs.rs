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
use k8s_openapi::api::core::v1::{ContainerStatus, Pod, PodStatus};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use super::backend::Backend;
use super::limits::LogPermit;
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
    let newest = backend.pods.status(uid);
    let status = newest.as_ref().or(pod.status.as_ref()).and_then(|status| status_of(status, name));
    let Some(chosen) = choose(all, options.previous, status) else {
        return Err(match (options.previous, status.and_then(waiting)) {
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

/// Selects the container with the log. `all` has the newest container first. The previous container is the container of
/// the last termination. In a crash loop, while the next start is awaited, the previous container is the newest started
/// container. Otherwise it is the container before the newest started container.
fn choose(
    all: Vec<cri::Container>,
    previous: bool,
    status: Option<&ContainerStatus>,
) -> Option<cri::Container> {
    let is_created = |one: &cri::Container| one.state == i32::from(cri::ContainerState::ContainerCreated);
    let mut started: Vec<cri::Container> = all.into_iter().filter(|one| !is_created(one)).collect();
    let terminated = status.and_then(|status| status.last_state.as_ref()?.terminated.as_ref());
    // The status has the name of the runtime before the id.
    let last = terminated.and_then(|last| Some(last.container_id.as_deref()?.split_once("://")?.1));
    let index = match previous {
        true => last.and_then(|last| started.iter().position(|one| one.id == last)).unwrap_or(1),
        false => 0,
    };
    (index < started.len()).then(|| started.swap_remove(index))
}

fn waiting(status: &ContainerStatus) -> Option<&str> {
    status.state.as_ref()?.waiting.as_ref()?.reason.as_deref()
}

fn status_of<'a>(status: &'a PodStatus, name: &str) -> Option<&'a ContainerStatus> {
    let mut all = status
        .container_statuses
        .iter()
        .chain(&status.init_container_statuses)
        .chain(&status.ephemeral_container_statuses)
        .flatten();
    all.find(|status| status.name == name)
}

async fn stream(backend: &Backend, of: cri::ContainerStatus, options: Options) -> Response<Body> {
    let (sender, receiver) = mpsc::channel::<Bytes>(MAX_WAITING_CHUNKS);
    let ended =
        if options.follow { container::ended(backend, &of.id).await } else { container::Ended::of_stopped() };
    let reading = follow::read(of.log_path.into(), options, ended, Arc::clone(&backend.logs), sender);
    let permit = LogPermit::default();
    let of_reader = permit.clone();
    coracle_threads::spawn(async move {
        if let Err(error) = reading.await {
            tracing::warn!(error = coracle_error_chain::chain(&error), "cannot read a container's log");
        }
        drop(of_reader);
    });
    let frames = ReceiverStream::new(receiver).map(|chunk| Ok::<_, Infallible>(Frame::data(chunk)));
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static("text/plain"));
    response.extensions_mut().insert(permit);
    response
}

/// Fuzz target. The first line of the input is a client's query, the other lines are a log.
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_previous_container_is_that_of_the_last_termination() {
        let container = |id: &str, state: cri::ContainerState| cri::Container {
            id: id.to_owned(),
            state: state.into(),
            ..Default::default()
        };
        let exited = |id: &str| container(id, cri::ContainerState::ContainerExited);
        let chosen = |all: &[cri::Container], previous: bool, last: Option<&str>| {
            let last =
                last.map(|id| json!({"terminated": {"exitCode": 1, "containerID": format!("x://{id}")}}));
            let status = json!({"name": "c", "image": "i", "imageID": "", "ready": false, "restartCount": 1,
                "lastState": last.unwrap_or_default()});
            let status: ContainerStatus = serde_json::from_value(status).expect("a status");
            choose(all.to_vec(), previous, Some(&status)).map(|one| one.id)
        };
        let running = [container("2", cri::ContainerState::ContainerRunning), exited("1")];
        assert_eq!(chosen(&running, true, Some("1")).as_deref(), Some("1"));
        assert_eq!(chosen(&running, false, Some("1")).as_deref(), Some("2"));
        // The container waits for its next start.
        let crashed = [container("3", cri::ContainerState::ContainerCreated), exited("2"), exited("1")];
        assert_eq!(chosen(&crashed, true, Some("2")).as_deref(), Some("2"));
        assert_eq!(chosen(&crashed, false, Some("2")).as_deref(), Some("2"));
        // The status is older than the containers.
        assert_eq!(chosen(&running, true, None).as_deref(), Some("1"));
        assert_eq!(chosen(&running, true, Some("0")).as_deref(), Some("1"));
        assert_eq!(chosen(&[exited("1")], true, None), None);
        assert_eq!(choose(running.to_vec(), true, None).map(|one| one.id).as_deref(), Some("1"));
    }
}
