//! Resizes of the worker's pod: accepted by pod sync, applied by jobs, reported as conditions and events.

use k8s_openapi::jiff::Timestamp;

use super::Worker;
use crate::event_recorder::Level;
use crate::pod::resize::{event_message, is_resizing};
use crate::pod::resize_state::InProgress;
use crate::pod::state::{DesiredPod, RESIZE};

impl Worker {
    /// Takes the decisions of pod sync, and completes a resize that is applied to all containers.
    pub(super) fn follow_resize(&mut self, desired: &DesiredPod) {
        let pod = desired.pod();
        let (resizes, resize) = (&self.node.resizes, &mut self.state.resize);
        if !self.state.prepared {
            resize.adopt(pod, &self.observed, self.node.machine);
        }
        resize.pending = resizes.pending(&self.uid);
        if let Some(accepted) = resizes.take_accepted(&self.uid, pod) {
            if resize.pod_before.is_none() {
                let reported = self.reported.as_deref().or(pod.status.as_ref());
                resize.pod_before = reported.and_then(|status| status.resources.clone()).map(Box::new);
            }
            // A new resize clears the error of the previous resize.
            resize.in_progress =
                Some(InProgress { generation: accepted.pod.metadata.generation, error: None });
            resize.is_cgroup_due = true;
            self.state.pod_retries.clear(RESIZE);
        }
        if is_resizing(pod, &self.observed, resize) {
            let generation = pod.metadata.generation;
            resize.in_progress.get_or_insert(InProgress { generation, error: None });
        } else if let Some(done) = resize.in_progress.take() {
            resize.pod_before = None;
            let message = event_message("Pod resize completed", pod, done.generation, None);
            self.node.recorder.pod(pod, Level::Normal, "ResizeCompleted", message);
        }
    }

    pub(super) fn resize_failed(&mut self, message: String) {
        let now = Timestamp::now();
        self.state.pod_retries.fail(RESIZE, now, now);
        let desired = self.desired.borrow().clone();
        let pod = desired.pod();
        let generation = pod.metadata.generation;
        let progress = self.state.resize.in_progress.get_or_insert(InProgress { generation, error: None });
        if progress.error.as_ref() != Some(&message) {
            let text = event_message("Pod resize error", pod, progress.generation, Some(&message));
            self.node.recorder.pod(pod, Level::Warning, "ResizeError", text);
            progress.error = Some(message);
        }
    }
}
