//! A container: its state, and the conversion of its configuration.
//!
//! ```text
//!   CreateContainer ──► Creating ──► Created ──StartContainer──► Running ──┐
//!                          │            └─────── stopped ──────► Exited ◄──┘ exit, kill, or its shim exited
//!                          └─ failed, cancelled or found after a crash: undone     └──► removed
//! ```

pub(crate) mod apparmor;
pub(crate) mod args;
mod capabilities;
pub(crate) mod config_memory;
pub(crate) mod confinement;
pub(crate) mod devices;
pub(crate) mod fields;
pub(crate) mod filter;
pub(crate) mod inputs;
pub(crate) mod mount_points;
mod mounts;
pub(crate) mod oci_spec;
mod packed_fields;
pub(crate) mod resources;
pub(crate) mod signal;
pub(crate) mod volume;

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};

use coracle_images::{ImageHold, Reference};
use coracle_proto::cri;
use tokio::sync::watch;

use self::config_memory::ConfigMemory;
use crate::lock::locked;
use crate::records::{ContainerPhase, ContainerRecord, ExitRecord, Transition};
use crate::sandbox::POD_UID;
use crate::sandbox::filter::Subject;
use crate::table::Row;
use crate::usage::meter::Meter;

/// A container in the table.
#[derive(Debug)]
pub(crate) struct Container {
    pub(crate) id: String,
    /// The record at creation. The current `phase`, `pid` and resources are in `state`, all transitions in
    /// `transitions`, and some fields of the configuration in `packed`.
    pub(crate) record: ContainerRecord,
    /// See [`packed_fields`].
    packed: Arc<[u8]>,
    state: watch::Sender<ContainerState>,
    transitions: Mutex<Vec<Transition>>,
    /// Held during creation, start and a change of limits, and by tasks that record an exit. So a container that ends
    /// at once is recorded as started before it is recorded as stopped.
    pub(crate) starting: tokio::sync::Mutex<()>,
    /// Held by a removal and by a checkpoint.
    pub(crate) removing: Arc<tokio::sync::Mutex<()>>,
    /// Set before the container is killed: a checkpoint in progress then ends.
    pub(crate) stopping: Arc<AtomicBool>,
    /// State for usage rates.
    pub(crate) meter: Meter,
    /// Keep the layers of its image and of its image volumes from removal.
    _held: Box<[ImageHold]>,
    /// The share of its configuration in the memory of all large configurations.
    _memory: ConfigMemory,
}

/// The mutable state of a container.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ContainerState {
    pub(crate) phase: ContainerPhase,
    pub(crate) pid: i32,
    /// The current limits.
    pub(crate) resources: Option<cri::LinuxContainerResources>,
}

// === impl Container ===

impl Container {
    pub(crate) fn new(mut record: ContainerRecord, held: Vec<ImageHold>, memory: ConfigMemory) -> Self {
        let packed = packed_fields::pack(&mut record.config);
        record.config.mounts.shrink_to_fit();
        let resources = record.config.linux.as_ref().and_then(|linux| linux.resources.clone());
        let state = ContainerState { phase: record.phase.clone(), pid: record.pid, resources };
        Self {
            id: record.id.clone(),
            transitions: Mutex::new(record.transitions.clone()),
            record,
            packed,
            state: watch::Sender::new(state),
            starting: tokio::sync::Mutex::default(),
            removing: Arc::default(),
            stopping: Arc::default(),
            meter: Meter::default(),
            _held: held.into(),
            _memory: memory,
        }
    }

    pub(crate) fn phase(&self) -> ContainerPhase {
        self.state.borrow().phase.clone()
    }

    pub(crate) fn pid(&self) -> i32 {
        self.state.borrow().pid
    }

    /// The current record.
    pub(crate) fn record_now(&self) -> ContainerRecord {
        let state = self.state.borrow().clone();
        let mut record = self.record.clone();
        packed_fields::unpack(&mut record.config, &self.packed);
        (record.phase, record.pid, record.transitions) = (state.phase, state.pid, self.transitions());
        if state.resources.is_some() {
            record.config.linux.get_or_insert_default().resources = state.resources;
        }
        record
    }

    /// The whole configuration at creation.
    pub(crate) fn config(&self) -> cri::ContainerConfig {
        let mut config = self.record.config.clone();
        packed_fields::unpack(&mut config, &self.packed);
        config
    }

    /// Transitions with an event number.
    pub(crate) fn transitions(&self) -> Vec<Transition> {
        locked(&self.transitions).clone()
    }

    /// Adds a transition to the record.
    pub(crate) fn note(&self, transition: Option<Transition>) {
        locked(&self.transitions).extend(transition);
    }

