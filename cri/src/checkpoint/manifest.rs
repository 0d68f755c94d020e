//! The manifest of a pod's checkpoint. It is written last: a directory with a manifest is complete.

use coracle_proto::cri;
use serde::{Deserialize, Serialize};

use crate::records::{RestoreRecord, message};

/// File name of the manifest.
pub(super) const FILE: &str = "checkpoint-manifest.json";
/// Maximum size of the manifest in bytes.
pub(super) const MAX: u64 = 16 << 20;
/// Producer of the format. Other producers use this file name for other formats.
pub(super) const ENGINE: &str = "coracle";
pub(super) const VERSION: u32 = 1;

/// The manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Manifest {
    pub(crate) version: u32,
    #[serde(rename = "runtime")]
    pub(crate) engine: String,
    pub(crate) runtime_handler: String,
    pub(crate) sandbox_id: String,
    #[serde(with = "message")]
    pub(crate) sandbox: cri::PodSandboxConfig,
    pub(crate) containers: Vec<SavedContainer>,
}

/// A container of the checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct SavedContainer {
    pub(crate) name: String,
    pub(crate) id: String,
    /// File with its processes and files, in the same directory.
    pub(crate) archive: String,
    pub(crate) sha256: String,
    pub(crate) image_id: String,
    #[serde(with = "message")]
    pub(crate) config: cri::ContainerConfig,
    pub(crate) restore: RestoreRecord,
}

/// The name of a container's archive.
pub(super) fn archive(id: &str) -> String {
    format!("{id}.tar")
}

/// A container's name in its pod.
pub(crate) fn name_of(config: &cri::ContainerConfig) -> &str {
    config.metadata.as_ref().map(|metadata| metadata.name.as_str()).unwrap_or_default()
}
