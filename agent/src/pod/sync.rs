//! Pod sync: one worker per pod, driven by changes of desired pods and by container events.

mod orphan;
mod preemption;
mod resize;
mod static_pods;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use coracle_backoff::Backoff;
use coracle_proto::cri;
use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;
use tokio::sync::{Notify, mpsc, watch};
use tokio::task::JoinSet;

use super::NodeContext;
use super::admit::{self, unsupported};
use super::config::POD_UID;
use super::pods::Pods;
use super::resize::allocation;
use super::state::{DesiredPod, PREEMPTING, Verdict, has_ended};
use super::worker;
use crate::deadline::until;
use crate::event_recorder::Level;
use crate::kubelet_metrics::RetryTrigger;
use crate::source::{PodChange, is_static};
use preemption::{NewPod, Preemption, Preemptor};
use resize::PendingPod;

/// Inputs of pod sync.
pub(crate) struct Inputs {
    pub(crate) changes: mpsc::Receiver<PodChange>,
    /// The Node object.
    pub(crate) node_object: watch::Receiver<Option<Arc<k8s_openapi::api::core::v1::Node>>>,
    pub(crate) pods: Pods,
    /// The uids of evicted pods.
    pub(crate) evicted: mpsc::UnboundedReceiver<String>,
    /// The uids of pods with a device whose health has changed.
    pub(crate) device_changes: mpsc::UnboundedReceiver<String>,
}

struct Handle {
    desired: watch::Sender<DesiredPod>,
    wake: Arc<Notify>,
}

struct Sync {
    node: Arc<NodeContext>,
    inputs: Inputs,
    handles: HashMap<String, Handle>,
    workers: JoinSet<String>,
    /// Pods that existed in the runtime when this agent started: an earlier agent admitted them.
    adopted: HashSet<String>,
    orphans: Option<HashMap<String, Arc<Pod>>>,
    /// Orphans that are static pods, until the manifests were read.
    static_orphans: HashMap<String, Arc<Pod>>,
    /// Whether all static pods of the manifests at the start are known.
    are_statics_known: bool,
    /// The static pods of the manifests, by uid.
    static_pods: HashMap<String, Arc<Pod>>,
    /// Pods that have ended, until their objects are deleted.
    finished: HashSet<String>,
    /// Resizes that are not accepted yet, by the pod's uid.
    pending: HashMap<String, PendingPod>,
    /// Critical pods that wait for the end of other pods, by uid.
    preemptors: HashMap<String, Preemptor>,
}

/// The result of an admission.
enum Admission {
    Admitted,
    Rejected(Verdict),
    /// Other pods must end before the pod starts.
    Preempts(Preemption),
}

/// Runs until the source ends. Dropping the future ends the workers and leaves the pods as they are.
pub(crate) async fn run(node: Arc<NodeContext>, inputs: Inputs) {
    let (woken, mut wakes) = mpsc::unbounded_channel();
    let events = tokio_util::task::AbortOnDropHandle::new(coracle_threads::spawn(follow_events(
        Arc::clone(&node),
        woken,
    )));
    let orphans = orphan::find(&node).await;
    let adopted = orphans.keys().cloned().collect();
    let (static_orphans, orphans) = orphans.into_iter().partition(|(uid, _)| is_static(uid));
    let mut sync = Sync {
        adopted,
        orphans: Some(orphans),
        static_orphans,
        are_statics_known: false,
        static_pods: HashMap::new(),
        finished: HashSet::new(),
        pending: HashMap::new(),
        preemptors: HashMap::new(),
        node,
        inputs,
        handles: HashMap::new(),
        workers: JoinSet::new(),
    };
    let stored = sync.node.checkpoint.clone();
    let stored = coracle_threads::spawn_blocking(move || stored.load()).await.unwrap_or_default();
    for pod in stored {
        sync.change(PodChange::Stored(Arc::new(pod)));
    }
    let (dra, preempted) = (sync.node.dra.clone(), sync.node.evictions.preempted().clone());
    loop {
        let preemption_due = sync.preemption_due();
        // All arms are cancel-safe: channels keep items that are not received, and a task is joined once.
        tokio::select! {
            change = sync.inputs.changes.recv() => match change {
                Some(change) => sync.change(change),
                None => break,
            },
            Some(woken) = wakes.recv() => sync.wake(&woken),
            Some(evicted) = sync.inputs.evicted.recv() => sync.wake(&WakeRequest::Pod(evicted)),
            Some(uid) = sync.inputs.device_changes.recv() => sync.wake(&WakeRequest::Pod(uid)),
            uids = dra.next_health_changes() => {
                uids.into_iter().for_each(|uid| sync.wake(&WakeRequest::Pod(uid)));
            }
            Some(ended) = sync.workers.join_next() => sync.ended(ended),
            () = preempted.next_release() => sync.start_preemptors(),
            () = until(preemption_due) => sync.start_preemptors(),
        }
    }
    drop(events);
}

