//! The worker of one pod: observes the runtime, plans, applies and reports the status.
//!
//! Between passes the worker sleeps until the desired pod changes, a container event or a probe result arrives, a job
//! ends, or a timer is due.

mod counts;
mod event;
mod eviction;
mod job;
mod policies;
mod probes;
mod reports;
mod resize;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::NodeContext;
use super::apply::{ApplyError, Job, Report};
use super::observe::observe;
use super::plan::{self, Action, Plan};
use super::probe::Finding;
use super::pull::PullTask;
use super::resize_state::ResizeState;
use super::restart;
use super::state::{DesiredPod, ObservedPod, Verdict, WorkerState};
use super::status::{self, write::Update};
use crate::event_recorder::Level;
use crate::service_cache::LocalPod;
use crate::volume::{self, Volumes};
use event::{Event, Queue, next_event};
use job::{RunningJob, job_end};
use policies::AwaitedPolicies;
use probes::{Probes, probe_results};

/// Seconds to wait after consecutive errors of the runtime, or of an action that has no back-off of its own.
const ERROR_BACKOFF: [i64; 7] = [1, 2, 4, 8, 16, 32, 60];

/// Arguments of [`run`].
pub(crate) struct WorkerStart {
    pub(crate) node: Arc<NodeContext>,
    pub(crate) uid: String,
    pub(crate) desired: watch::Receiver<DesiredPod>,
    pub(crate) wake: Arc<Notify>,
    /// Set when the node rejected the pod at admission.
    pub(crate) verdict: Option<Verdict>,
    pub(crate) start_time: Timestamp,
    /// When the node received the pod. None for a pod of an earlier agent.
    pub(crate) received: Option<Instant>,
}

struct Worker {
    node: Arc<NodeContext>,
    uid: String,
    desired: watch::Receiver<DesiredPod>,
    state: WorkerState,
    observed: ObservedPod,
    volumes: Option<Volumes>,
    pulls: HashMap<String, PullTask>,
    /// Boxed to save memory, because it is None for most of the time.
    awaited: Option<Box<AwaitedPolicies>>,
    /// Ids of containers whose preStop hook has run.
    pre_stop_done: HashSet<String>,
    /// The status that was sent last. None when the desired pod, as the API has it, contains it. Boxed to save memory.
    reported: Option<Box<PodStatus>>,
    /// Whether the API has the status that was sent last.
    is_in_api: bool,
    probes: Probes,
    reports: Queue<Report>,
    findings: Queue<Finding>,
    /// When the node received the pod. None after the pod has run, and for a pod of an earlier agent.
    received: Option<Instant>,
    /// Number of consecutive errors.
    failures: usize,
    /// No job starts before this time.
    not_before: Option<Timestamp>,
    was_observed: bool,
    finished: bool,
}

/// A status to be written.
struct StatusChange {
    /// The status that the API is known to have.
    known: PodStatus,
    status: PodStatus,
    /// Whether the Pod object is deleted after the write.
    delete: bool,
}

