//! One pod's task: looks, decides, does, tells; then sleeps until its wish changes, the runtime reports, a
//! probe finds something or a timer is due.

mod learn;
mod probing;

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use k8s_openapi::api::core::v1::PodStatus;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::Node;
use super::apply::{ApplyError, Job, Report};
use super::events::Level;
use super::observe::Cache;
use super::plan::{self, Action, Plan};
use super::probe::Finding;
use super::pull::PullTask;
use super::state::{Memory, Probed, Seen, Verdict, Wish};
use super::status::{self, write::Update};
use crate::volume::{self, Volumes};

/// How long to wait after the runtime did not answer, or an action failed without a back-off of its own.
const AFTER_ERROR: [i64; 7] = [1, 2, 4, 8, 16, 32, 60];

/// What a worker starts with.
pub(crate) struct Start {
    pub(crate) node: Arc<Node>,
    pub(crate) uid: String,
    pub(crate) wishes: watch::Receiver<Wish>,
    pub(crate) wake: Arc<Notify>,
    /// Set when the node refused the pod.
    pub(crate) verdict: Option<Verdict>,
}

type Running = Pin<Box<dyn Future<Output = Result<(), Vec<ApplyError>>> + Send>>;

struct Worker {
    node: Arc<Node>,
    uid: String,
    wishes: watch::Receiver<Wish>,
    memory: Memory,
    cache: Cache,
    seen: Seen,
    volumes: Option<Volumes>,
    pulls: HashMap<String, PullTask>,
    hooked: HashSet<String>,
    told: Option<PodStatus>,
    probes: probing::Probes,
    reports: (mpsc::UnboundedSender<Report>, mpsc::UnboundedReceiver<Report>),
    findings: (mpsc::UnboundedSender<Finding>, mpsc::UnboundedReceiver<Finding>),
    failures: usize,
    not_before: Option<Timestamp>,
    finished: bool,
}

/// An action run on its way.
struct Doing {
    running: Running,
    interrupt: CancellationToken,
    /// The grace period that it knows of, when it ends the pod.
    ending: Option<i64>,
}

/// Runs a pod until nothing is left of it. Dropping the future leaves the pod as it is.
pub(crate) async fn run(start: Start) {
    let mut worker = Worker::new(start);
    let wake = worker.1;
    let worker = &mut worker.0;
    let mut doing: Option<Doing> = None;
    while !worker.finished {
        let wish = worker.wishes.borrow_and_update().clone();
        let plan = worker.look_and_plan(&wish, doing.is_some()).await;
        worker.next(&wish, &plan, &mut doing);
        let due = [plan.wake, worker.not_before].into_iter().flatten().min();
        // Every arm may be dropped: channels and notifications keep what is not taken, and the job is kept.
        tokio::select! {
            done = async { match doing.as_mut() {
                Some(doing) => doing.running.as_mut().await,
                None => std::future::pending().await,
            } } => {
                doing = None;
                worker.done(done);
            }
            Some(report) = worker.reports.1.recv() => worker.learn(report),
            Some(finding) = worker.findings.1.recv() => worker.found(finding),
            changed = worker.wishes.changed() => match changed {
                Ok(()) => {
                    worker.not_before = None;
                    volume::follow(&worker.node.volumes, worker.wishes.borrow().pod());
                }
                Err(_gone) => return,
            },
            () = wake.notified() => {}
            () = sleep_until(due) => {}
        }
        worker.not_before = worker.not_before.filter(|at| *at > Timestamp::now());
        while let Ok(report) = worker.reports.1.try_recv() {
            worker.learn(report);
        }
    }
}

/// What an earlier agent's probes found; a container that is ready stays so until a probe says otherwise.
fn probed(status: Option<&PodStatus>) -> HashMap<String, Probed> {
    let statuses = status.into_iter().flat_map(|s| {
        s.init_container_statuses.iter().flatten().chain(s.container_statuses.iter().flatten())
    });
    statuses
        .filter_map(|s| {
            let id = s.container_id.as_deref()?.split_once("://")?.1.to_owned();
            Some((id, Probed { started: s.started == Some(true), ready: s.ready }))
        })
        .collect()
}

async fn sleep_until(due: Option<Timestamp>) {
    let Some(due) = due else { return std::future::pending().await };
    let left = std::time::Duration::try_from(due - Timestamp::now()).unwrap_or_default();
    // A timer must not fire a hair early, or the plan would find nothing due.
    tokio::time::sleep(left + std::time::Duration::from_millis(2)).await;
}

impl Worker {
    fn new(start: Start) -> (Self, Arc<Notify>) {
        let wish = start.wishes.borrow().clone();
        let status = wish.pod().status.as_ref();
        let started = status.and_then(|s| s.start_time.as_ref()).map(|t| t.0);
        let now = Timestamp::now();
        let memory = Memory {
            start_time: Some(started.unwrap_or(Timestamp::from_second(now.as_second()).unwrap_or(now))),
            verdict: start.verdict,
            probed: probed(status),
            ..Memory::default()
        };
        let worker = Self {
            node: start.node,
            uid: start.uid,
            wishes: start.wishes,
            memory,
            cache: Cache::default(),
            seen: Seen::default(),
            volumes: None,
            pulls: HashMap::new(),
            hooked: HashSet::new(),
            told: None,
            probes: probing::Probes::default(),
            reports: mpsc::unbounded_channel(),
            findings: mpsc::unbounded_channel(),
            failures: 0,
            not_before: None,
            finished: false,
        };
        (worker, start.wake)
    }

