//! NRI, the node resource interface: plugins that watch pods and containers come and go, and adjust
//! containers before they are made. The contract is github.com/containerd/nri's, version 0.13.
//!
//! ```text
//!   the runtime ──hooks──► Nri ──in the order of their indices──► plugins   (ttrpc over mux over a
//!       ▲                   │ adjust: merged, conflicts refused              unix socket each)
//!       └── Host ◄──────────┘ apply: onto the container's OCI spec
//! ```
//!
//! Start reading at [`Nri`], whose methods are the hooks. Invariants:
//! - without a plugin that wants an event, the event costs one atomic load: nothing is described;
//! - a plugin that does not answer in its time is dropped, and the runtime goes on without it;
//! - requests reach plugins one at a time, as upstream's adaptation sends them: plugins rely on it;
//! - no pod and no container is lost to a plugin that joins while they are made ([`Nri::pass`]);
//! - `adjust`, `apply` and `describe` are pure;
//! - knows NRI and the OCI, not the CRI.

pub mod adjust;
pub mod apply;
pub mod connection;
pub mod describe;
mod events;
mod hooks;
mod launch;
mod listen;
mod mark;
pub mod mux;
pub mod owners;
mod plugin;
mod settings;
mod states;
pub mod ttrpc;

pub use hooks::{About, Known, Nri, Pass, Runs};
pub use settings::{REGISTRATION_TIME, REQUEST_TIME, Settings};

use std::sync::Arc;

use coracle_proto::nri::{ContainerEviction, ContainerUpdate};
use futures::future::BoxFuture;

/// What plugins ask of the runtime.
pub trait Host: Send + Sync + 'static {
    /// Every pod and container that there is. May read files.
    fn known(&self) -> Known;

    /// Updates a container's limits. An absent container is none of the plugin's business any more:
    /// a success. The error is for the log.
    fn update(self: Arc<Self>, update: ContainerUpdate) -> BoxFuture<'static, Result<(), String>>;

    /// Stops a container by force. Must not tell plugins before it returns.
    fn evict(self: Arc<Self>, eviction: ContainerEviction) -> BoxFuture<'static, Result<(), String>>;
}

/// Why a hook fails the call that it belongs to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A plugin said no.
    #[error("NRI plugin {plugin} failed {event}")]
    Refused {
        /// Index and name.
        plugin: String,
        /// The event, as the contract names it.
        event: &'static str,
        /// What it said.
        #[source]
        source: connection::CallError,
    },
    /// A validating plugin rejects the adjustments of others.
    #[error("NRI validator {plugin} rejects the container's adjustment: {reason}")]
    Rejected {
        /// Index and name.
        plugin: String,
        /// In its words.
        reason: String,
    },
    /// Plugins contradict each other.
    #[error("NRI plugins disagree")]
    Disagree(#[from] adjust::MergeError),
}
