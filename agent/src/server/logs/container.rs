//! Containers of a pod in the runtime, and the end of a container.

use coracle_proto::cri;
use k8s_openapi::api::core::v1::Pod;

use crate::runtime::RuntimeError;
use crate::server::backend::Backend;
use crate::server::container_ends::End;

/// Whether the pod's spec has this container.
pub(in crate::server) fn is_in(pod: &Pod, name: &str) -> bool {
    let Some(spec) = &pod.spec else { return false };
    let mut names = spec.containers.iter().chain(spec.init_containers.iter().flatten()).map(|c| &c.name);
    let mut later = spec.ephemeral_containers.iter().flatten().map(|c| &c.name);
    names.any(|n| n == name) || later.any(|n| n == name)
}

/// The pod's containers of this name, the newest first.
pub(in crate::server) async fn find(
    backend: &Backend,
    uid: &str,
    name: &str,
) -> Result<Vec<cri::Container>, RuntimeError> {
    let labels = [("io.kubernetes.pod.uid", uid), ("io.kubernetes.container.name", name)];
    let filter = cri::ContainerFilter {
        label_selector: labels.map(|(key, value)| (key.to_owned(), value.to_owned())).into(),
        ..Default::default()
    };
    let mut found = backend
        .runtime
        .list_containers(cri::ListContainersRequest { filter: Some(filter) })
        .await?
        .containers;
    found.sort_by_key(|c| std::cmp::Reverse((c.metadata.as_ref().map_or(0, |m| m.attempt), c.created_at)));
    Ok(found)
}

/// Waits for a container to end.
pub(super) struct Ended(Option<End>);

/// Returns a wait for the end of this container. The wait ends at once if the container does not run.
pub(super) async fn ended(backend: &Backend, id: &str) -> Ended {
    // Events are subscribed before the status is read, so that an end in between is not missed.
    let end = backend.ends.of(backend.runtime.as_ref(), id).await;
    let status = backend
        .runtime
        .container_status(cri::ContainerStatusRequest { container_id: id.to_owned(), verbose: false })
        .await;
    let state = status.ok().and_then(|answer| answer.status).map(|status| status.state);
    let is_alive = state == Some(cri::ContainerState::ContainerRunning.into())
        || state == Some(cri::ContainerState::ContainerCreated.into());
    Ended(end.filter(|_| is_alive))
}

impl Ended {
    /// The end of a container that does not run.
    pub(super) fn of_stopped() -> Ended {
        Ended(None)
    }

    #[cfg(test)]
    pub(super) fn by(id: &str, events: crate::runtime::Events) -> Ended {
        let ends = std::sync::Arc::<crate::server::container_ends::ContainerEnds>::default();
        let end = ends.register(id);
        ends.listen(events);
        Ended(Some(end))
    }

    pub(super) fn is_over(&self) -> bool {
        self.0.is_none()
    }

    /// Returns at once if the container has ended. Cancel-safe.
    pub(super) async fn wait(&mut self) {
        if let Some(end) = &mut self.0 {
            end.wait().await;
        }
        self.0 = None;
    }
}
