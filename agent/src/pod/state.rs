//! State of one pod's worker: the desired state ([`DesiredPod`]), the runtime's state ([`ObservedPod`]) and the
//! agent's own ([`WorkerState`]).
//!
//! ```text
//!            Run                              ending, or a verdict
//!   admitted ─► sandbox ─► inits ─► running ──────────► stopping ─► stopped ─► finished
//!       │          ▲         │         │                   ▲            (the API object is deleted,
//!       │          └─────────┴─────────┘ sandbox lost,     │             directories are gone)
//!       └─ verdict (rejected)            container exited  └── newest grace period wins
//! ```
//! The position is never stored: every pass derives it from `ObservedPod`, so a restarted agent continues. A restart of
//! all containers removes the containers. The pod then continues with its init containers in the same sandbox.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::{
    Container, EphemeralContainer, LinuxContainerUser, Pod, PodSpec, ResourceRequirements,
};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};

use super::backoff::KeyedBackoff;
use super::removed::RemovedContainers;
use super::resize_state::{KernelLimits, ResizeState};

/// The desired state of a pod.
#[derive(Clone, Debug)]
pub(crate) enum DesiredPod {
    /// Run the pod, or end it with its grace period if its object is being deleted.
    Run(Arc<Pod>),
    /// The object of the pod is deleted: end the pod and remove everything that belongs to it.
    Gone(Arc<Pod>),
}

impl DesiredPod {
    pub(crate) fn pod(&self) -> &Arc<Pod> {
        match self {
            Self::Run(pod) | Self::Gone(pod) => pod,
        }
    }

    /// The grace period in seconds if the pod must end.
    pub(crate) fn ending(&self) -> Option<i64> {
        let meta = &self.pod().metadata;
        let from_spec =
            || self.pod().spec.as_ref().and_then(|s| s.termination_grace_period_seconds).unwrap_or(30);
        match self {
            Self::Run(_) if meta.deletion_timestamp.is_none() => None,
            _ => Some(meta.deletion_grace_period_seconds.unwrap_or_else(from_spec).max(0)),
        }
    }
}

/// The state of one pod in the runtime.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ObservedPod {
    /// Sandboxes, newest first.
    pub(crate) sandboxes: Vec<ObservedSandbox>,
    /// Containers, in no particular order.
    pub(crate) containers: Vec<ObservedContainer>,
}

/// A sandbox in the runtime.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ObservedSandbox {
    pub(crate) id: String,
    pub(crate) attempt: u32,
    pub(crate) ready: bool,
    /// Addresses, primary first; empty with the host's network.
    pub(crate) ips: Vec<String>,
}

/// A container in the runtime.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ObservedContainer {
    pub(crate) id: String,
    pub(crate) sandbox: String,
    pub(crate) name: String,
    /// Its restart count.
    pub(crate) attempt: u32,
    /// The image reference in its spec, if the runtime reports it.
    pub(crate) requested_image: Option<String>,
    pub(crate) image: String,
    pub(crate) image_id: String,
    /// User and groups of its first process, if the runtime reports them.
    pub(crate) user: Option<LinuxContainerUser>,
    /// The resources that it was created with. None if an earlier agent did not record them.
    pub(crate) created_with: Option<ResourceRequirements>,
    /// Its limits in the kernel when the agent first observed it, if the runtime reports them.
    pub(crate) limits: Option<KernelLimits>,
    pub(crate) run: ContainerRun,
}

/// State of a container.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum ContainerRun {
    Created,
    Running {
        started: Timestamp,
    },
    Exited(Exit),
    /// The runtime reports CONTAINER_UNKNOWN: the container must be stopped before another container may start.
    Unknown,
}

/// The end of a container.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Exit {
    pub(crate) started: Timestamp,
    pub(crate) finished: Timestamp,
    pub(crate) code: i32,
    pub(crate) reason: String,
    pub(crate) message: String,
}

impl ObservedPod {
    /// The sandbox for containers: the newest sandbox, if it is ready.
    pub(crate) fn sandbox(&self) -> Option<&ObservedSandbox> {
        self.sandboxes.first().filter(|s| s.ready)
    }

    /// The newest container of a name, in any sandbox.
    pub(crate) fn latest(&self, name: &str) -> Option<&ObservedContainer> {
        self.containers.iter().filter(|c| c.name == name).max_by_key(|c| c.attempt)
    }

