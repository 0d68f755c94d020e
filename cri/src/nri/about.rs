//! Pods and containers in the types of NRI. Pure.

use std::collections::{BTreeMap, HashMap};

use coracle_nri::describe;
use coracle_proto::nri::security_profile::ProfileType;
use coracle_proto::nri::{
    CdiDevice, Container, ContainerState, Image, LinuxNamespace, LinuxPodSandbox, PodSandbox, SecurityProfile,
};
use oci_spec::runtime::Spec;

use super::limits;
use crate::namespaces;
use crate::records::{ContainerPhase, ContainerRecord, SandboxRecord};
use crate::sandbox::{LiveShim, Sandbox};

/// A pod in the table.
pub(crate) fn current_pod(sandbox: &Sandbox) -> PodSandbox {
    pod(&sandbox.record_now(), sandbox.live().as_ref())
}

/// A pod, with or without a live shim.
pub(crate) fn pod(record: &SandboxRecord, live: Option<&LiveShim>) -> PodSandbox {
    let config = &record.config;
    let metadata = config.metadata.clone().unwrap_or_default();
    let linux = config.linux.as_ref();
    PodSandbox {
        id: record.id.clone(),
        name: metadata.name,
        uid: metadata.uid,
        namespace: metadata.namespace,
        labels: sorted(&config.labels),
        annotations: sorted(&config.annotations),
        runtime_handler: record.runtime_handler.clone(),
        linux: Some(LinuxPodSandbox {
            pod_overhead: linux.and_then(|linux| linux.overhead.as_ref()).map(limits::to_nri),
            pod_resources: linux.and_then(|linux| linux.resources.as_ref()).map(limits::to_nri),
            cgroup_parent: linux.map(|linux| linux.cgroup_parent.clone()).unwrap_or_default(),
            namespaces: live.map(|live| namespaces_of(record, live)).unwrap_or_default(),
            ..LinuxPodSandbox::default()
        }),
        pid: live.and_then(|live| u32::try_from(live.shim.pid()).ok()).unwrap_or_default(),
        ips: record.addresses.clone(),
    }
}

/// The namespaces shared by a pod's containers, and their paths in /proc.
pub(crate) fn namespaces_of(record: &SandboxRecord, live: &LiveShim) -> Vec<LinuxNamespace> {
    let at = |typ: &str, pid: i32, name: &str| LinuxNamespace {
        r#type: typ.to_owned(),
        path: format!("/proc/{pid}/ns/{name}"),
    };
    let shim = live.shim.pid();
    let mut list = Vec::new();
    if namespaces::own_network(&record.config) {
        list.extend([at("network", shim, "net"), at("uts", shim, "uts")]);
    }
    if namespaces::own_ipc(&record.config) {
        list.push(at("ipc", shim, "ipc"));
    }
    if live.init_pid > 0 {
        list.push(at("pid", live.init_pid, "pid"));
    }
    list
}

/// A container, from its record and spec.
pub(crate) fn container(record: &ContainerRecord, spec: &Spec) -> Container {
    let config = &record.config;
    let mut container = describe::container(spec);
    container.id.clone_from(&record.id);
    container.pod_sandbox_id.clone_from(&record.sandbox_id);
    container.name = config.metadata.as_ref().map(|metadata| metadata.name.clone()).unwrap_or_default();
    container.labels = sorted(&config.labels);
    container.annotations.extend(sorted(&config.annotations));
    container.pid = u32::try_from(record.pid).unwrap_or_default();
    container.created_at = record.created_at;
    let cdi = config.cdi_devices.iter().map(|device| CdiDevice { name: device.name.clone() });
    container.cdi_devices = cdi.collect();
    container.image = Some(Image {
        name: config.image.as_ref().map(|image| image.image.clone()).unwrap_or_default(),
        digest: String::new(),
        config_digest: record.image_id.clone(),
    });
    if let Some(linux) = &mut container.linux {
        linux.cgroups_path.clone_from(&record.cgroup);
        linux.seccomp_profile = seccomp(record);
    }
    state(&mut container, &record.phase);
    container
}

fn state(container: &mut Container, phase: &ContainerPhase) {
    let state = match phase {
        // The container does not exist yet: plugins are called for adjustments.
        ContainerPhase::Creating => ContainerState::ContainerUnknown,
        ContainerPhase::Created => ContainerState::ContainerCreated,
        ContainerPhase::Running { started_at } => {
            container.started_at = *started_at;
            ContainerState::ContainerRunning
        }
        ContainerPhase::Exited(exit) => {
            container.started_at = exit.started_at;
            container.finished_at = exit.finished_at;
            container.exit_code = exit.code;
            container.status_reason.clone_from(&exit.reason);
            container.status_message.clone_from(&exit.message);
            ContainerState::ContainerStopped
        }
    };
    container.state = state.into();
}

fn seccomp(record: &ContainerRecord) -> Option<SecurityProfile> {
    use coracle_proto::cri::security_profile::ProfileType as Cri;
    let security = record.config.linux.as_ref()?.security_context.as_ref()?;
    let profile = security.seccomp.as_ref()?;
    let profile_type = match profile.profile_type() {
        Cri::RuntimeDefault => ProfileType::RuntimeDefault,
        Cri::Unconfined => ProfileType::Unconfined,
        Cri::Localhost => ProfileType::Localhost,
    };
    Some(SecurityProfile { profile_type: profile_type.into(), localhost_ref: profile.localhost_ref.clone() })
}

fn sorted(map: &HashMap<String, String>) -> BTreeMap<String, String> {
    map.iter().map(|(name, value)| (name.clone(), value.clone())).collect()
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri;

    use super::*;
    use crate::records::ExitRecord;

    #[test]
    fn a_pod_is_described_with_and_without_its_shim() {
        let config = cri::PodSandboxConfig {
            metadata: Some(cri::PodSandboxMetadata {
                name: "n".into(),
                namespace: "ns".into(),
                uid: "u".into(),
                attempt: 1,
            }),
            labels: [("a".to_owned(), "b".to_owned())].into(),
            linux: Some(cri::LinuxPodSandboxConfig { cgroup_parent: "/p".into(), ..Default::default() }),
            ..Default::default()
        };
        let mut record = SandboxRecord::new("id", config, "h".into(), 5);
        record.addresses = vec!["10.0.0.1".into()];
        let pod = pod(&record, None);
        assert_eq!((pod.id.as_str(), pod.name.as_str(), pod.namespace.as_str()), ("id", "n", "ns"));
        assert_eq!((pod.uid.as_str(), pod.labels["a"].as_str(), pod.pid), ("u", "b", 0));
        assert_eq!((pod.ips, pod.runtime_handler.as_str()), (vec!["10.0.0.1".to_owned()], "h"));
        assert_eq!(pod.linux.expect("linux").cgroup_parent, "/p");
    }

    #[test]
    fn a_container_is_described_in_every_phase() {
        let exit = ExitRecord {
            started_at: 2,
            finished_at: 3,
            code: 4,
            reason: "Error".into(),
            message: String::new(),
        };
        let mut described = Container::default();
        state(&mut described, &ContainerPhase::Running { started_at: 2 });
        assert_eq!((described.state(), described.started_at), (ContainerState::ContainerRunning, 2));
        state(&mut described, &ContainerPhase::Exited(exit));
        assert_eq!(described.state(), ContainerState::ContainerStopped);
        assert_eq!(
            (described.finished_at, described.exit_code, described.status_reason.as_str()),
            (3, 4, "Error")
        );
        state(&mut described, &ContainerPhase::Created);
        assert_eq!(described.state(), ContainerState::ContainerCreated);
    }
}
