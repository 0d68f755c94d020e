//! Errors of unpacking, and their kinds.

use std::io;

use nix::errno::Errno;

use crate::archive::ArchiveError;
use crate::error::{ErrorKind, errno_kind};

/// Errors of unpacking a layer.
#[derive(Debug, thiserror::Error)]
pub(crate) enum UnpackError {
    #[error("cannot read the layer")]
    Archive(#[source] ArchiveError),
    #[error("cannot read the layer to its end")]
    Read(#[source] io::Error),
    #[error("the layer is refused: {path:?} leads out of the image")]
    Escape { path: String },
    #[error("the layer is refused: {0}")]
    TooLarge(#[source] TooLarge),
    #[error("the layer is refused: the whiteout {path:?} has an invalid name")]
    WhiteoutName { path: String },
    #[error("the layer is refused: the device {path:?} would act as a whiteout")]
    WhiteoutDevice { path: String },
    #[error(
        "the layer is refused: the device {path:?} has the number {major}:{minor}, which Linux does not have"
    )]
    DeviceNumber { path: String, major: u32, minor: u32 },
    #[error("the layer is refused: the link {path:?} leads to {target:?}, which cannot be linked")]
    LinkTarget { path: String, target: String },
    #[error(
        "the layer is refused: the link {path:?} leads to {target:?}, which comes only later in the layer"
    )]
    LinkOrder { path: String, target: String },
    #[error(
        "the attribute {name} of {path:?}, {bytes} bytes long, does not fit into a file of this file system"
    )]
    Attribute { path: String, name: String, bytes: usize },
    #[error("cannot write {path:?} of the layer")]
    Write {
        path: String,
        #[source]
        source: Errno,
    },
}

/// The limit that a layer exceeded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TooLarge {
    #[error("it unpacks to more than {0} bytes")]
    Bytes(u64),
    #[error("it has more than {0} entries")]
    Entries(u64),
    #[error("it unpacks to more than {0} times its size, like a decompression bomb")]
    Ratio(u64),
    #[error("its zstd window has more than {0} bytes")]
    Window(u64),
    #[error("its sparse files are larger than {0} bytes")]
    Sparse(u64),
    #[error("the names of its directories and links take more than {0} bytes")]
    Names(u64),
    #[error("it has names or paths that are too long")]
    Path,
}

// === impl UnpackError ===

impl UnpackError {
    /// The kind of this error.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            UnpackError::Archive(_) | UnpackError::Read(_) => ErrorKind::Corrupt,
            UnpackError::Escape { .. }
            | UnpackError::TooLarge(_)
            | UnpackError::WhiteoutName { .. }
            | UnpackError::WhiteoutDevice { .. }
            | UnpackError::DeviceNumber { .. }
            | UnpackError::LinkTarget { .. }
            | UnpackError::LinkOrder { .. } => ErrorKind::Rejected,
            UnpackError::Attribute { .. } => ErrorKind::Unsupported,
            UnpackError::Write { source, .. } => write_kind(*source),
        }
    }
}

/// The kind of a failure to make a file of a layer.
pub(super) fn write_kind(errno: Errno) -> ErrorKind {
    match errno {
        // Names and links that no file system accepts.
        Errno::ENAMETOOLONG | Errno::ENOTDIR | Errno::ELOOP | Errno::EINVAL | Errno::EEXIST => {
            ErrorKind::Rejected
        }
        other => errno_kind(other),
    }
}
