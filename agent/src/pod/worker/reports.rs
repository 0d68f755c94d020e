//! Applies the reports of jobs and probes to the worker's state.

use std::collections::{BTreeMap, HashSet};
use std::net::IpAddr;

use k8s_openapi::jiff::Timestamp;

use super::policies::AwaitedPolicies;
use super::{StatusChange, Worker};
use crate::event_recorder::{ContainerRef, Level};
use crate::pod::admit;
use crate::pod::apply::Report;
use crate::pod::plan::{Action, Plan};
use crate::pod::probe::Finding;
use crate::pod::restart::{self, stops::Stops};
use crate::pod::state::{DesiredPod, Failed, KillRequest, RESIZE, SANDBOX, Shape, VOLUMES, Verdict};
use crate::volume;

impl Worker {
    /// Called after the first observation. If an earlier agent has made the sandbox, this gives the sandbox's addresses
    /// to the network policies.
    pub(super) fn note_earlier_sandbox(&mut self, desired: &DesiredPod) {
        if std::mem::replace(&mut self.was_observed, true) {
            return;
        }
        let Some(sandbox) = self.observed.sandbox() else { return };
        let ips: Vec<IpAddr> = sandbox.ips.iter().filter_map(|ip| ip.parse().ok()).collect();
        if !ips.is_empty() {
            self.node.policies.note_running(desired.pod(), &ips);
        }
    }

    pub(super) fn apply_report(&mut self, report: Report) {
        let now = Timestamp::now();
        match report {
            Report::Prepared(volumes) => {
                self.volumes = Some(volumes);
                self.state.prepared = true;
                self.state.pod_retries.clear(VOLUMES);
                // The pod may have changed while its volumes were made.
                volume::follow(&self.node.volumes, self.desired.borrow().pod());
            }
            Report::NotPrepared(what) => self.state.pod_retries.fail(what, now, now),
            Report::SandboxMade => self.state.pod_retries.clear(SANDBOX),
            Report::Pulling { container, pull } => {
                self.pulls.insert(container, pull);
            }
            Report::NotStarted { container, waiting, failed } => {
                match failed {
                    Failed::Pull { image } => self.state.pulls.fail(&image, now, now),
                    Failed::Start => self.state.retries.fail(&container, now, now),
                    Failed::Run => {
                        self.state.crashes.fail(&container, now, now);
                        self.state.retries.fail(&container, now, now);
                    }
                }
                self.state.waiting.insert(container, waiting);
            }
            Report::PoliciesAwaited { containers, pending } => {
                self.awaited = Some(Box::new(AwaitedPolicies { containers, pending }));
            }
            Report::Started { container, crashed } => self.started(&container, crashed, now),
            Report::Removing(removed) => self.state.removed.extend(removed),
            Report::AllRemoved => self.state.count_restart_of_all(now),
            Report::PostStartFailed { id } => {
                let why = "FailedPostStartHook".to_owned();
                self.state.kill_requests.insert(id, KillRequest { why, grace: None, restarts: false });
            }
            Report::PreStopDone { id } => {
                self.pre_stop_done.insert(id);
            }
            Report::Resized { id, resources } => drop(self.state.resize.actuated.insert(id, resources)),
            Report::ResizeDone { generation } => {
                self.state.pod_retries.clear(RESIZE);
                let resize = &mut self.state.resize;
                // Another resize may have been accepted meanwhile.
                resize.is_cgroup_due &=
                    resize.in_progress.as_ref().is_some_and(|p| p.generation > generation);
            }
            Report::ResizeFailed { message } => self.resize_failed(message),
            Report::Rejected(verdict) => self.reject(verdict),
            Report::Stopped { sandbox } => drop(self.state.stopped.insert(sandbox)),
            Report::Released => {
                self.state.released = true;
                self.node.evictions.preempted().release(&self.uid);
            }
            Report::Finished => self.finish(),
        }
    }

    /// Rejects the pod because its devices cannot be allocated.
    fn reject(&mut self, verdict: Verdict) {
        if self.state.verdict.is_some() {
            return;
        }
        let (reason, message) = admit::rejection_event(&verdict);
        self.node.metrics.rejected(reason);
        self.node.recorder.pod(self.desired.borrow().pod(), Level::Warning, reason, message);
        self.state.verdict = Some(verdict);
    }

    fn started(&mut self, container: &str, crashed: Option<Timestamp>, now: Timestamp) {
        self.state.waiting.remove(container);
        self.state.retries.clear(container);
        let desired = self.desired.borrow().clone();
        let spec = desired.pod().spec.as_ref();
        let image = spec.and_then(|s| Shape::of(s).any(container)).and_then(|c| c.image.clone());
        self.state.pulls.clear(&image.unwrap_or_default());
        if let Some(crashed) = crashed {
            self.state.crashes.fail(container, crashed, now);
        }
    }