    /// The newest container of a name in the ready sandbox.
    pub(crate) fn current(&self, name: &str) -> Option<&ObservedContainer> {
        let sandbox = self.sandbox()?;
        self.latest(name).filter(|c| c.sandbox == sandbox.id)
    }

    /// The newest ended container of a name before `attempt`.
    pub(crate) fn ended_before(&self, name: &str, attempt: u32) -> Option<&ObservedContainer> {
        self.containers
            .iter()
            .filter(|c| c.name == name && c.attempt < attempt && matches!(c.run, ContainerRun::Exited(_)))
            .max_by_key(|c| c.attempt)
    }

    /// Whether a process of the pod may be running.
    pub(crate) fn alive(&self) -> bool {
        self.sandboxes.iter().any(|s| s.ready) || self.containers.iter().any(ObservedContainer::may_run)
    }
}

impl ObservedContainer {
    /// Whether the container was created from another image than `wanted` has. Besides resources, the image is the only
    /// mutable field. The function compares the image reference that the runtime got, not a serialization of the spec.
    pub(crate) fn has_other_image(&self, wanted: &Container) -> bool {
        matches!((&wanted.image, &self.requested_image), (Some(wanted), Some(requested)) if wanted != requested)
    }

    pub(crate) fn exit(&self) -> Option<&Exit> {
        match &self.run {
            ContainerRun::Exited(exit) => Some(exit),
            ContainerRun::Created | ContainerRun::Running { .. } | ContainerRun::Unknown => None,
        }
    }

    pub(crate) fn running(&self) -> bool {
        matches!(self.run, ContainerRun::Running { .. })
    }

    pub(crate) fn may_run(&self) -> bool {
        matches!(self.run, ContainerRun::Running { .. } | ContainerRun::Unknown)
    }

    pub(crate) fn succeeded(&self) -> bool {
        self.exit().is_some_and(|e| e.code == 0)
    }
}

/// The reason why the whole pod was rejected or has failed, independent of its containers; final.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Verdict {
    pub(crate) reason: String,
    pub(crate) message: String,
}

/// The reason of a verdict that is an eviction.
pub(crate) const EVICTED: &str = "Evicted";

/// The reason of the verdict of a pod that ends because the machine shuts down. The text is upstream's.
pub(crate) const TERMINATED: &str = "Terminated";

/// The reason of the verdict of a pod that ends so that a critical pod fits on the node. The text is upstream's.
pub(crate) const PREEMPTING: &str = "Preempting";

/// The reason why a container has not started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waiting {
    pub(crate) reason: String,
    pub(crate) message: String,
}

/// Last probe results of a container.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Probed {
    pub(crate) started: bool,
    pub(crate) ready: bool,
}

/// State that only the worker has. A restarted agent restores the start time, evictions, probe results, resizes,
/// [`WorkerState::kill_requests`], [`WorkerState::redefined`] and [`WorkerState::removed`]. Everything else, such as
/// back-offs, starts empty.
#[derive(Clone, Debug)]
pub(crate) struct WorkerState {
    /// Time at which this node first accepted the pod.
    pub(crate) start_time: Option<Timestamp>,
    pub(crate) verdict: Option<Verdict>,
    /// Whether the verdict is an eviction because the node is short of a resource, a shutdown of the machine, or a
    /// preemption.
    pub(crate) disrupted: bool,
    /// The shortest grace period in seconds of the pod's evictions, including evictions that came while the pod was
    /// ending for another reason. A preemption and a shutdown of the machine are evictions, too.
    pub(crate) eviction_grace: Option<u32>,
    /// The reason why containers have not started, by container name.
    pub(crate) waiting: BTreeMap<String, Waiting>,
    /// Crashes by container name. The key [`ALL_CONTAINERS`] has the restarts of all containers.
    pub(crate) crashes: KeyedBackoff,
    /// Failed pulls, by image reference.
    pub(crate) pulls: KeyedBackoff,
    /// Failed starts, except failed pulls, by container name.
    pub(crate) retries: KeyedBackoff,
    /// Failed creations of the sandbox or the volumes and failed resizes, by [`SANDBOX`], [`VOLUMES`] and [`RESIZE`].
    pub(crate) pod_retries: KeyedBackoff,
    /// Whether this agent has created or adopted the pod's cgroup and volumes.
    pub(crate) prepared: bool,
    /// Last probe results, by container id.
    pub(crate) probed: HashMap<String, Probed>,
    /// Running containers to kill, by container id.
    pub(crate) kill_requests: BTreeMap<String, KillRequest>,
    /// Ids of containers that were stopped to start again with another image.
    pub(crate) redefined: BTreeSet<String>,
    /// Ids of the sandboxes that this agent has stopped. Other sandboxes that are not ready may have a network and a
    /// shim.
    pub(crate) stopped: BTreeSet<String>,
    /// Whether the volumes and cgroup of the ended pod were released.
    pub(crate) released: bool,
    /// Resizes of the pod.
    pub(crate) resize: ResizeState,
    /// Containers that a restart of all containers removed, until they run again.
    pub(crate) removed: RemovedContainers,
    /// Back-off of the pod after its last restart of all containers. None if no back-off is running.
    pub(crate) restart_wait: Option<RestartWait>,
}