    pub(crate) fn created(&self, pid: i32) {
        self.state.send_modify(|state| (state.phase, state.pid) = (ContainerPhase::Created, pid));
    }

    /// Sets the pid of the restored first process.
    pub(crate) fn restored(&self, pid: i32) {
        self.state.send_modify(|state| state.pid = pid);
    }

    /// The current limits.
    pub(crate) fn resources(&self) -> Option<cri::LinuxContainerResources> {
        self.state.borrow().resources.clone()
    }

    pub(crate) fn resized(&self, resources: Option<cri::LinuxContainerResources>) {
        self.state.send_modify(|state| state.resources = resources);
    }

    pub(crate) fn started(&self, started_at: i64) {
        self.state.send_modify(|state| state.phase = ContainerPhase::Running { started_at });
    }

    /// Sets the exit. False if the container had already exited.
    pub(crate) fn exited(&self, exit: ExitRecord) -> bool {
        self.state.send_if_modified(|state| {
            if matches!(state.phase, ContainerPhase::Exited(_)) {
                return false;
            }
            state.phase = ContainerPhase::Exited(exit);
            true
        })
    }

    /// Waits for the exit. Cancel safe.
    pub(crate) async fn wait_exited(&self) {
        let mut state = self.state.subscribe();
        // The sender is a field of `self`, so it cannot close.
        let _closed = state.wait_for(|state| matches!(state.phase, ContainerPhase::Exited(_))).await;
    }

    /// Start time; 0 before the start.
    pub(crate) fn started_at(&self) -> i64 {
        started_at(&self.state.borrow().phase)
    }

    /// Whether clients can see the container.
    pub(crate) fn visible(&self) -> bool {
        self.state.borrow().phase != ContainerPhase::Creating
    }

    fn cri_state(&self) -> cri::ContainerState {
        cri_state(&self.state.borrow().phase)
    }

    /// The fields that list filters match.
    pub(crate) fn subject(&self) -> Subject<'_> {
        let (state, labels) = (self.cri_state().into(), &self.record.config.labels);
        Subject { id: &self.id, sandbox_id: &self.record.sandbox_id, state, labels }
    }

    pub(crate) fn item(&self) -> cri::Container {
        let config = &self.record.config;
        cri::Container {
            id: self.id.clone(),
            pod_sandbox_id: self.record.sandbox_id.clone(),
            metadata: config.metadata.clone(),
            image: config.image.clone(),
            image_ref: self.record.image_id.clone(),
            state: self.cri_state().into(),
            created_at: self.record.created_at,
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            image_id: self.record.image_id.clone(),
        }
    }

    pub(crate) fn status(&self) -> cri::ContainerStatus {
        let ContainerRecord { config, image_id, log_path, created_at, uid, gid, groups, .. } = &self.record;
        // A pod's `imageID` is the reference of the image at its registry.
        let image_ref =
            Some(&self.record.image_digest).filter(|digest| !digest.is_empty()).unwrap_or(image_id);
        // The phase is read once: a container that exits meanwhile must not be reported as exited with code 0.
        let phase = self.phase();
        let exit = match &phase {
            ContainerPhase::Exited(exit) => Some(exit),
            _ => None,
        };
        let resources = self.resources();
        cri::ContainerStatus {
            id: self.id.clone(),
            metadata: config.metadata.clone(),
            state: cri_state(&phase).into(),
            created_at: *created_at,
            started_at: started_at(&phase),
            finished_at: exit.map_or(0, |exit| exit.finished_at),
            exit_code: exit.map_or(0, |exit| exit.code),
            reason: exit.map(|exit| exit.reason.clone()).unwrap_or_default(),
            message: exit.map(|exit| exit.message.clone()).unwrap_or_default(),
            image: config.image.clone(),
            image_ref: image_ref.clone(),
            image_id: image_id.clone(),
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            mounts: config.mounts.clone(),
            log_path: log_path.clone(),
            resources: resources.map(|linux| cri::ContainerResources { linux: Some(linux), windows: None }),
            user: Some(cri::ContainerUser {
                linux: Some(cri::LinuxContainerUser {
                    uid: *uid,
                    gid: *gid,
                    supplemental_groups: groups.clone(),
                }),
            }),
            stop_signal: signal::to_cri(self.record.stop_signal).into(),
        }
    }
}

impl Row for Container {
    fn sandbox_id(&self) -> &str {
        &self.record.sandbox_id
    }

    fn pod_uid(&self) -> Option<&str> {
        self.record.config.labels.get(POD_UID).map(String::as_str)
    }
}

