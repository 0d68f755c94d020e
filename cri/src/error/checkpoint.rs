//! Errors of a checkpoint.

use std::io;
use std::path::{Path, PathBuf};

/// Errors of a dump by CRIU.
#[derive(Debug, thiserror::Error)]
pub enum CriuError {
    /// CRIU is not installed on this machine.
    #[error("CRIU is not installed")]
    Absent,
    /// CRIU could not be executed.
    #[error("cannot run criu")]
    Run(#[source] io::Error),
    /// The container's mounts could not be read.
    #[error("cannot read the container's mounts")]
    Mounts(#[source] io::Error),
    /// CRIU would parse the mount point as another path.
    #[error("criu cannot parse the mount point {0:?}, because it contains \"]:\"")]
    MountPoint(PathBuf),
    /// CRIU failed, with its error messages.
    #[error("criu failed: {0}")]
    Failed(String),
}

/// Errors of a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// CRIU failed.
    #[error("cannot dump the processes")]
    Criu(#[from] CriuError),
    /// A file could not be read or written.
    #[error("cannot {doing} {}", path.display())]
    File {
        /// The operation.
        doing: &'static str,
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A container could not be frozen.
    #[error("cannot freeze container {id}")]
    Freeze {
        /// The container's id.
        id: String,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// A container of the pod could not be dumped.
    #[error("cannot checkpoint container {id}")]
    Container {
        /// The container's id.
        id: String,
        /// The cause.
        #[source]
        source: Box<CheckpointError>,
    },
    /// A container was killed during its checkpoint.
    #[error("container {id} is being stopped")]
    BeingStopped {
        /// The container's id.
        id: String,
    },
    /// The file is not a checkpoint, or is damaged.
    #[error("{path:?} {why}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The defect.
        why: String,
    },
}

// === impl CheckpointError ===

impl CheckpointError {
    /// Whether CRIU is not installed.
    pub(crate) fn lacks_criu(&self) -> bool {
        match self {
            Self::Criu(error) => matches!(error, CriuError::Absent),
            Self::Container { source, .. } => source.lacks_criu(),
            Self::File { .. } | Self::Freeze { .. } | Self::BeingStopped { .. } | Self::Damaged { .. } => {
                false
            }
        }
    }
}

/// Converts an error of a file operation, for `map_err`.
pub(crate) fn file(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let path = path.to_owned();
    move |source| CheckpointError::File { doing, path, source }
}
