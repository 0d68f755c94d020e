//! Acceptance of resizes: a pod's worker gets the allocated resources, and the new resources when the node has room for
//! them.
//!
//! The desired pod of each worker has the allocated resources in its spec, and so has its record in the checkpoint.
//! The sums over pods and the admission of new pods count the allocated resources too.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::jiff::Timestamp;

use super::Sync;
use crate::cgroup::resources::pod_requests;
use crate::event_recorder::Level;
use crate::kubelet_metrics::{InfeasibleReason, RetryTrigger};
use crate::pod::resize::allocation::{
    Candidate, check_resize, condition, differs, infeasible, with_resources,
};
use crate::pod::resize::{event_message, requested_changes};
use crate::pod::state::{DesiredPod, has_ended};

/// A pod whose resources in the API are not accepted yet.
pub(super) struct PendingPod {
    /// The pod as it is in the API.
    pod: Arc<Pod>,
    /// Time at which the agent first observed the resize.
    since: Timestamp,
}

impl Sync {
    /// Gives a newer version of a pod to its worker, with the allocated resources.
    pub(super) fn follow(&mut self, uid: &str, pod: &Arc<Pod>) {
        let Some(handle) = self.handles.get(uid) else { return };
        let old = Arc::clone(handle.desired.borrow().pod());
        let is_alive = !has_ended(pod) && pod.metadata.deletion_timestamp.is_none();
        if !differs(pod, &old) {
            self.forget_resize(uid);
            self.replace(uid, &old, pod);
        } else if is_alive && !self.note_pending(uid, pod, &old) {
            self.replace(uid, &old, &Arc::new(with_resources(pod, &old)));
        } else if is_alive {
            // Evaluate the resize before the worker gets the pod: a status of the new generation must contain the
            // outcome.
            self.retry_resizes(RetryTrigger::PodResized);
            if self.pending.contains_key(uid) {
                let mut allocated = with_resources(pod, &old);
                if self.orphans.is_some() {
                    allocated.metadata.generation = old.metadata.generation;
                }
                self.replace(uid, &old, &Arc::new(allocated));
            }
        } else {
            self.forget_resize(uid);
            self.replace(uid, &old, &Arc::new(with_resources(pod, &old)));
        }
        if has_ended(pod) && !has_ended(&old) {
            self.retry_resizes(RetryTrigger::PodsRemoved);
        }
    }

    /// Records a pending resize. `allocated` is the pod with the resources that it has now. Returns whether the resize
    /// must be evaluated.
    fn note_pending(&mut self, uid: &str, pod: &Arc<Pod>, allocated: &Pod) -> bool {
        let metrics = &self.node.metrics.resizes;
        if let Some(known) = self.pending.get_mut(uid) {
            let is_new = known.pod.metadata.generation != pod.metadata.generation;
            if is_new {
                requested_changes(&known.pod, pod).into_iter().for_each(|change| metrics.requested(change));
            }
            known.pod = Arc::clone(pod);
            return is_new;
        }
        // An earlier agent may have evaluated the resize.
        let evaluated = condition(pod);
        if evaluated.is_none() {
            requested_changes(allocated, pod).into_iter().for_each(|change| metrics.requested(change));
        }
        let since = evaluated.as_ref().and_then(|(_, since)| *since).unwrap_or_else(Timestamp::now);
        if let Some((pending, _)) = evaluated {
            self.node.resizes.defer(uid, pending);
        }
        self.pending.insert(uid.to_owned(), PendingPod { pod: Arc::clone(pod), since });
        true
    }

    /// Removes a pending resize that was withdrawn, or whose pod has ended.
    pub(super) fn forget_resize(&mut self, uid: &str) {
        self.pending.remove(uid);
        self.node.resizes.remove(uid);
    }

    /// Evaluates all pending resizes, in upstream's order. An accepted resize can make room for resizes before it.
    pub(super) fn retry_resizes(&mut self, trigger: RetryTrigger) {
        if self.pending.is_empty() || self.orphans.is_some() {
            // Before all pods are received, the node may seem to have more room than it has.
            return;
        }
        while self.evaluate_all(trigger) {}
        self.update_cpu_weight();
    }

    /// Evaluates each pending resize once. Returns whether an accepted resize has freed resources.
    fn evaluate_all(&mut self, trigger: RetryTrigger) -> bool {
        let mut freed = false;
        for uid in self.in_order() {
            let (Some(pending), Some(handle)) = (self.pending.get(&uid), self.handles.get(&uid)) else {
                continue;
            };
            let (pod, old) = (Arc::clone(&pending.pod), Arc::clone(handle.desired.borrow().pod()));
            let wake = Arc::clone(&handle.wake);
            let used = self.inputs.pods.used_by_others(&uid).requested;
            let refused = self.node.managers.refuse_resize(&pod, &old);
            let detail = refused.map_or(InfeasibleReason::NodeAllocatable, |(detail, _)| detail);
            let checked = refused.map_or_else(
                || check_resize(&pod, &old, used, self.node.allocatable),
                |(_, message)| Err(infeasible(&pod, message)),
            );
            match checked {
                Ok(()) => {
                    self.pending.remove(&uid);
                    if self.node.resizes.pending(&uid).is_some_and(|pending| pending.reason == "Deferred") {
                        self.node.metrics.resizes.accepted_later(trigger);
                    }
                    let generation = pod.metadata.generation;
                    // Accept the resize first, so that the worker knows of it when it gets the new resources.
                    self.node.resizes.accept(&uid, &pod);
                    self.replace(&uid, &old, &pod);
                    let message = event_message("Pod resize started", &pod, generation, None);
                    self.node.recorder.pod(&pod, Level::Normal, "ResizeStarted", message);
                    let (new, old) = (pod_requests(&pod), pod_requests(&old));
                    freed |= new.cpu_millis < old.cpu_millis || new.memory < old.memory;
                }
                Err(pending) => {
                    let (reason, message) = (pending.reason, pending.message.clone());
                    let generation = pending.generation;
                    let is_new = self.node.resizes.defer(&uid, pending);
                    if old.metadata.generation != pod.metadata.generation {
                        self.replace(&uid, &old, &Arc::new(with_resources(&pod, &old)));
                    }
                    if !is_new {
                        continue;
                    }
                    if reason == "Infeasible" {
                        self.node.metrics.resizes.infeasible(detail);
                    }
                    let event = if reason == "Infeasible" { "ResizeInfeasible" } else { "ResizeDeferred" };
                    let prefix = format!("Pod resize {reason}");
                    let message = event_message(&prefix, &pod, generation, Some(&message));
                    self.node.recorder.pod(&pod, Level::Warning, event, message);
                }
            }
            wake.notify_one();
        }
        freed
    }

    fn in_order(&self) -> Vec<String> {
        let mut candidates: Vec<(Candidate, &String)> = self
            .pending
            .iter()
            .filter_map(|(uid, pending)| {
                let allocated = Arc::clone(self.handles.get(uid)?.desired.borrow().pod());
                Some((Candidate::of(&pending.pod, &allocated, pending.since), uid))
            })
            .collect();
        candidates.sort();
        candidates.into_iter().map(|(_, uid)| uid.clone()).collect()
    }

    /// Replaces the desired pod of a worker, its record and its share of the sums.
    fn replace(&self, uid: &str, old: &Pod, pod: &Arc<Pod>) {
        let Some(handle) = self.handles.get(uid) else { return };
        self.node.checkpoint.keep(old, pod);
        handle.desired.send_replace(DesiredPod::Run(Arc::clone(pod)));
        self.inputs.pods.put(uid, pod);
    }
}
