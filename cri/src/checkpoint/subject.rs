//! The container that a checkpoint saves.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crate::cgroup::freezer::Freezer;
use crate::records::ContainerRecord;
use crate::shim_client::Shim;

/// A running container, and its directories.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) record: ContainerRecord,
    /// Its first process.
    pub(crate) pid: i32,
    /// The shim that holds its pod's namespaces.
    pub(crate) shim: Shim,
    pub(crate) bundle: PathBuf,
    /// Directory of its writable layer.
    pub(crate) layer: PathBuf,
    /// The name of its image.
    pub(crate) image: String,
    /// The directories of the image's layers, topmost first.
    pub(crate) lower: Vec<PathBuf>,
    /// Set before the container is killed.
    pub(crate) stopping: Arc<AtomicBool>,
    pub(crate) freezer: Freezer,
}

/// Handling of TCP connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Connections {
    /// The connections are saved in the checkpoint. They are blocked during the dump.
    Kept,
    /// The restore closes the connections, because a restored pod has another address. So they are not blocked during
    /// the dump.
    Ended,
}