    pub(super) fn apply_finding(&mut self, finding: Finding) {
        match finding {
            Finding::Started { id } => self.state.probed.entry(id).or_default().started = true,
            Finding::Ready { id, ready } => self.state.probed.entry(id).or_default().ready = ready,
            Finding::Unhealthy { id, why, grace } => {
                let request = KillRequest { why: why.to_owned(), grace, restarts: true };
                self.state.kill_requests.insert(id, request);
            }
        }
    }

    /// Stores why containers wait, and records an event for each new reason.
    pub(super) fn record_waiting(&mut self, desired: &DesiredPod, plan: &Plan) {
        for (container, waiting) in &plan.waiting {
            if self.state.waiting.get(container) == Some(waiting) {
                continue;
            }
            let recorder = &self.node.recorder;
            let about = ContainerRef { pod: desired.pod(), name: container };
            match waiting.reason.as_str() {
                "CrashLoopBackOff" => {
                    let meta = &desired.pod().metadata;
                    let text = |s: &Option<String>| s.clone().unwrap_or_default();
                    let message = format!(
                        "Back-off restarting failed container {container} in pod {}_{}({})",
                        text(&meta.name),
                        text(&meta.namespace),
                        text(&meta.uid)
                    );
                    recorder.container(about, Level::Warning, "BackOff", message);
                }
                "ImagePullBackOff" => {
                    let spec = desired.pod().spec.as_ref();
                    let image = spec.and_then(|s| Shape::of(s).any(container)).and_then(|c| c.image.clone());
                    let message = format!("Back-off pulling image \"{}\"", image.unwrap_or_default());
                    recorder.container(about, Level::Normal, "BackOff", message);
                    recorder.container(about, Level::Warning, "Failed", "Error: ImagePullBackOff");
                }
                _ => {}
            }
            self.state.waiting.insert(container.clone(), waiting.clone());
        }
    }

    /// Records the containers that a plan stops, for an agent that starts after their stop.
    pub(super) fn record_stops(&self, plan: &Plan) {
        let mut actions = plan.actions.iter();
        if !actions.any(|action| matches!(action, Action::Stop { .. })) || !self.state.has_stops() {
            return;
        }
        let stops = Stops {
            kill_requests: self.state.kill_requests.clone(),
            redefined: self.state.redefined.clone(),
            resized: self.state.resize.restarts.clone(),
        };
        if let Err(error) = restart::stops::write(&self.node.volumes.pod_dir(&self.uid), &stops) {
            tracing::warn!(uid = self.uid, %error, "cannot record the containers to stop");
        }
    }

    /// Drops the state of containers that the runtime has removed, and the waiting reasons of containers that run.
    pub(super) fn forget_removed_containers(&mut self) {
        let here: HashSet<&str> = self.observed.containers.iter().map(|c| c.id.as_str()).collect();
        self.state.probed.retain(|id, _| here.contains(id.as_str()));
        let had_stops = self.state.has_stops();
        self.state.kill_requests.retain(|id, _| here.contains(id.as_str()));
        self.state.redefined.retain(|id| here.contains(id.as_str()));
        self.state.resize.restarts.retain(|id| here.contains(id.as_str()));
        if had_stops && !self.state.has_stops() {
            restart::stops::remove(&self.node.volumes.pod_dir(&self.uid));
        }
        self.pre_stop_done.retain(|id| here.contains(id.as_str()));
        self.state.resize.actuated.retain(|id, _| here.contains(id.as_str()));
        let observed = &self.observed;
        let was_restarting = !self.state.removed.is_empty();
        restart::forget_created(&mut self.state.removed, observed);
        if was_restarting && self.state.removed.is_empty() {
            restart::record::remove(&self.node.volumes.pod_dir(&self.uid));
        }
        self.state.waiting.retain(|name, _| !observed.current(name).is_some_and(|c| c.running()));
        if self.state.waiting.is_empty() {
            // An emptied `BTreeMap` keeps one node, which has 800 bytes for this type.
            self.state.waiting = BTreeMap::new();
        }
    }

    /// Ends the worker: sends the final status and lets the API delete the object.
    fn finish(&mut self) {
        self.finished = true;
        let desired = self.desired.borrow().clone();
        let DesiredPod::Run(pod) = &desired else { return };
        let known = self.reported.as_deref().cloned().or_else(|| pod.status.clone()).unwrap_or_default();
        self.send(pod, StatusChange { known: known.clone(), status: known, delete: true });
    }
}