/// Runs a pod until it has ended and its resources are released. Dropping the future leaves the pod as it is.
///
/// The arguments are boxed, because a future keeps the memory of its arguments until the future is dropped.
pub(crate) async fn run(start: Box<WorkerStart>) {
    let wake = Arc::clone(&start.wake);
    if let Some(received) = start.received {
        start.node.metrics.worker_started(received.elapsed());
    }
    let mut worker = Worker::new(*start);
    let mut job: Option<RunningJob> = None;
    while !worker.finished {
        let due = {
            let desired = worker.desired.borrow_and_update().clone();
            let begun = Instant::now();
            // The future is on the heap, because each pod has a worker, which waits for most of its life.
            let plan = Box::pin(worker.observe_and_plan(&desired, job.is_some())).await;
            match &mut job {
                Some(job) => job.shorten_grace(eviction::ending(&desired, &worker.state)),
                None => job = worker.sync(&desired, &plan, begun),
            }
            [plan.wake, worker.not_before].into_iter().flatten().min()
        };
        let has_job = job.is_some();
        // Every arm is cancel-safe: channels and notifications keep their items, and `job` keeps its future.
        tokio::select! {
            result = job_end(&mut job) => {
                worker.count_sync(job.take());
                worker.job_ended(result);
            }
            event = next_event(&mut worker.reports.receiver, &mut worker.findings.receiver, &wake, has_job) => {
                match event {
                    Event::Report(report) => worker.apply_report(report),
                    Event::Finding(finding) => worker.apply_finding(finding),
                    Event::Woken => {}
                }
            }
            changed = worker.desired.changed() => match changed {
                Ok(()) => {
                    worker.not_before = None;
                    volume::follow(&worker.node.volumes, worker.desired.borrow().pod());
                }
                // Pod sync has ended: the agent is stopping.
                Err(_closed) => return,
            },
            containers = policies::enforced(&mut worker.awaited) => worker.policies_enforced(&containers),
            () = sleep_until(due) => {}
        }
        worker.not_before = worker.not_before.filter(|at| *at > Timestamp::now());
        while let Ok(report) = worker.reports.receiver.try_recv() {
            worker.apply_report(report);
        }
        while let Ok(finding) = worker.findings.receiver.try_recv() {
            worker.apply_finding(finding);
        }
    }
}

/// The start time of a pod's status, or now in whole seconds, as in the API.
pub(crate) fn start_time(pod: &Pod) -> Timestamp {
    let started = pod.status.as_ref().and_then(|status| status.start_time.as_ref());
    started.map_or_else(|| whole_seconds(Timestamp::now()), |time| time.0)
}

fn whole_seconds(time: Timestamp) -> Timestamp {
    Timestamp::from_second(time.as_second()).unwrap_or(time)
}

async fn sleep_until(due: Option<Timestamp>) {
    let Some(due) = due else { return std::future::pending().await };
    let left = Duration::try_from(due - Timestamp::now()).unwrap_or_default();
    // The margin of 2 ms makes sure that the deadline is over when the plan checks it.
    tokio::time::sleep(left + Duration::from_millis(2)).await;
}

// === impl Worker ===

impl Worker {
    fn new(start: WorkerStart) -> Self {
        let desired = start.desired.borrow().clone();
        let status = desired.pod().status.as_ref();
        let pod_dir = start.node.volumes.pod_dir(&start.uid);
        let stops = restart::stops::read(&pod_dir);
        let mut state = WorkerState {
            start_time: Some(start.start_time),
            verdict: start.verdict,
            probed: probe_results(status),
            resize: ResizeState { restarts: stops.resized, ..ResizeState::of(desired.pod()) },
            removed: restart::removed_before(desired.pod(), &pod_dir),
            kill_requests: stops.kill_requests,
            redefined: stops.redefined,
            ..WorkerState::with_max_restart_wait(start.node.config.pod_policy.max_restart_wait)
        };
        eviction::restore(&mut state, &start.node, &start.uid);
        let is_pending =
            status.and_then(|status| status.phase.as_deref()).is_none_or(|phase| phase == "Pending");
        Self {
            node: start.node,
            uid: start.uid,
            desired: start.desired,
            state,
            observed: ObservedPod::default(),
            volumes: None,
            pulls: HashMap::new(),
            awaited: None,
            pre_stop_done: HashSet::new(),
            reported: None,
            is_in_api: false,
            probes: Probes::default(),
            reports: Queue::new(),
            findings: Queue::new(),
            received: start.received.filter(|_| is_pending),
            failures: 0,
            not_before: None,
            was_observed: false,
            finished: false,
        }
    }

