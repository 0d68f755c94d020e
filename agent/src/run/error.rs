//! Errors of the start of the agent.

use crate::cgroup::CgroupError;
use crate::checkpoint::CheckpointError;
use crate::node::NodeError;
use crate::pod;
use crate::resource_managers::ResourceManagerError;
use crate::runtime::RuntimeError;
use crate::server::ServerError;
use crate::volume::VolumeError;

/// The reason why the agent cannot start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The Node object cannot be described.
    #[error("cannot describe the node")]
    Node(#[source] NodeError),
    /// The cgroup tree of pods cannot be created.
    #[error("cannot prepare the cgroups of pods")]
    Cgroups(#[source] CgroupError),
    /// The managers of CPUs, memory and topology cannot start.
    #[error("cannot start the resource managers")]
    ResourceManagers(#[source] ResourceManagerError),
    /// The directories of volumes cannot be prepared.
    #[error("cannot prepare the volumes of pods")]
    Volumes(#[source] VolumeError),
    /// The checkpoint cannot be opened.
    #[error(transparent)]
    Checkpoint(CheckpointError),
    /// The credential providers cannot be used.
    #[error("cannot use the image credential providers")]
    CredentialProviders(#[source] pod::ProviderError),
    /// The kubelet API cannot be served.
    #[error(transparent)]
    Server(ServerError),
    /// The runtime did not respond.
    #[error("cannot ask the container runtime for its version")]
    Runtime(#[source] RuntimeError),
}
