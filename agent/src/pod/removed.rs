//! Containers that a restart of all containers of their pod has removed.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A container that was removed by a restart of all containers, until it runs again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Removed {
    /// Attempt of its next run.
    pub(crate) attempt: u32,
    /// Exit time of the container, if this exit triggered the restart or was a crash. The back-off starts at this time.
    pub(crate) crashed: Option<Timestamp>,
}

/// Removed containers by their names.
pub(crate) type RemovedContainers = BTreeMap<String, Removed>;
