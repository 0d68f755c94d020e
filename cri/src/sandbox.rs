//! A pod sandbox: its state, and the conversion of its configuration.
//!
//! ```text
//!   RunPodSandbox ──► (Creating) ──► Ready ──StopPodSandbox, or shim exited──► NotReady ──► removed
//!                         └─ failed, cancelled or found after a crash: undone
//! ```
//! Clients see `NotReady` from the beginning of a stop on, even if the stop fails and the shim still answers: the pod may
//! have lost its network.
//!
//! After a restart, a sandbox with a shim that does not answer is `Silent`, and `Ready` when the shim answers. A lost
//! connection to a live shim is replaced; the state does not change, but calls to the shim fail meanwhile.

pub(crate) mod attachment;
pub(crate) mod fields;
pub(crate) mod files;
pub(crate) mod filter;
pub(crate) mod first_process;
pub(crate) mod process1;
pub(crate) mod sysctls;
pub(crate) mod user_namespace;

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use coracle_proto::{cri, shim};
use tokio::sync::oneshot;

use crate::cgroup::driver::Layout;
use crate::error::Error;
use crate::lock::locked;
use crate::namespaces;
use crate::records::{SandboxPhase, SandboxRecord, Transition};
use crate::shim_client::Shim;
use crate::table::Row;
use crate::usage::meter::Meter;

/// The kubelet's label with the uid of the pod.
pub(crate) const POD_UID: &str = "io.kubernetes.pod.uid";

/// A completely created sandbox.
#[derive(Debug)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    /// The record at the creation or recovery of the sandbox. Its `phase`, resources, overhead, transitions and `stopping`
    /// can change later. Their current values are in `state`, `size`, `transitions` and `stopping`.
    pub(crate) record: SandboxRecord,
    state: Mutex<SandboxState>,
    size: Mutex<PodSize>,
    transitions: Mutex<Vec<Transition>>,
    /// Held by a stop, a removal or another writer of the record, one at a time.
    pub(crate) ending: tokio::sync::Mutex<()>,
    /// State for usage rates of the pod.
    pub(crate) meter: Meter,
    /// Whether a stop has begun. A stop cannot be reverted.
    stopping: AtomicBool,
    /// Whether a task waits for the end of process 1.
    process1_watched: AtomicBool,
    /// Execs with a waiting caller.
    execs: Mutex<HashMap<String, oneshot::Sender<shim::Exit>>>,
}

/// The limits of the pod.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct PodSize {
    /// Overhead of the pod in addition to its containers. Boxed, because most pods have no overhead.
    pub(crate) overhead: Option<Box<cri::LinuxContainerResources>>,
    /// Limits of all containers together.
    pub(crate) resources: Option<cri::LinuxContainerResources>,
}

/// The state of a sandbox.
#[derive(Debug, Clone)]
pub(crate) enum SandboxState {
    /// The shim is alive and holds the namespaces.
    Ready(LiveShim),
    /// The shim is alive but has not answered yet, so the state of its containers is unknown. Clients see `NotReady`.
    Silent(Shim),
    /// No process of the sandbox runs. Its record and its containers' records remain until it is removed.
    NotReady,
}

/// A sandbox's shim.
#[derive(Debug, Clone)]
pub(crate) struct LiveShim {
    pub(crate) shim: Shim,
    /// Pid of the pod's init if the pod shares a pid namespace, else 0.
    pub(crate) init_pid: i32,
}

// === impl Sandbox ===

impl Sandbox {
    pub(crate) fn new(record: SandboxRecord, state: SandboxState) -> Self {
        let linux = record.config.linux.clone().unwrap_or_default();
        Self {
            id: record.id.clone(),
            transitions: Mutex::new(record.transitions.clone()),
            stopping: AtomicBool::new(record.stopping),
            process1_watched: AtomicBool::new(false),
            record,
            state: Mutex::new(state),
            size: Mutex::new(PodSize { overhead: linux.overhead.map(Box::new), resources: linux.resources }),
            ending: tokio::sync::Mutex::default(),
            meter: Meter::default(),
            execs: Mutex::default(),
        }
    }

    pub(crate) fn config(&self) -> &cri::PodSandboxConfig {
        &self.record.config
    }

    /// The namespace of the pod. Empty if the client gave no namespace.
    pub(crate) fn namespace(&self) -> &str {
        self.config().metadata.as_ref().map(|metadata| metadata.namespace.as_str()).unwrap_or_default()
    }

    /// The parent cgroup of the pod's containers.
    pub(crate) fn cgroup(&self, layout: &Layout) -> String {
        let parent = self.config().linux.as_ref().map_or("", |linux| &linux.cgroup_parent);
        layout.pod(parent, &self.id)
    }

    pub(crate) fn live(&self) -> Option<LiveShim> {
        match &*locked(&self.state) {
            SandboxState::Ready(live) => Some(live.clone()),
            SandboxState::Silent(_) | SandboxState::NotReady => None,
        }
    }

    /// The current state, with the connection to the shim.
    pub(crate) fn state(&self) -> SandboxState {
        locked(&self.state).clone()
    }

