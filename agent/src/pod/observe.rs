//! Observation of one pod in the runtime.

use std::collections::HashMap;
use std::path::Path;

use coracle_proto::cri;
use k8s_openapi::api::core::v1::LinuxContainerUser;
use k8s_openapi::jiff::Timestamp;

use super::config::{MESSAGE_PATH, MESSAGE_POLICY, POD_UID, RESOURCES, files};
use super::resize_state::KernelLimits;
use super::state::{ContainerRun, Exit, ObservedContainer, ObservedPod, ObservedSandbox};
use crate::runtime::{Runtime, RuntimeError};

/// Observes the pod with this uid. `known` is its last observation. The status of a container is requested again only
/// if its state has changed or is unknown, and the addresses of a sandbox only when it becomes ready.
pub(crate) async fn observe(
    runtime: &dyn Runtime,
    uid: &str,
    known: &ObservedPod,
) -> Result<ObservedPod, RuntimeError> {
    let labels: HashMap<String, String> = [(POD_UID.to_owned(), uid.to_owned())].into();
    let filter = cri::PodSandboxFilter { label_selector: labels.clone(), ..Default::default() };
    let sandboxes = cri::ListPodSandboxRequest { filter: Some(filter) };
    let filter = cri::ContainerFilter { label_selector: labels, ..Default::default() };
    let containers = cri::ListContainersRequest { filter: Some(filter) };
    let (sandboxes, containers) =
        futures::future::try_join(runtime.list_pod_sandbox(sandboxes), runtime.list_containers(containers))
            .await?;
    let items = sandboxes.items.into_iter().filter(|sandbox| !is_mislabelled(sandbox)).collect();
    Ok(ObservedPod {
        sandboxes: observe_sandboxes(runtime, items, known).await?,
        containers: observe_containers(runtime, containers.containers, known).await?,
    })
}

/// Whether the uid in the label of a sandbox differs from the uid in its metadata. In earlier versions, a label of the
/// pod's author replaced the label of the agent. Such a sandbox belongs to the pod in its metadata only.
pub(super) fn is_mislabelled(sandbox: &cri::PodSandbox) -> bool {
    let uid = sandbox.metadata.as_ref().map(|metadata| metadata.uid.as_str()).filter(|uid| !uid.is_empty());
    let label = sandbox.labels.get(POD_UID).map(String::as_str);
    uid.is_some_and(|uid| label.is_some_and(|label| label != uid))
}

async fn observe_sandboxes(
    runtime: &dyn Runtime,
    mut listed: Vec<cri::PodSandbox>,
    known: &ObservedPod,
) -> Result<Vec<ObservedSandbox>, RuntimeError> {
    let attempt = |s: &cri::PodSandbox| s.metadata.as_ref().map_or(0, |m| m.attempt);
    listed.sort_by_key(|s| std::cmp::Reverse((attempt(s), s.created_at)));
    let mut observed = Vec::with_capacity(listed.len());
    for sandbox in listed {
        let ready = sandbox.state() == cri::PodSandboxState::SandboxReady;
        let known = known.sandboxes.iter().find(|known| known.id == sandbox.id);
        let mut one = ObservedSandbox { attempt: attempt(&sandbox), ready, ips: Vec::new(), id: sandbox.id };
        match known.filter(|known| known.ready || !ready) {
            Some(known) => one.ips.clone_from(&known.ips),
            None if !ready => {}
            None => match sandbox_status(runtime, &one.id).await {
                Ok(status) => note_status(&mut one, status),
                Err(RuntimeError::NotFound(_)) => continue,
                Err(error) => return Err(error),
            },
        }
        observed.push(one);
    }
    Ok(observed)
}

async fn observe_containers(
    runtime: &dyn Runtime,
    listed: Vec<cri::Container>,
    known: &ObservedPod,
) -> Result<Vec<ObservedContainer>, RuntimeError> {
    let mut observed = Vec::with_capacity(listed.len());
    for container in listed {
        let state = container.state();
        let known = known.containers.iter().find(|known| known.id == container.id);
        if let Some(known) = known.filter(|known| fresh(known, state)) {
            observed.push(known.clone());
            continue;
        }
        let request = cri::ContainerStatusRequest { container_id: container.id, verbose: false };
        let status = match runtime.container_status(request).await {
            Ok(response) => response.status,
            Err(RuntimeError::NotFound(_)) => None,
            Err(error) => return Err(error),
        };
        observed.extend(status.map(|status| observed_container(&container.pod_sandbox_id, status)));
    }
    Ok(observed)
}

async fn sandbox_status(runtime: &dyn Runtime, id: &str) -> Result<cri::PodSandboxStatus, RuntimeError> {
    let request = cri::PodSandboxStatusRequest { pod_sandbox_id: id.to_owned(), verbose: false };
    Ok(runtime.pod_sandbox_status(request).await?.status.unwrap_or_default())
}

/// Adds the addresses of a listed sandbox. Its state is taken from the same response: the sandbox may have stopped
/// after the list, and some runtimes report no addresses of a stopped sandbox.
fn note_status(sandbox: &mut ObservedSandbox, status: cri::PodSandboxStatus) {
    sandbox.ready = status.state() == cri::PodSandboxState::SandboxReady;
    let network = status.network.unwrap_or_default();
    let ips = std::iter::once(network.ip).chain(network.additional_ips.into_iter().map(|p| p.ip));
    sandbox.ips = ips.filter(|ip| !ip.is_empty()).collect();
}

