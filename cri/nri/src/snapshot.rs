//! The existing pods and containers, which a plugin gets when it joins.

use coracle_proto::nri::{Container, PodSandbox};

/// The existing pods and containers, for a plugin that joins.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    /// Every pod, and whether it runs.
    pub pods: Vec<(PodSandbox, PodState)>,
    /// Every container. Exited containers are not sent to plugins.
    pub containers: Vec<Container>,
}

/// Whether a pod runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PodState {
    /// The pod runs.
    Running,
    /// The pod was stopped.
    Stopped,
}
