//! Containers that a restart of all containers of their pod has removed.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// A container that was removed by a restart of all containers, until it runs again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Removed {
    /// Attempt of its next run.
    pub(crate) attempt: u32,
    /// The end of the container if it triggered the restart or had crashed before: its back-off counts from then.
    pub(crate) crashed: Option<Timestamp>,
}

/// Removed containers by their names.
pub(crate) type RemovedContainers = BTreeMap<String, Removed>;