    /// Observes the runtime, plans, and reports the pod's status to the API.
    async fn observe_and_plan(&mut self, desired: &DesiredPod, has_job: bool) -> Plan {
        match observe(&*self.node.runtime, &self.uid, &self.observed).await {
            Ok(observed) => self.observed = observed,
            Err(error) => {
                tracing::warn!(
                    uid = self.uid,
                    error = error.message(),
                    "cannot observe a pod in the runtime"
                );
                self.back_off();
                return Plan::default();
            }
        }
        self.note_earlier_sandbox(desired);
        self.forget_removed_containers();
        self.take_eviction(desired).await;
        self.follow_resize(desired);
        self.state.forget_crashes(desired, &self.observed);
        let now = Timestamp::now();
        let input = plan::PlanInput { desired, observed: &self.observed, state: &self.state, now };
        let plan = plan::plan(&input);
        if !has_job {
            self.record_waiting(desired, &plan);
        }
        self.report_status(desired, &plan, now);
        let pod = probes::ProbedPod { desired, observed: &self.observed, results: &self.state.probed };
        self.probes.reconcile(&self.node, &pod, &self.findings.sender);
        plan
    }

    /// Starts a job for a pass that began at this time. A pass without a job is counted at once.
    fn sync(&mut self, desired: &DesiredPod, plan: &Plan, begun: Instant) -> Option<RunningJob> {
        let operation = match (desired.ending(), self.observed.sandbox()) {
            (Some(_), _) => "kill",
            (None, None) => "create",
            (None, Some(_)) => "sync",
        };
        let job = self.start_job(desired, plan, operation, begun);
        if job.is_none() {
            self.node.metrics.synced("sync", begun.elapsed());
        }
        job
    }

    /// Counts a pass whose job has ended.
    fn count_sync(&self, job: Option<RunningJob>) {
        if let Some(RunningJob { operation, begun, .. }) = job {
            self.node.metrics.synced(operation, begun.elapsed());
        }
    }

    /// Starts a job for the planned actions. None if no actions are planned, or if a back-off is running.
    fn start_job(
        &mut self,
        desired: &DesiredPod,
        plan: &Plan,
        operation: &'static str,
        begun: Instant,
    ) -> Option<RunningJob> {
        let failure = plan.actions.iter().find_map(|action| match action {
            Action::FailPod(verdict) => Some(verdict),
            _ => None,
        });
        if let Some(verdict) = failure {
            self.fail_pod(desired, verdict);
            return None;
        }
        if plan.actions.is_empty() || self.not_before.is_some() {
            return None;
        }
        self.state.resize.restarts.extend(plan.resize_restarts.iter().cloned());
        self.state.redefined.extend(plan.redefined.iter().cloned());
        self.record_stops(plan);
        let interrupt = CancellationToken::new();
        let job = Job {
            node: Arc::clone(&self.node),
            pod: Arc::clone(desired.pod()),
            uid: self.uid.clone(),
            observed: self.observed.clone(),
            volumes: self.volumes.clone(),
            pulls: std::mem::take(&mut self.pulls),
            pre_stop_done: self.pre_stop_done.clone(),
            reports: self.reports.sender.clone(),
            interrupt: interrupt.clone(),
        };
        let future = Box::pin(job.run(plan.actions.clone()));
        Some(RunningJob {
            future,
            interrupt,
            operation,
            begun,
            grace: eviction::ending(desired, &self.state),
        })
    }

    /// Marks the whole pod as failed (`activeDeadlineSeconds` is over); the next pass stops it.
    fn fail_pod(&mut self, desired: &DesiredPod, verdict: &Verdict) {
        let recorder = &self.node.recorder;
        recorder.pod(desired.pod(), Level::Normal, "DeadlineExceeded", verdict.message.clone());
        self.state.verdict = Some(verdict.clone());
        // The next pass starts at once.
        self.not_before = Some(Timestamp::now());
    }