    /// Whether the shim is alive but has not answered this runtime.
    pub(crate) fn is_silent(&self) -> bool {
        matches!(*locked(&self.state), SandboxState::Silent(_))
    }

    /// The connection to the shim, or the reason why it does not exist.
    pub(crate) fn shim(&self) -> Result<Shim, Error> {
        let state = match &*locked(&self.state) {
            SandboxState::Ready(live) => return Ok(live.shim.clone()),
            SandboxState::Silent(_) => "silent: its shim does not answer",
            SandboxState::NotReady => "not ready",
        };
        Err(Error::WrongState { what: "pod sandbox", id: self.id.clone(), state })
    }

    /// The shim, for a container that is created or started. A sandbox whose stop has begun gets no more processes: it may
    /// have lost its network, and the stop kills only the containers that it has found.
    pub(crate) fn live_for_containers(&self) -> Result<LiveShim, Error> {
        let state = match &*locked(&self.state) {
            SandboxState::Ready(_) if self.stopping.load(Ordering::Relaxed) => "being stopped",
            SandboxState::Ready(live) => return Ok(live.clone()),
            SandboxState::Silent(_) => "silent: its shim does not answer",
            SandboxState::NotReady => "not ready",
        };
        Err(Error::WrongState { what: "pod sandbox", id: self.id.clone(), state })
    }

    /// Changes the state to `NotReady` and returns the shim. Only the first of several callers gets the shim.
    pub(crate) fn take_shim(&self) -> Option<Shim> {
        match std::mem::replace(&mut *locked(&self.state), SandboxState::NotReady) {
            SandboxState::Ready(live) => Some(live.shim),
            SandboxState::Silent(shim) => Some(shim),
            SandboxState::NotReady => None,
        }
    }

    /// Stores the shim again after [`take_shim`](Self::take_shim), if the shim could not be ended. The next stop retries.
    pub(crate) fn restore_shim(&self, shim: Shim) {
        *locked(&self.state) = SandboxState::Silent(shim);
    }

    /// Stores the connection to a shim that has answered, and returns the previous state. `NotReady` is not changed.
    pub(crate) fn answered(&self, shim: &Shim, init_pid: i32) -> SandboxState {
        let mut state = locked(&self.state);
        let ready = SandboxState::Ready(LiveShim { shim: shim.clone(), init_pid });
        match &*state {
            SandboxState::NotReady => SandboxState::NotReady,
            SandboxState::Ready(_) | SandboxState::Silent(_) => std::mem::replace(&mut state, ready),
        }
    }

    /// Whether a stop has begun, or the sandbox has ended.
    pub(crate) fn is_stopping(&self) -> bool {
        self.is_over() || self.stopping.load(Ordering::Relaxed)
    }

    /// Whether the sandbox has ended or is ending.
    pub(crate) fn is_over(&self) -> bool {
        matches!(*locked(&self.state), SandboxState::NotReady)
    }

    /// The record with the current state.
    pub(crate) fn record_now(&self) -> SandboxRecord {
        let phase = match *locked(&self.state) {
            SandboxState::Ready(_) | SandboxState::Silent(_) => SandboxPhase::Ready,
            SandboxState::NotReady => SandboxPhase::NotReady,
        };
        let mut record = SandboxRecord {
            phase,
            stopping: self.stopping.load(Ordering::Relaxed),
            transitions: self.transitions(),
            ..self.record.clone()
        };
        let size = self.size();
        if size != PodSize::default() {
            let linux = record.config.linux.get_or_insert_default();
            (linux.overhead, linux.resources) = (size.overhead.map(|overhead| *overhead), size.resources);
        }
        record
    }

    /// Marks process 1 as watched. Returns whether it was marked before. If not, the caller must watch it.
    fn mark_process1_watched(&self) -> bool {
        self.process1_watched.swap(true, Ordering::Relaxed)
    }

    /// Records that a stop begins. Returns false if a stop has begun before, or if nothing is left to stop.
    pub(crate) fn begin_stop(&self) -> bool {
        !self.is_over() && !self.stopping.swap(true, Ordering::Relaxed)
    }

    /// Transitions with an event number.
    pub(crate) fn transitions(&self) -> Vec<Transition> {
        locked(&self.transitions).clone()
    }

    /// Adds a transition to the record.
    pub(crate) fn note(&self, transition: Option<Transition>) {
        locked(&self.transitions).extend(transition);
    }

    /// The current limits of the pod.
    pub(crate) fn size(&self) -> PodSize {
        locked(&self.size).clone()
    }

    /// Sets the limits of the pod. Returns the previous limits.
    pub(crate) fn resize(&self, size: PodSize) -> PodSize {
        std::mem::replace(&mut *locked(&self.size), size)
    }

    /// Registers an exec before it is started. The receiver gets its exit.
    pub(crate) fn expect_exec(&self, exec_id: &str) -> oneshot::Receiver<shim::Exit> {
        let (sender, receiver) = oneshot::channel();
        locked(&self.execs).insert(exec_id.to_owned(), sender);
        receiver
    }

