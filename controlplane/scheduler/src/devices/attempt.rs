//! The limit of all searches for devices in one attempt to schedule a pod or a gang: of the filters, also beside
//! nominated pods, and of the preemption.

use std::sync::Arc;

use super::Devices;
use super::allocate::Work;

impl Devices {
    /// Starts an attempt for this number of pods. Its searches share one limit until [`Self::end_attempt`].
    pub(crate) fn start_attempt(&self, pods: usize) {
        self.lock().attempt = Some(Arc::new(Work::of_pods(pods)));
    }

    /// Ends the attempt.
    pub(crate) fn end_attempt(&self) {
        self.lock().attempt = None;
    }
}