fn cri_state(phase: &ContainerPhase) -> cri::ContainerState {
    match phase {
        ContainerPhase::Creating | ContainerPhase::Created => cri::ContainerState::ContainerCreated,
        ContainerPhase::Running { .. } => cri::ContainerState::ContainerRunning,
        ContainerPhase::Exited(_) => cri::ContainerState::ContainerExited,
    }
}

fn started_at(phase: &ContainerPhase) -> i64 {
    match phase {
        ContainerPhase::Running { started_at } => *started_at,
        ContainerPhase::Exited(exit) => exit.started_at,
        ContainerPhase::Creating | ContainerPhase::Created => 0,
    }
}

/// The image digest for a container's status: of the requested repository, else of any repository.
pub(crate) fn image_digest(config: &cri::ContainerConfig, digests: &[String]) -> String {
    let spec = config.image.clone().unwrap_or_default();
    let requested = [spec.user_specified_image, spec.image].into_iter().find(|name| !name.is_empty());
    let requested = requested.and_then(|name| Reference::parse(&name).ok()).map(|name| name.repository());
    let is_asked =
        |digest: &&String| digest.split_once('@').map(|(repository, _)| repository) == requested.as_deref();
    digests.iter().find(is_asked).or_else(|| digests.first()).cloned().unwrap_or_default()
}

/// The name of a container, unique in the runtime.
pub(crate) fn name(metadata: &cri::ContainerMetadata, sandbox_id: &str) -> String {
    format!("{}_{}_{}", metadata.name, metadata.attempt, sandbox_id)
}

/// Path of a container's log; empty without a log. A path that begins with `/` is below the pod's directory, too.
pub(crate) fn log_path(config: &cri::ContainerConfig, sandbox: &cri::PodSandboxConfig) -> String {
    if config.log_path.is_empty() || sandbox.log_directory.is_empty() {
        return String::new();
    }
    PathBuf::from(&sandbox.log_directory)
        .join(config.log_path.trim_start_matches('/'))
        .to_string_lossy()
        .into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_digest_of_the_requested_repository_is_used() {
        let requested = |image: &str| cri::ContainerConfig {
            image: Some(cri::ImageSpec {
                image: "sha256:1".into(),
                user_specified_image: image.into(),
                ..Default::default()
            }),
            ..Default::default()
        };
        let digests = ["r.example/a@sha256:2".to_owned(), "docker.io/library/nginx@sha256:2".to_owned()];
        assert_eq!(image_digest(&requested("nginx"), &digests), digests[1]);
        assert_eq!(image_digest(&requested("other"), &digests), digests[0]);
        assert_eq!(image_digest(&requested("nginx"), &[]), "");
    }

    #[test]
    fn a_status_during_an_exit_has_its_code() {
        let text = include_str!("../recorded/container-running.json");
        let record: ContainerRecord = serde_json::from_str(text).unwrap();
        let memory = ConfigMemory::take(&record.config, 0).unwrap();
        let container = Container::new(record, Vec::new(), memory);
        let exit = ExitRecord {
            started_at: 1,
            finished_at: 2,
            code: 99,
            reason: "Error".to_owned(),
            message: "the end".to_owned(),
        };
        for _ in 0..5_000 {
            container.started(1);
            let last = std::thread::scope(|scope| {
                scope.spawn(|| container.exited(exit.clone()));
                loop {
                    let status = container.status();
                    if status.state() == cri::ContainerState::ContainerExited {
                        break status;
                    }
                }
            });
            assert_eq!((last.finished_at, last.exit_code, &*last.message), (2, 99, "the end"));
        }
    }

    #[test]
    fn a_container_and_a_sandbox_take_two_kilobytes_each() {
        // The two counts of an `Arc` are added. For more than 2,048 bytes the allocator takes 2,560 bytes.
        let counts = 2 * size_of::<usize>();
        assert!(size_of::<Container>() + counts <= 2048);
        assert!(size_of::<crate::sandbox::Sandbox>() + counts <= 2048);
    }

    #[test]
    fn logs_are_below_the_pods_directory() {
        let of = |directory: &str, path: &str| {
            let sandbox = cri::PodSandboxConfig { log_directory: directory.into(), ..Default::default() };
            let config = cri::ContainerConfig { log_path: path.into(), ..Default::default() };
            log_path(&config, &sandbox)
        };
        assert_eq!(of("/logs/pod", "c/0.log"), "/logs/pod/c/0.log");
        assert_eq!(of("/logs/pod", "/c/0.log"), "/logs/pod/c/0.log");
        assert_eq!(of("", "c/0.log"), "");
        assert_eq!(of("/logs/pod", ""), "");
    }
}
