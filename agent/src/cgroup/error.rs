//! Errors of pod cgroups.

use std::io;
use std::path::PathBuf;

/// Errors of pod cgroups.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No cgroup hierarchy is mounted.
    #[error(
        "no cgroup hierarchy is mounted; mount one, for example with `mount -t cgroup2 cgroup2 /sys/fs/cgroup`"
    )]
    NoHierarchy,
    /// A cgroup cannot be created.
    #[error("cannot create cgroup {path}")]
    Create {
        /// The cgroup, below the hierarchy's mount.
        path: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// A limit cannot be written.
    #[error("cannot write {value:?} to {path}")]
    Write {
        /// The cgroup file.
        path: PathBuf,
        /// The value.
        value: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// A cgroup cannot be removed.
    #[error("cannot remove cgroup {path}")]
    Remove {
        /// The cgroup's directory.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// systemd cannot create or remove a slice.
    #[error("cannot create or remove the slice {slice}")]
    Slice {
        /// Name of the slice.
        slice: String,
        /// Cause.
        #[source]
        source: coracle_systemd::Error,
    },
    /// The blocking task did not run to its end.
    #[error("the task for cgroups was interrupted")]
    Interrupted(#[source] tokio::task::JoinError),
    /// The pod has no uid, so it has no cgroup.
    #[error("pod {0} has no uid")]
    NoUid(String),
}