/// Pods to observe again.
enum WakeRequest {
    Pod(String),
    All,
}

/// Wakes a pod's worker on a container event. Wakes all workers after each subscription, because events before it are
/// lost.
async fn follow_events(node: Arc<NodeContext>, woken: mpsc::UnboundedSender<WakeRequest>) {
    let mut backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(10));
    loop {
        match node.runtime.events().await {
            Ok(mut events) => {
                if woken.send(WakeRequest::All).is_err() {
                    return;
                }
                while let Some(Ok(event)) = events.next().await {
                    backoff.reset();
                    if event.container_event_type() == cri::ContainerEventType::ContainerDeletedEvent {
                        node.image_gc.check_disk();
                    }
                    let sandbox = event.pod_sandbox_status.unwrap_or_default();
                    let uid =
                        sandbox.metadata.map(|m| m.uid).or_else(|| sandbox.labels.get(POD_UID).cloned());
                    let one = uid.filter(|uid| !uid.is_empty()).map_or(WakeRequest::All, WakeRequest::Pod);
                    if woken.send(one).is_err() {
                        return;
                    }
                }
                tracing::debug!("the stream of container events ended");
            }
            Err(status) => tracing::warn!(error = status.message(), "cannot subscribe to container events"),
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

impl Sync {
    fn change(&mut self, change: PodChange) {
        match change {
            PodChange::Stored(pod) => self.set_desired(&pod, false),
            PodChange::Applied(pod) => self.set_desired(&pod, true),
            PodChange::Deleted(pod) => {
                if let Some(uid) = &pod.metadata.uid {
                    self.finished.remove(uid);
                    self.end_pod(uid, &forced(&pod));
                }
            }
            PodChange::Complete(uids) => self.complete(&uids),
            PodChange::StaticComplete(uids) => self.static_complete(&uids),
            PodChange::StaticSent => self.statics_sent(),
            PodChange::Static(pod) => self.add_static(pod),
            PodChange::StaticRemoved(uid) => self.remove_static(&uid),
        }
    }

    /// Sets the desired version of a pod. `from_api` is false for a version from the checkpoint, and true for a version
    /// from the API server or from a manifest.
    fn set_desired(&mut self, pod: &Arc<Pod>, from_api: bool) {
        let Some(uid) = pod.metadata.uid.clone() else { return };
        if self.finished.contains(&uid) {
            // This is a late event of a pod that has ended.
            return;
        }
        if self.handles.contains_key(&uid) {
            if from_api {
                self.follow(&uid, pod);
            }
            return;
        }
        let new = NewPod { pod: Arc::clone(pod), from_api };
        if let Some(new) = self.update_preemptor(&uid, new) {
            self.begin(uid, &new, false);
        }
    }

    /// Admits and starts a pod. `has_room` is true after the preemption of other pods: the free resources are not
    /// checked again, as upstream.
    fn begin(&mut self, uid: String, new: &NewPod, has_room: bool) {
        let NewPod { pod, from_api } = new;
        let from_api = *from_api;
        // If no earlier agent left a record, the allocated resources of a pod with a pending resize are in its status.
        let last = allocation::reported(pod).map(Arc::new);
        let allocated = last.as_ref().filter(|_| from_api).unwrap_or(pod);
        let admission = self.admit(&uid, allocated, has_room);
        if is_static(&uid) && !matches!(admission, Admission::Rejected(_)) {
            self.node.statuses.mirrors().admit(&uid);
        }
        let verdict = match admission {
            Admission::Admitted => None,
            Admission::Rejected(verdict) => Some(verdict),
            Admission::Preempts(preemption) => {
                // Other new pods must not take the resources that become free.
                self.inputs.pods.put(&uid, allocated);
                self.wait_for_preempted(uid, new.clone(), &preemption);
                return;
            }
        };
        let start_time = worker::start_time(allocated);
        if from_api {
            // After a restart, a pod with a start time is not admitted again.
            self.node.checkpoint.keep_new(allocated, verdict.is_none().then_some(start_time));
        }
        if verdict.is_none() && !self.adopted.contains(&uid) {
            let containers = allocated.spec.as_ref().map_or(0, |spec| spec.containers.len());
            self.node.metrics.pods.added(containers);
        }
        self.inputs.pods.put(&uid, allocated);
        if verdict.is_some() {
            self.inputs.pods.release(&uid);
        }
        self.update_cpu_weight();
        self.start(uid.clone(), DesiredPod::Run(Arc::clone(allocated)), verdict, start_time);
        if from_api && last.is_some() {
            self.follow(&uid, pod);
        }
    }

    /// Admits a pod. A pod that ran here before, has ended or is ending is not checked.
    fn admit(&self, uid: &str, pod: &Pod, has_room: bool) -> Admission {
        let status = pod.status.as_ref();
        let accepted = self.adopted.contains(uid) || status.is_some_and(|s| s.start_time.is_some());
        if pod.metadata.deletion_timestamp.is_some() || has_ended(pod) {
            return Admission::Admitted;
        }
        if accepted {
            self.node.managers.adopt(pod);
            return Admission::Admitted;
        }
        match self.check(uid, pod, has_room) {
            Ok(None) => {
                let ignored = unsupported::ignored(pod);
                if !ignored.is_empty() {
                    let message = format!("This node ignores {}", ignored.join(", "));
                    self.node.recorder.pod(pod, Level::Warning, unsupported::UNSUPPORTED, message);
                }
                Admission::Admitted
            }
            Ok(Some(preemption)) => Admission::Preempts(preemption),
            Err(verdict) => {
                let (reason, message) = admit::rejection_event(&verdict);
                self.node.metrics.rejected(reason);
                if is_static(uid) {
                    self.inputs.pods.add_rejected_static(uid);
                    // A rejected static pod has no mirror pod that shows the reason.
                    tracing::warn!(
                        uid,
                        pod = pod.metadata.name,
                        reason,
                        cause = message,
                        "rejected a static pod"
                    );
                }
                self.node.recorder.pod(pod, Level::Warning, reason, message);
                Admission::Rejected(verdict)
            }
        }
    }

    /// Checks a pod and allocates its resources. Returns the pods that must end before the pod starts.
    fn check(&self, uid: &str, pod: &Pod, has_room: bool) -> Result<Option<Preemption>, Verdict> {
        let node_object = self.inputs.node_object.borrow().clone();
        let pods = &self.inputs.pods;
        let names = admit::other_requests(pod).into_keys();
        let (managed, summed): (Vec<String>, Vec<String>) =
            names.partition(|name| self.node.devices.manages(name));
        let others = pods.other_resources_used(uid, summed);
        let input = admit::AdmissionInput {
            pod,
            used: admit::UsedResources { others, ..pods.used_by_others(uid) },
            managed,
            node: node_object.as_deref(),
            max_pods: usize::try_from(self.node.config.max_pods).unwrap_or(usize::MAX),
            allocatable: self.node.allocatable,
            of_machine: self.node.volumes.allocatable(),
            pressure: self.node.pressure.current(),
            is_shutting_down: self.node.config.machine_shutdown.is_cancelled(),
            allowed_sysctls: &self.node.config.pod_policy.allowed_sysctls,
        };
        let shortages = admit::admit(&input)?;
        admit::in_use::check(pod, &self.node.config)?;
        let preemption = if has_room { None } else { self.preemption_for(uid, pod, &shortages)? };
        if preemption.is_some() {
            // The devices are checked before other pods end. Otherwise the controller of a rejected pod would replace
            // it, and other pods would end again.
            let free = self.node.devices.check_free(pod);
            free.map_err(|reason| admit::devices_unavailable(&reason))?;
        }
        // Resources are allocated last, so that no other check rejects the pod after its allocation. As upstream, no
        // other pod ends before the allocation has succeeded.
        admit::allocation::allocate(pod, &self.node.managers)?;
        Ok(preemption)
    }

    fn start(&mut self, uid: String, desired: DesiredPod, verdict: Option<Verdict>, start_time: Timestamp) {
        if self.node.checkpoint.eviction(&uid).is_some_and(|stored| stored.reason == PREEMPTING) {
            // An earlier agent has preempted this pod. The critical pod starts after the end of this pod.
            self.node.evictions.preempted().add(&uid);
        }
        let wake = Arc::new(Notify::new());
        let (sender, receiver) = watch::channel(desired);
        let start = Box::new(worker::WorkerStart {
            node: Arc::clone(&self.node),
            uid: uid.clone(),
            desired: receiver,
            wake: Arc::clone(&wake),
            verdict,
            start_time,
            received: (!self.adopted.contains(&uid)).then(Instant::now),
        });
        self.handles.insert(uid.clone(), Handle { desired: sender, wake });
        self.workers.spawn(async move {
            worker::run(start).await;
            uid
        });
    }

    fn end_pod(&mut self, uid: &str, pod: &Arc<Pod>) {
        match self.handles.get(uid) {
            Some(handle) => {
                self.inputs.pods.add_orphan(uid);
                drop(handle.desired.send_replace(DesiredPod::Gone(Arc::clone(pod))));
            }
            None => {
                if self.preemptors.remove(uid).is_some() {
                    self.node.managers.release(uid);
                }
                self.inputs.pods.remove(uid);
                self.node.services.remove_pod(uid);
                self.node.checkpoint.remove(uid);
                self.retry_resizes(RetryTrigger::PodsRemoved);
            }
        }
    }

    /// Called after the API server has listed all pods. Running or stored pods that are not in the list must end,
    /// except static pods.
    fn complete(&mut self, uids: &HashSet<String>) {
        let services = &self.node.services;
        self.finished.retain(|uid| {
            let exists = uids.contains(uid);
            if !exists {
                services.remove_pod(uid);
            }
            exists
        });
        let stale: Vec<(String, Arc<Pod>)> = self
            .handles
            .iter()
            .filter(|(uid, _)| !uids.contains(*uid) && !is_static(uid))
            .map(|(uid, handle)| (uid.clone(), Arc::clone(handle.desired.borrow().pod())))
            .chain(self.stale_preemptors(uids))
            .collect();
        for (uid, pod) in stale {
            self.end_pod(&uid, &pod);
        }
        for (uid, pod) in self.orphans.take().into_iter().flatten() {
            if !uids.contains(&uid) && !self.handles.contains_key(&uid) {
                tracing::info!(uid, pod = pod.metadata.name, "terminating a pod that is not in the API");
                let start_time = worker::start_time(&pod);
                self.node.metrics.pods.orphan_found();
                self.inputs.pods.add_orphan(&uid);
                self.start(uid, DesiredPod::Gone(pod), None, start_time);
            }
        }
        self.node.managers.retain(|uid| {
            self.handles.contains_key(uid)
                || self.preemptors.contains_key(uid)
                || self.static_orphans.contains_key(uid)
        });
        self.complete_mirrors();
        self.node.image_gc.pods_are_known();
        self.retry_resizes(RetryTrigger::PodsAdded);
    }

    fn wake(&self, woken: &WakeRequest) {
        match woken {
            WakeRequest::Pod(uid) => {
                if let Some(handle) = self.handles.get(uid) {
                    handle.wake.notify_one();
                }
            }
            WakeRequest::All => self.handles.values().for_each(|handle| handle.wake.notify_one()),
        }
    }

    /// Sets the CPU weight of the burstable class to the sum of its pods' requests.
    fn update_cpu_weight(&self) {
        if let Err(error) = self.node.cgroups.update_qos(self.inputs.pods.burstable_millis()) {
            tracing::warn!(
                error = &error as &dyn std::error::Error,
                "cannot set the weight of the burstable cgroup"
            );
        }
    }

    fn ended(&mut self, ended: Result<String, tokio::task::JoinError>) {
        match ended {
            Ok(uid) => {
                self.inputs.pods.remove(&uid);
                self.node.evictions.preempted().release(&uid);
                self.update_cpu_weight();
                self.node.metrics.pull_times.take(&uid);
                self.forget_resize(&uid);
                self.retry_resizes(RetryTrigger::PodsRemoved);
                let desired = self.handles.remove(&uid).map(|handle| handle.desired.borrow().clone());
                if matches!(desired, Some(DesiredPod::Run(_))) {
                    self.finished.insert(uid.clone());
                } else {
                    self.node.services.remove_pod(&uid);
                }
                self.static_ended(&uid);
            }
            Err(error) => tracing::error!(%error, "a pod's worker panicked"),
        }
    }
}

/// The pod as after a forced deletion: its containers get a grace period of one second.
fn forced(pod: &Pod) -> Arc<Pod> {
    let mut pod = pod.clone();
    pod.metadata.deletion_grace_period_seconds = Some(1);
    Arc::new(pod)
}
