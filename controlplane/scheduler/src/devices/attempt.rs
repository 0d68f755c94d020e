//! The common work limit of all device searches in one attempt to schedule a pod or a gang. The searches of the filters
//! (with and without nominated pods) and of the preemption share it.

use std::sync::Arc;

use super::Devices;
use super::allocate::Work;

impl Devices {
    /// Starts an attempt for this number of pods in a cluster with this number of nodes. Its searches share one limit
    /// until [`Self::end_attempt`].
    pub(crate) fn start_attempt(&self, pods: usize, nodes: usize) {
        let mut state = self.lock();
        // The limit for one pod does not depend on the devices.
        let visits = if pods > 1 { state.slices.visits(nodes) } else { 0 };
        state.attempt = Some(Arc::new(Work::of_pods(pods, visits)));
    }

    /// Ends the attempt.
    pub(crate) fn end_attempt(&self) {
        self.lock().attempt = None;
    }
}
