//! Preemption: other pods end so that a critical pod fits on the node. The critical pod starts after their end.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::api::core::v1::Pod;
use tokio::time::Instant;

use super::Sync;
use crate::event_recorder::Level;
use crate::pod::admit::{Shortage, preemption_failed};
use crate::pod::eviction::{Evicted, EvictionCause, grace};
use crate::pod::preemption::{OtherPods, select};
use crate::pod::resize::allocation::differs;
use crate::pod::state::{PREEMPTING, Verdict, has_ended};
use crate::source::is_static;

/// The message in the status and the event of a preempted pod. The text is upstream's.
const MESSAGE: &str = "Preempted in order to admit critical pod";
/// Minimum time to wait for the end of a preempted pod. The value is upstream's (`killPodNow`).
const MIN_WAIT: Duration = Duration::from_secs(10);
/// Maximum time to wait. Users choose the grace periods of their pods, and must not prevent the start of a critical
/// pod.
const MAX_WAIT: Duration = Duration::from_secs(600);

/// A pod without a worker.
#[derive(Clone)]
pub(super) struct NewPod {
    pub(super) pod: Arc<Pod>,
    /// Whether the pod is from the API server or a manifest, and not from the checkpoint.
    pub(super) from_api: bool,
}

/// The pods that must end before a critical pod starts.
pub(super) struct Preemption {
    pods: Vec<Arc<Pod>>,
    /// The first resource that the node lacks.
    resource: String,
}

/// A critical pod that waits for the end of other pods. Its CPUs and memory are allocated.
pub(super) struct Preemptor {
    new: NewPod,
    /// The uids of the other pods.
    preempted: Vec<String>,
    /// The pod starts at this time, even if the other pods have not ended.
    until: Instant,
}

impl Sync {
    /// The pods that must end so that the pod fits. None if the pod fits.
    ///
    /// # Errors
    /// The pod does not fit after the end of all pods that it may preempt.
    pub(super) fn preemption_for(
        &self,
        uid: &str,
        pod: &Pod,
        shortages: &[Shortage],
    ) -> Result<Option<Preemption>, Verdict> {
        let Some(first) = shortages.first() else { return Ok(None) };
        let preempted = self.node.evictions.preempted();
        let mut others = OtherPods::default();
        for other in self.inputs.pods.all() {
            let id = other.metadata.uid.clone().unwrap_or_default();
            if id == uid || !self.inputs.pods.is_counted(&id) {
                continue;
            }
            if preempted.contains(&id) || self.node.checkpoint.eviction(&id).is_some() {
                others.ending.push(other);
            } else if self.handles.contains_key(&id) || self.preemptors.contains_key(&id) {
                others.running.push(other);
            }
        }
        let selected = select(pod, &others, shortages);
        let mut pods = selected.map_err(|missing| {
            let missing: String = missing.iter().map(ToString::to_string).collect();
            preemption_failed(&missing)
        })?;
        // The pod also needs the resources of pods that end for another critical pod.
        let is_preempted =
            |other: &Arc<Pod>| other.metadata.uid.as_deref().is_some_and(|uid| preempted.contains(uid));
        pods.extend(others.ending.into_iter().filter(is_preempted));
        Ok((!pods.is_empty()).then(|| Preemption { pods, resource: first.name.clone() }))
    }

    /// Ends these pods. The critical pod starts when they have released their resources.
    pub(super) fn wait_for_preempted(&mut self, uid: String, new: NewPod, preemption: &Preemption) {
        let (mut preempted, mut longest) = (Vec::new(), MIN_WAIT);
        for pod in &preemption.pods {
            let Some(other) = pod.metadata.uid.clone() else { continue };
            let seconds = grace(pod, u32::MAX);
            longest = longest.max(wait(seconds));
            if self.node.evictions.preempted().add(&other) {
                tracing::info!(uid = other, preemptor = uid, "preempting a pod for a critical pod");
                self.node.metrics.endings.preempted(&preemption.resource);
                self.node.recorder.pod(pod, Level::Warning, PREEMPTING, MESSAGE);
                let cause = EvictionCause::Preemption;
                let evicted = Evicted { message: MESSAGE.to_owned(), cause, grace: seconds };
                self.node.evictions.request(&other, evicted);
                if let Some(waiting) = self.preemptors.remove(&other) {
                    // A critical pod of lower priority waits itself. As upstream, it is admitted and then ends.
                    self.begin(other.clone(), &waiting.new, true);
                }
            }
            preempted.push(other);
        }
        let until = Instant::now() + longest;
        self.preemptors.insert(uid, Preemptor { new, preempted, until });
    }

    /// Stores the newest version of a pod that waits for the end of other pods. Returns the pod if it does not wait, is
    /// deleted, or must be admitted again with other requests.
    pub(super) fn update_preemptor(&mut self, uid: &str, new: NewPod) -> Option<NewPod> {
        let Some(preemptor) = self.preemptors.get_mut(uid) else { return Some(new) };
        let is_ending = new.pod.metadata.deletion_timestamp.is_some() || has_ended(&new.pod);
        let is_resized = differs(&preemptor.new.pod, &new.pod);
        if !is_ending && !is_resized {
            preemptor.new = new;
            return None;
        }
        self.preemptors.remove(uid);
        if !is_ending {
            self.node.managers.release(uid);
        }
        Some(new)
    }

    /// Time at which the next critical pod starts, even if other pods have not ended.
    pub(super) fn preemption_due(&self) -> Option<Instant> {
        self.preemptors.values().map(|preemptor| preemptor.until).min()
    }

    /// Starts the critical pods for which the other pods have ended, or whose wait is over.
    pub(super) fn start_preemptors(&mut self) {
        let (now, preempted) = (Instant::now(), self.node.evictions.preempted());
        let is_over =
            |one: &Preemptor| one.until <= now || !one.preempted.iter().any(|uid| preempted.contains(uid));
        let due = self.preemptors.iter().filter(|(_, preemptor)| is_over(preemptor));
        let due: Vec<String> = due.map(|(uid, _)| uid.clone()).collect();
        for uid in due {
            if let Some(preemptor) = self.preemptors.remove(&uid) {
                self.begin(uid, &preemptor.new, true);
            }
        }
    }

    /// The waiting pods that are not among these pods of the API.
    pub(super) fn stale_preemptors(&self, uids: &HashSet<String>) -> Vec<(String, Arc<Pod>)> {
        let stale = self.preemptors.iter().filter(|(uid, _)| !uids.contains(*uid) && !is_static(uid));
        stale.map(|(uid, preemptor)| (uid.clone(), Arc::clone(&preemptor.new.pod))).collect()
    }
}

/// Time to wait for the end of a pod with this grace period in seconds: one and a half times the period, as upstream
/// (`killPodNow`), but at most [`MAX_WAIT`].
fn wait(grace: u32) -> Duration {
    let grace = Duration::from_secs(grace.into());
    (grace + grace / 2).clamp(MIN_WAIT, MAX_WAIT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_wait_for_a_preempted_pod_follows_its_grace_period() {
        assert_eq!([0, 4, 30, u32::MAX].map(|grace| wait(grace).as_secs()), [10, 10, 45, 600]);
    }
}