/// Back-off of a pod that repeatedly restarts all of its containers. The removed containers start after its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RestartWait {
    /// Time of the removal of the last container.
    since: Timestamp,
    /// Length in seconds.
    pub(crate) seconds: i64,
}

/// A request to kill a container, with its reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KillRequest {
    pub(crate) why: String,
    /// Grace period in seconds. None means the grace period of the pod.
    pub(crate) grace: Option<i64>,
    /// Whether a probe has failed; otherwise a postStart hook has failed. After a failed probe, the container starts
    /// again after any exit code, unless its policy is Never.
    pub(crate) restarts: bool,
}

/// The key of [`WorkerState::crashes`] for restarts of all containers. It is not a valid name of a container.
const ALL_CONTAINERS: &str = "*";

/// A key of [`WorkerState::pod_retries`].
pub(crate) const SANDBOX: &str = "sandbox";
/// A key of [`WorkerState::pod_retries`].
pub(crate) const VOLUMES: &str = "volumes";
/// A key of [`WorkerState::pod_retries`].
pub(crate) const RESIZE: &str = "resize";

impl WorkerState {
    /// Initial state of a worker. `most` is the maximum wait before a crashed container starts again.
    pub(crate) fn with_max_restart_wait(most: Duration) -> Self {
        Self { crashes: KeyedBackoff::up_to(most), ..Self::default() }
    }

    /// Ends the back-off of containers whose image was changed. Upstream's key of the back-off includes the image.
    pub(crate) fn forget_crashes(&mut self, desired: &DesiredPod, observed: &ObservedPod) {
        for container in desired.pod().spec.iter().flat_map(|spec| &spec.containers) {
            if observed.latest(&container.name).is_some_and(|latest| latest.has_other_image(container)) {
                self.crashes.clear(&container.name);
            }
        }
    }

    /// Grace period in seconds if the pod is evicted or preempted, or ends because the machine shuts down. The period
    /// is one second if an earlier agent has evicted the pod.
    pub(crate) fn evicted_grace(&self) -> Option<i64> {
        let reasons = [EVICTED, TERMINATED, PREEMPTING];
        let is_eviction = |verdict: &Verdict| reasons.contains(&verdict.reason.as_str());
        let is_evicted = self.verdict.as_ref().is_some_and(is_eviction);
        self.eviction_grace.or_else(|| is_evicted.then_some(1)).map(i64::from)
    }

    /// Whether the agent stops containers: by a request to kill them, or to start them again with another image or
    /// other resources.
    pub(crate) fn has_stops(&self) -> bool {
        !self.kill_requests.is_empty() || !self.redefined.is_empty() || !self.resize.restarts.is_empty()
    }

    /// Counts a restart of all containers after it has removed the last container. The first restart has no back-off.
    pub(crate) fn count_restart_of_all(&mut self, now: Timestamp) {
        let is_due = self.crashes.until(ALL_CONTAINERS, now, now).is_some();
        let seconds = self.crashes.seconds(ALL_CONTAINERS);
        self.restart_wait = is_due.then_some(RestartWait { since: now, seconds });
        self.crashes.fail(ALL_CONTAINERS, now, now);
    }
}

// === impl RestartWait ===

