//! `/checkpoint`: writes a checkpoint of a running container into the state directory.

use std::fs::DirBuilder;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};

use coracle_proto::cri::CheckpointContainerRequest;
use http::{Response, StatusCode};
use jiff::Timestamp;

use super::backend::Backend;
use super::logs::container;
use super::respond::{Refused, json};
use super::route::{Target, values};
use super::streams;
use crate::runtime::Body;

/// Answers with the path of the archive. `timeout` in the query is in seconds.
pub(super) async fn answer(backend: &Backend, target: &Target, query: &str) -> Response<Body> {
    match make(backend, target, query).await {
        Ok(location) => json(&serde_json::json!({"items": [location]})),
        Err(refused) => refused.answer(),
    }
}

async fn make(backend: &Backend, target: &Target, query: &str) -> Result<String, Refused> {
    let absent = |why: String| Refused(StatusCode::NOT_FOUND, why);
    let pod = backend.pods.pod(&target.namespace, &target.pod);
    let pod = pod.ok_or_else(|| absent("pod does not exist".to_owned()))?;
    if !container::is_in(&pod, &target.container) {
        return Err(absent(format!("container {} does not exist", target.container)));
    }
    let timeout = values(query, &["timeout"]).last().map_or(Ok(0), |seconds| seconds.parse::<i64>());
    let timeout = timeout.map_err(|_invalid| absent("cannot parse value of timeout parameter".to_owned()))?;
    let failed = |why: &str| {
        let Target { namespace, pod, container, .. } = target;
        let message = format!("checkpointing of {namespace}/{pod}/{container} failed ({why})");
        Refused(StatusCode::INTERNAL_SERVER_ERROR, message)
    };
    let container_id = streams::running(backend, target).await?;
    let dir = backend.state_dir.join("checkpoints");
    // A checkpoint has the memory of the container, with its secrets.
    let made = DirBuilder::new().recursive(true).mode(0o700).create(&dir);
    made.map_err(|error| failed(&error.to_string()))?;
    let location = location(&dir, target, Timestamp::now()).to_string_lossy().into_owned();
    let request = CheckpointContainerRequest { container_id, location: location.clone(), timeout };
    let made = backend.runtime.checkpoint_container(request).await;
    made.map_err(|error| failed(error.message()))?;
    Ok(location)
}

/// The path of a checkpoint: the kubelet's name with a time in whole seconds.
fn location(dir: &Path, target: &Target, now: Timestamp) -> PathBuf {
    let Target { namespace, pod, container, .. } = target;
    let now = Timestamp::from_second(now.as_second()).unwrap_or(now);
    dir.join(format!("checkpoint-{pod}_{namespace}-{container}-{now}.tar"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_checkpoint_has_the_kubelets_name() {
        let target =
            Target { namespace: "ns".to_owned(), pod: "p".to_owned(), uid: None, container: "c".to_owned() };
        let now = Timestamp::from_millisecond(1_500).unwrap();
        let path = location(Path::new("/state/checkpoints"), &target, now);
        assert_eq!(path, Path::new("/state/checkpoints/checkpoint-p_ns-c-1970-01-01T00:00:01Z.tar"));
    }
}