    fn job_ended(&mut self, result: Result<(), Vec<ApplyError>>) {
        match result {
            Ok(()) => {
                self.failures = 0;
                self.not_before = None;
            }
            Err(errors) => {
                for error in errors {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(uid = self.uid, error, "cannot sync a pod");
                }
                self.back_off();
            }
        }
    }

    fn back_off(&mut self) {
        let seconds = ERROR_BACKOFF[self.failures.min(ERROR_BACKOFF.len() - 1)];
        self.failures += 1;
        self.not_before = Timestamp::now().checked_add(SignedDuration::from_secs(seconds)).ok();
    }

    /// Sends the status if it differs from the last sent status, or from the status in the API.
    fn report_status(&mut self, desired: &DesiredPod, plan: &Plan, now: Timestamp) {
        let DesiredPod::Run(pod) = desired else { return };
        let api = pod.status.clone().unwrap_or_default();
        let is_over = matches!(api.phase.as_deref(), Some("Failed" | "Succeeded"));
        let holds_resources = self.node.dra.holds(&self.uid)
            || self.node.devices.holds(&self.uid)
            || (!is_over && self.node.managers.holds(&self.uid));
        let input = status::StatusInput {
            pod,
            observed: &self.observed,
            state: &self.state,
            last: self.reported.as_deref().or(self.is_in_api.then_some(&api)),
            host_ips: &self.node.host_ips(),
            runtime_name: &self.node.runtime_name,
            now,
            finished: !self.observed.alive() && self.has_ended(desired, plan) && !holds_resources,
            holds_resources,
        };
        // The final status of an ended pod is in the API already, and its containers here may have been removed.
        if is_over && input.finished {
            return;
        }
        let mut status = status::status(&input);
        self.node.devices.report_health(&self.uid, &mut status);
        self.node.dra.report_health(pod, &mut status);
        self.count_start(pod, &status);
        self.count_terminations(&api, &status);
        let is_attached = self.observed.sandbox().is_some_and(|sandbox| !sandbox.ips.is_empty());
        self.node.services.report_pod(&LocalPod::of(&self.uid, pod, &status, is_attached));
        let known =
            self.reported.as_deref().filter(|reported| !status::is_overruled(reported, &api)).unwrap_or(&api);
        if api == status {
            self.node.pods.report(&self.uid, None);
        } else if self.reported.as_deref() != Some(&status) {
            self.node.pods.report(&self.uid, Some(status.clone()));
        }
        // The status in the API counts only if no other status was sent since. Such a status is still being written.
        if api == status && self.reported.as_deref().is_none_or(|reported| *reported == status) {
            (self.reported, self.is_in_api) = (None, true);
            return;
        }
        if *known == status {
            self.reported = Some(Box::new(status));
            return;
        }
        let change = StatusChange { known: known.clone(), status, delete: false };
        self.send(pod, change);
    }

    fn send(&mut self, pod: &Pod, change: StatusChange) {
        let meta = &pod.metadata;
        self.node.statuses.send(Update {
            uid: self.uid.clone(),
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            known: change.known,
            status: change.status.clone(),
            delete: change.delete,
            since: tokio::time::Instant::now(),
        });
        self.reported = Some(Box::new(change.status));
    }

    /// Whether the pod has ended for good, by its containers or by the plan.
    fn has_ended(&self, desired: &DesiredPod, plan: &Plan) -> bool {
        let now = Timestamp::now();
        let input = plan::PlanInput { desired, observed: &self.observed, state: &self.state, now };
        let ended = desired
            .pod()
            .spec
            .as_ref()
            .is_some_and(|spec| plan::ended(desired.pod(), &super::state::Shape::of(spec), &input));
        ended || plan.actions.contains(&Action::Finish)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_waiting_worker_takes_little_memory() {
        fn size<A, F: Future>(_: impl Fn(A) -> F) -> usize {
            size_of::<F>()
        }
        let size = size(run);
        assert!(size <= 4096, "each pod has a worker of {size} bytes");
    }
}
