//! NRI, the node resource interface: plugins that receive events of pods and containers, and adjust containers before
//! they are created. The protocol is defined by github.com/containerd/nri, version 0.13.
//!
//! ```text
//!   the runtime ──hooks──► Nri ──in the order of their indices──► plugins   (ttrpc over mux over a
//!       ▲                   │ adjust: merged, conflicts refused              unix socket each)
//!       └── Host ◄──────────┘ apply: onto the container's OCI spec
//! ```
//!
//! Start reading at [`Nri`], whose methods are the hooks. Invariants:
//! - While no plugin is connected, an event costs one atomic load. Without a subscriber no description is made.
//! - A plugin that does not respond in time is dropped, and the runtime continues without it. Exception: without the
//!   response of a validating plugin, the container is not created.
//! - Events reach plugins one at a time, as in upstream's package `adaptation`, because plugins rely on this order.
//!   Only validating plugins are called at the same time.
//! - A plugin that joins gets every pod and container, including those that are being created ([`Nri::block_joins`]).
//! - `adjust`, `apply` and `describe` do no I/O.
//! - The crate uses types of NRI and the OCI, but no types of the CRI.

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
mod snapshot;
mod states;
pub mod ttrpc;

pub use hooks::{JoinGuard, Nri, PodAndContainer};
pub use settings::{REGISTRATION_TIMEOUT, REQUEST_TIMEOUT, Settings};
pub use snapshot::{PodState, Snapshot};

use std::sync::Arc;

use coracle_proto::nri::{ContainerEviction, ContainerUpdate};
use futures::future::BoxFuture;

/// Requests of plugins to the runtime.
pub trait Host: Send + Sync + 'static {
    /// Every pod and container. May read files.
    fn snapshot(&self) -> Snapshot;

    /// Updates a container's resources. Succeeds if the container does not exist any more. The error is a text for
    /// the log.
    fn update(self: Arc<Self>, update: ContainerUpdate) -> BoxFuture<'static, Result<(), String>>;

    /// Stops a container by force. Must not send events to plugins before it returns.
    fn evict(self: Arc<Self>, eviction: ContainerEviction) -> BoxFuture<'static, Result<(), String>>;
}

/// Error of a hook, which fails the call that it belongs to.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A plugin returned an error.
    #[error("NRI plugin {plugin} failed {event}")]
    Refused {
        /// Index and name.
        plugin: String,
        /// The event, with its name in the NRI protocol.
        event: &'static str,
        /// The plugin's error.
        #[source]
        source: connection::CallError,
    },
    /// A validating plugin rejected the adjustments of other plugins.
    #[error("NRI validator {plugin} rejects the container's adjustment: {reason}")]
    Rejected {
        /// Index and name.
        plugin: String,
        /// The reason of the plugin.
        reason: String,
    },
    /// Plugins conflict.
    #[error("NRI plugins conflict")]
    Conflict(#[from] adjust::MergeError),
}
