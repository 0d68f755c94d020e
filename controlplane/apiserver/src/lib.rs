//! The Kubernetes API over HTTP: authentication, authorization, admission, storage, watch, discovery.
//!
//! Start reading at [`Apiserver::handle`] (`server.rs`): every request, from the network or from
//! inside the process, takes the same way: who is it (`authn`), may they (`authz`), then one verb
//! (`verb/`, one a file) or subresource (`sub/`). Writes go body → decode → admission (`admit`) →
//! strategy and validation of the kind → store (`write.rs`); reads come from the watch cache
//! (`cache`), which holds each object's bytes once.
//!
//! Invariants:
//! - What a kind is, is known to `coracle-kinds` alone; verbs are generic over its table.
//! - A write is answered after the cache has it, so a client always reads its own writes.
//! - Nobody passes the authorizers by silence: what none allows is forbidden.

mod admit;
mod allocate;
mod authn;
mod authz;
mod body;
mod bootstrap;
mod cache;
mod call;
mod convert;
mod documents;
mod error;
mod field_manager;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod health;
mod in_flight;
mod list_body;
mod listen;
mod media;
mod offload;
mod registry;
mod reply;
mod request;
mod server;
mod service_range;
mod sub;
mod verb;
mod write;

pub use authn::User;
pub use error::ApiError;
pub use in_flight::REQUEST_TIMEOUT;
pub use registry::RegistryError;
pub use reply::Body;
pub use server::{Apiserver, ApiserverConfig, KubeletTls, OpenError};
pub use service_range::ServiceRange;