fn fresh(known: &ObservedContainer, state: cri::ContainerState) -> bool {
    match known.run {
        ContainerRun::Exited(_) => true,
        ContainerRun::Running { .. } => state == cri::ContainerState::ContainerRunning,
        ContainerRun::Created => state == cri::ContainerState::ContainerCreated,
        ContainerRun::Unknown => false,
    }
}

fn observed_container(sandbox: &str, status: cri::ContainerStatus) -> ObservedContainer {
    let run = match status.state() {
        cri::ContainerState::ContainerCreated => ContainerRun::Created,
        cri::ContainerState::ContainerRunning => ContainerRun::Running { started: time(status.started_at) },
        cri::ContainerState::ContainerExited => ContainerRun::Exited(exit(&status)),
        cri::ContainerState::ContainerUnknown => ContainerRun::Unknown,
    };
    let metadata = status.metadata.unwrap_or_default();
    let image = status.image.unwrap_or_default();
    let user = status.user.and_then(|user| user.linux).map(|user| LinuxContainerUser {
        uid: user.uid,
        gid: user.gid,
        supplemental_groups: (!user.supplemental_groups.is_empty()).then_some(user.supplemental_groups),
    });
    let limits = status.resources.as_ref().and_then(|resources| resources.linux.as_ref());
    let limits = limits.map(KernelLimits::of);
    let created_with = status.annotations.get(RESOURCES).and_then(|text| serde_json::from_str(text).ok());
    let requested_image = Some(image.user_specified_image).filter(|name| !name.is_empty());
    ObservedContainer {
        id: status.id,
        sandbox: sandbox.to_owned(),
        name: metadata.name,
        attempt: metadata.attempt,
        image: requested_image.clone().unwrap_or(image.image),
        requested_image,
        image_id: if status.image_ref.is_empty() { status.image_id } else { status.image_ref },
        user,
        created_with,
        limits,
        run,
    }
}

fn exit(status: &cri::ContainerStatus) -> Exit {
    let message = termination_message(status);
    Exit {
        started: time(status.started_at),
        finished: time(status.finished_at),
        code: status.exit_code,
        reason: status.reason.clone(),
        message: if message.is_empty() { status.message.clone() } else { message },
    }
}

fn termination_message(status: &cri::ContainerStatus) -> String {
    let path = status.annotations.get(MESSAGE_PATH);
    // Use the last mount at this path, which is the agent's own. An earlier mount may be a volume of a server that does
    // not respond.
    let mount = path.and_then(|path| status.mounts.iter().rfind(|m| m.container_path == *path));
    let text = mount.map(|m| files::message(Path::new(&m.host_path))).unwrap_or_default();
    let from_log = status.annotations.get(MESSAGE_POLICY).is_some_and(|p| p == "FallbackToLogsOnError");
    if text.is_empty() && from_log && status.exit_code != 0 {
        return files::log_tail(Path::new(&status.log_path));
    }
    text
}

/// A CRI time in nanoseconds; the epoch if it is invalid.
fn time(nanoseconds: i64) -> Timestamp {
    Timestamp::from_nanosecond(i128::from(nanoseconds)).unwrap_or(Timestamp::UNIX_EPOCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_that_stops_after_the_list_is_not_ready_without_addresses() {
        let listed = || ObservedSandbox { id: "s".to_owned(), ready: true, ..ObservedSandbox::default() };
        let status = |state: cri::PodSandboxState, ip: &str| cri::PodSandboxStatus {
            state: state.into(),
            network: Some(cri::PodSandboxNetworkStatus { ip: ip.to_owned(), ..Default::default() }),
            ..Default::default()
        };
        let (mut ready, mut stopped) = (listed(), listed());
        note_status(&mut ready, status(cri::PodSandboxState::SandboxReady, "10.0.0.1"));
        assert_eq!((ready.ready, ready.ips), (true, vec!["10.0.0.1".to_owned()]));
        note_status(&mut stopped, status(cri::PodSandboxState::SandboxNotready, ""));
        assert_eq!((stopped.ready, stopped.ips), (false, Vec::new()));
    }

    #[test]
    fn the_metadata_of_a_sandbox_has_precedence_over_its_label() {
        let sandbox = |uid: &str, label: Option<&str>| cri::PodSandbox {
            metadata: Some(cri::PodSandboxMetadata { uid: uid.to_owned(), ..Default::default() }),
            labels: label.map(|label| (POD_UID.to_owned(), label.to_owned())).into_iter().collect(),
            ..Default::default()
        };
        assert!(is_mislabelled(&sandbox("thief", Some("victim"))));
        assert!(!is_mislabelled(&sandbox("victim", Some("victim"))));
        // Sandboxes without the label belong to other clients of the CRI.
        assert!(!is_mislabelled(&sandbox("other", None)));
        assert!(!is_mislabelled(&sandbox("", Some("victim"))), "a runtime without uids in its metadata");
    }

    #[test]
    fn a_termination_message_is_not_read_from_a_volume() {
        let dir = tempfile::tempdir().expect("directory");
        let mounts = ["volume", "own"].map(|name| {
            let file = dir.path().join(name);
            std::fs::write(&file, name).expect("write");
            cri::Mount {
                container_path: "/message".to_owned(),
                host_path: file.to_string_lossy().into_owned(),
                ..cri::Mount::default()
            }
        });
        let status = cri::ContainerStatus {
            annotations: [(MESSAGE_PATH.to_owned(), "/message".to_owned())].into(),
            mounts: mounts.into(),
            ..cri::ContainerStatus::default()
        };
        assert_eq!(termination_message(&status), "own");
    }
}