impl RestartWait {
    /// The end of the back-off. None if it is over, or if the clock was set back to a time before it.
    pub(crate) fn until(&self, now: Timestamp) -> Option<Timestamp> {
        let length = SignedDuration::from_secs(self.seconds);
        let until = self.since.checked_add(length).unwrap_or(Timestamp::MAX);
        (self.since <= now && now < until).then_some(until)
    }
}

impl Default for WorkerState {
    fn default() -> Self {
        Self {
            start_time: None,
            verdict: None,
            disrupted: false,
            eviction_grace: None,
            waiting: BTreeMap::new(),
            crashes: KeyedBackoff::default(),
            pulls: KeyedBackoff::default(),
            retries: KeyedBackoff::short(),
            pod_retries: KeyedBackoff::short(),
            prepared: false,
            probed: HashMap::new(),
            kill_requests: BTreeMap::new(),
            redefined: BTreeSet::new(),
            stopped: BTreeSet::new(),
            released: false,
            resize: ResizeState::default(),
            removed: RemovedContainers::new(),
            restart_wait: None,
        }
    }
}

/// The containers of a pod, by their kinds.
pub(crate) struct Shape<'a> {
    pub(crate) spec: &'a PodSpec,
}

impl<'a> Shape<'a> {
    pub(crate) fn of(spec: &'a PodSpec) -> Self {
        Self { spec }
    }

    pub(crate) fn inits(&self) -> &'a [Container] {
        self.spec.init_containers.as_deref().unwrap_or_default()
    }

    pub(crate) fn mains(&self) -> &'a [Container] {
        &self.spec.containers
    }

    /// Ephemeral containers, as containers.
    pub(crate) fn ephemerals(&self) -> Vec<Container> {
        self.spec.ephemeral_containers.iter().flatten().map(as_container).collect()
    }

    /// The target container of an ephemeral container.
    pub(crate) fn target(&self, name: &str) -> Option<&'a str> {
        let mut all = self.spec.ephemeral_containers.iter().flatten();
        let target = all.find(|c| c.name == name)?.target_container_name.as_deref();
        target.filter(|target| !target.is_empty())
    }

    /// The container of a name, of any kind.
    pub(crate) fn any(&self, name: &str) -> Option<Cow<'a, Container>> {
        let added = || self.spec.ephemeral_containers.iter().flatten().find(|c| c.name == name);
        self.container(name).map(Cow::Borrowed).or_else(|| Some(Cow::Owned(as_container(added()?))))
    }

    /// The container of a name, init or main.
    pub(crate) fn container(&self, name: &str) -> Option<&'a Container> {
        self.inits().iter().chain(self.mains()).find(|c| c.name == name)
    }
}

/// An ephemeral container has the fields of a container, though the API allows few of them.
fn as_container(added: &EphemeralContainer) -> Container {
    let added = added.clone();
    Container {
        name: added.name,
        args: added.args,
        command: added.command,
        env: added.env,
        env_from: added.env_from,
        image: added.image,
        image_pull_policy: added.image_pull_policy,
        security_context: added.security_context,
        stdin: added.stdin,
        stdin_once: added.stdin_once,
        termination_message_path: added.termination_message_path,
        termination_message_policy: added.termination_message_policy,
        tty: added.tty,
        volume_devices: added.volume_devices,
        volume_mounts: added.volume_mounts,
        working_dir: added.working_dir,
        // The API rejects these fields of ephemeral containers.
        lifecycle: None,
        liveness_probe: None,
        ports: None,
        readiness_probe: None,
        resize_policy: None,
        resources: None,
        restart_policy: None,
        restart_policy_rules: None,
        startup_probe: None,
    }
}

/// Whether an init container is a sidecar. A sidecar starts in the order of the init containers and runs as long as the
/// pod. A main container with the policy Always is not a sidecar.
pub(crate) fn is_sidecar(init: &Container) -> bool {
    init.restart_policy.as_deref() == Some("Always")
}

/// Whether a pod has ended for good.
pub(crate) fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|s| s.phase.as_deref());
    matches!(phase, Some("Failed" | "Succeeded"))
}

/// The back-off that a failed start uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Failed {
    Pull {
        image: String,
    },
    Start,
    /// The container was created, so the failure also counts as a crash.
    Run,
}

#[cfg(test)]
pub(crate) mod fixture;