    /// Passes an exit to the waiting caller. An exec of an earlier runtime has no caller.
    pub(crate) fn exec_exited(&self, exec_id: &str, exit: shim::Exit) {
        if let Some(sender) = locked(&self.execs).remove(exec_id) {
            // The caller may have stopped waiting.
            let _abandoned = sender.send(exit);
        }
    }

    /// Whether an exec has a waiting caller.
    pub(crate) fn expects_exec(&self, exec_id: &str) -> bool {
        locked(&self.execs).contains_key(exec_id)
    }

    /// Unregisters an exec that was not started, or whose caller no longer waits.
    pub(crate) fn forget_exec(&self, exec_id: &str) {
        locked(&self.execs).remove(exec_id);
    }

    /// Wakes all callers that wait for an exec: no exit will arrive.
    pub(crate) fn forget_all_execs(&self) {
        locked(&self.execs).clear();
    }

    fn cri_state(&self) -> cri::PodSandboxState {
        match *locked(&self.state) {
            // A stop cannot be reverted. If the stop has failed, the shim still runs and can answer.
            SandboxState::Ready(_) if self.stopping.load(Ordering::Relaxed) => {
                cri::PodSandboxState::SandboxNotready
            }
            SandboxState::Ready(_) => cri::PodSandboxState::SandboxReady,
            SandboxState::Silent(_) | SandboxState::NotReady => cri::PodSandboxState::SandboxNotready,
        }
    }

    /// The fields that list filters match.
    pub(crate) fn subject(&self) -> filter::Subject<'_> {
        let (state, labels) = (self.cri_state().into(), &self.config().labels);
        filter::Subject { id: &self.id, sandbox_id: "", state, labels }
    }

    pub(crate) fn item(&self) -> cri::PodSandbox {
        let config = self.config();
        cri::PodSandbox {
            id: self.id.clone(),
            metadata: config.metadata.clone(),
            state: self.cri_state().into(),
            created_at: self.record.created_at,
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            runtime_handler: self.record.runtime_handler.clone(),
        }
    }

    pub(crate) fn status(&self) -> cri::PodSandboxStatus {
        let config = self.config();
        let options = namespaces::options(config);
        let mut addresses = self.record.addresses.iter().cloned();
        let network = cri::PodSandboxNetworkStatus {
            ip: addresses.next().unwrap_or_default(),
            additional_ips: addresses.map(|ip| cri::PodIp { ip }).collect(),
        };
        cri::PodSandboxStatus {
            id: self.id.clone(),
            metadata: config.metadata.clone(),
            state: self.cri_state().into(),
            created_at: self.record.created_at,
            network: Some(network),
            linux: Some(cri::LinuxPodSandboxStatus {
                namespaces: Some(cri::Namespace { options: Some(options) }),
            }),
            labels: config.labels.clone(),
            annotations: config.annotations.clone(),
            runtime_handler: self.record.runtime_handler.clone(),
        }
    }
}

impl Row for Sandbox {
    fn sandbox_id(&self) -> &str {
        &self.id
    }

    fn pod_uid(&self) -> Option<&str> {
        self.config().labels.get(POD_UID).map(String::as_str)
    }
}

/// The name of a sandbox, unique in the runtime.
pub(crate) fn name(metadata: &cri::PodSandboxMetadata) -> String {
    format!("{}_{}_{}_{}", metadata.name, metadata.namespace, metadata.uid, metadata.attempt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_pod_whose_stop_has_begun_stays_not_ready_when_its_shim_answers() {
        let text = include_str!("../recorded/sandbox-ready.json");
        let recorded: SandboxRecord = serde_json::from_str(text).unwrap();
        let record = SandboxRecord { stopping: false, ..recorded };
        let shim = Shim::unresponsive();
        let ready = || SandboxState::Ready(LiveShim { shim: shim.clone(), init_pid: 0 });
        let state =
            |sandbox: &Sandbox| [sandbox.status().state, sandbox.item().state, sandbox.subject().state];
        let sandbox = Sandbox::new(record, ready());
        assert_eq!(state(&sandbox), [i32::from(cri::PodSandboxState::SandboxReady); 3]);
        assert!(sandbox.live_for_containers().is_ok());
        assert!(sandbox.begin_stop());
        assert!(sandbox.live_for_containers().is_err(), "a container that is created already does not start");
        // The end of the shim fails. Then the shim answers a new connection.
        let taken = sandbox.take_shim().unwrap();
        sandbox.restore_shim(taken);
        assert!(matches!(sandbox.answered(&shim, 0), SandboxState::Silent(_)));
        let not_ready = [i32::from(cri::PodSandboxState::SandboxNotready); 3];
        assert_eq!(state(&sandbox), not_ready);
        assert!(sandbox.live_for_containers().is_err());
        // The next runtime finds the record, and the shim answers it.
        let record = sandbox.record_now();
        assert!(record.stopping && record.phase == SandboxPhase::Ready, "the stop is completed");
        assert_eq!(state(&Sandbox::new(record, ready())), not_ready);
    }
}