    /// Looks at the runtime, decides, and tells the API what is the case.
    async fn look_and_plan(&mut self, wish: &Wish, busy: bool) -> Plan {
        match self.cache.look(&*self.node.runtime, &self.uid).await {
            Ok(seen) => self.seen = seen,
            Err(status) => {
                tracing::warn!(uid = self.uid, error = status.message(), "the runtime does not answer");
                self.pause();
                return Plan::default();
            }
        }
        self.forget_the_absent();
        let now = Timestamp::now();
        let facts = plan::Facts { wish, seen: &self.seen, memory: &self.memory, now };
        let plan = plan::plan(&facts);
        if !busy {
            self.note_waiting(wish, &plan);
        }
        self.tell(wish, &plan, now);
        self.probes.follow(&self.node, wish, (&self.seen, &self.memory.probed), &self.findings.0);
        plan
    }

    /// Starts what was planned, or lets what runs know that the wish has changed.
    fn next(&mut self, wish: &Wish, plan: &Plan, doing: &mut Option<Doing>) {
        let ending = wish.ending();
        if let Some(doing) = doing {
            let faster = match (ending, doing.ending) {
                (Some(_), None) => true,
                (Some(now), Some(before)) => now < before,
                (None, _) => false,
            };
            if faster {
                doing.ending = ending;
                doing.interrupt.cancel();
            }
            return;
        }
        for action in &plan.actions {
            if let Action::Condemn(verdict) = action {
                self.node.recorder.pod(
                    wish.pod(),
                    Level::Normal,
                    "DeadlineExceeded",
                    verdict.message.clone(),
                );
                self.memory.verdict = Some(verdict.clone());
                // Looks again at once, with the verdict in mind.
                self.not_before = Some(Timestamp::now());
                return;
            }
        }
        if plan.actions.is_empty() || self.not_before.is_some() {
            return;
        }
        let interrupt = CancellationToken::new();
        let job = Job {
            node: Arc::clone(&self.node),
            pod: Arc::clone(wish.pod()),
            uid: self.uid.clone(),
            seen: self.seen.clone(),
            volumes: self.volumes.clone(),
            pulls: std::mem::take(&mut self.pulls),
            hooked: self.hooked.clone(),
            reports: self.reports.0.clone(),
            interrupt: interrupt.clone(),
        };
        let running = Box::pin(job.run(plan.actions.clone()));
        *doing = Some(Doing { running, interrupt, ending });
    }

    fn done(&mut self, result: Result<(), Vec<ApplyError>>) {
        match result {
            Ok(()) => {
                self.failures = 0;
                self.not_before = None;
            }
            Err(errors) => {
                for error in errors {
                    let error = &error as &dyn std::error::Error;
                    tracing::warn!(uid = self.uid, error, "pod sync");
                }
                self.pause();
            }
        }
    }

    fn pause(&mut self) {
        let seconds = AFTER_ERROR[self.failures.min(AFTER_ERROR.len() - 1)];
        self.failures += 1;
        self.not_before = Timestamp::now().checked_add(SignedDuration::from_secs(seconds)).ok();
    }

    /// Sends the status when it differs from what was told last (or from what the API has).
    fn tell(&mut self, wish: &Wish, plan: &Plan, now: Timestamp) {
        let Wish::Run(pod) = wish else { return };
        let api = pod.status.clone().unwrap_or_default();
        let over = matches!(api.phase.as_deref(), Some("Failed" | "Succeeded"));
        let facts = status::Facts {
            pod,
            seen: &self.seen,
            memory: &self.memory,
            last: self.told.as_ref(),
            host_ips: &self.node.host_ips(),
            now,
            finished: !self.seen.alive() && self.over(wish, plan),
        };
        // What an ended pod was is already told; its traces here may be gone.
        if over && facts.finished {
            return;
        }
        let status = status::status(&facts);
        let known = self.told.as_ref().filter(|told| !status::is_overruled(told, &api)).unwrap_or(&api);
        if api == status {
            self.node.pods.report(&self.uid, None);
        } else if self.told.as_ref() != Some(&status) {
            self.node.pods.report(&self.uid, Some(status.clone()));
        }
        if *known == status {
            self.told = Some(status);
            return;
        }
        self.send(pod, known.clone(), (status, false));
    }

    fn send(
        &mut self,
        pod: &k8s_openapi::api::core::v1::Pod,
        known: PodStatus,
        (status, delete): (PodStatus, bool),
    ) {
        let meta = &pod.metadata;
        self.node.statuses.send(Update {
            uid: self.uid.clone(),
            namespace: meta.namespace.clone().unwrap_or_default(),
            name: meta.name.clone().unwrap_or_default(),
            known,
            status: status.clone(),
            delete,
        });
        self.told = Some(status);
    }

    fn over(&self, wish: &Wish, plan: &Plan) -> bool {
        let now = Timestamp::now();
        let facts = plan::Facts { wish, seen: &self.seen, memory: &self.memory, now };
        let ended = wish
            .pod()
            .spec
            .as_ref()
            .is_some_and(|spec| plan::ended(wish.pod(), &super::state::Shape::of(spec), &facts));
        ended || plan.actions.contains(&Action::Finish)
    }
}
