//! Errors of volumes. Their texts are the same as in the kubelet's events.

use std::io;
use std::path::{Path, PathBuf};

use coracle_cri::blocking::Blocked;

use super::downward::FieldError;

/// The reason why a volume is not available. [`VolumeError::event`] has the text of the event.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The pod has no uid or namespace yet.
    #[error("pod has no uid or no namespace")]
    NoIdentity,
    /// The name is not usable as a directory's name.
    #[error("volume name {0:?} is not allowed")]
    Name(String),
    /// The volume's type is not supported.
    #[error(
        "MountVolume.SetUp failed for volume \"{volume}\" : volume type {kind} is not supported by this node"
    )]
    Unsupported {
        /// Name of the volume.
        volume: String,
        /// Name of the field that is set.
        kind: &'static str,
    },
    /// A volume cannot be created.
    #[error("MountVolume.SetUp failed for volume \"{volume}\" : {}", coracle_error_chain::chain(reason))]
    SetUp {
        /// Name of the volume.
        volume: String,
        /// Cause.
        reason: SetUpError,
    },
    /// The claim of a volume cannot be used.
    #[error(
        "Unable to attach or mount volumes: unmounted volumes=[{volume}]: error processing PVC {claim}: {reason}"
    )]
    Claim {
        /// Name of the volume.
        volume: String,
        /// Namespace and name of the claim.
        claim: String,
        /// Cause.
        reason: String,
    },
    /// The directory of all volumes cannot be prepared.
    #[error("cannot prepare {path}")]
    Prepare {
        /// The directory.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// Volumes of a removed pod cannot be removed.
    #[error("cannot remove {path}")]
    Remove {
        /// The directory.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
}

/// The reason why one volume cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    /// The object does not exist.
    #[error("{kind} {name:?} not found")]
    NotFound {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// Name of the object.
        name: String,
    },
    /// The object does not have the key.
    #[error("{}references non-existent {} key: {key}", if *kind == "secret" { "" } else { "configmap " }, if *kind == "secret" { "secret" } else { "config" })]
    NoKey {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// The key.
        key: String,
    },
    /// The API server did not respond.
    #[error("failed to get {kind} {name:?}: {reason}")]
    Unavailable {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// Name of the object.
        name: String,
        /// The client's error with all causes.
        reason: String,
    },
    /// The files of the pod's volumes take too much memory.
    #[error(
        "files of config maps, secrets, tokens and the downward API take more than {mebibytes} MiB in this pod"
    )]
    TooLarge {
        /// The limit.
        mebibytes: usize,
    },
    /// The files of all pods of the namespace take too much of the node's memory for such files.
    #[error(
        "files of config maps, secrets, tokens and the downward API of this namespace's pods take more than their \
         share of the node's memory for such files; remove pods or make the files smaller"
    )]
    NamespaceTooLarge,
    /// The path of a file has too many directories.
    #[error("the path of a file has more than {most} names")]
    TooDeep {
        /// The limit.
        most: usize,
    },
    /// The API server did not issue a token.
    #[error("failed to fetch token: {0}")]
    Token(String),
    /// The path of an item leads out of the volume.
    #[error("invalid path {0:?}: must be relative and must not contain \"..\"")]
    Path(String),
    /// The downward API does not have the field.
    #[error(transparent)]
    Field(#[from] FieldError),
    /// The host path has another type.
    #[error("hostPath type check failed: {path} is not {wanted}")]
    HostPathType {
        /// The host path.
        path: String,
        /// The required type.
        wanted: &'static str,
    },
    /// A local volume cannot be used.
    #[error("local volume: {0}")]
    Local(String),
    /// Another pod of the node uses a volume that only one pod may use.
    #[error("volume uses the ReadWriteOncePod access mode and is already in use by another pod")]
    InUse,
    /// The type of the volume has no mount options.
    #[error("mount options are not supported for this volume type")]
    NoMountOptions,
    /// An NFS export cannot be mounted.
    #[error("cannot mount {export}: {reason}")]
    Nfs {
        /// Server and path.
        export: String,
        /// Cause.
        reason: String,
    },
    /// The file system of a path does not respond.
    #[error("cannot access {path}")]
    Blocked {
        /// The path.
        path: PathBuf,
        /// Cause.
        #[source]
        source: Blocked,
    },
    /// A system call failed.
    #[error("cannot {what} {path}")]
    Io {
        /// The operation.
        what: &'static str,
        /// The path.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
}

// === impl VolumeError ===

impl VolumeError {
    /// Reason and message of the pod's event.
    pub fn event(&self) -> (&'static str, String) {
        ("FailedMount", coracle_error_chain::chain(self))
    }
}

// === impl SetUpError ===

impl SetUpError {
    /// Whether the files of the volume are above a limit of the node.
    pub(super) fn is_limit(&self) -> bool {
        matches!(self, Self::TooLarge { .. } | Self::NamespaceTooLarge | Self::TooDeep { .. })
    }

    pub(super) fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SetUpError {
        let path = path.to_owned();
        move |source| SetUpError::Io { what, path, source }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_has_the_cause() {
        let failed = SetUpError::io("write", Path::new("/x"))(io::Error::other("no space"));
        let error = VolumeError::SetUp { volume: "v".to_owned(), reason: failed };
        let text = "MountVolume.SetUp failed for volume \"v\" : cannot write /x: no space";
        assert_eq!(error.event(), ("FailedMount", text.to_owned()));
    }
}
