//! The Kubernetes API over HTTP: authentication, authorization, admission, storage, watch, discovery.
//!
//! Start reading at [`Apiserver::handle`] (`server.rs`). Every request, from the network or from inside the process, is
//! authenticated (`authn`) and authorized (`authz`), then runs one verb (`verb/`) or subresource (`sub/`).
//! `write.rs` lists the stages of a write. Reads come from the watch cache (`cache`), which holds each object's bytes
//! once. `registry.rs` has the served resources; [`Apiserver::add_resource`] adds a custom one at run time.
//!
//! Invariants:
//! - Rules of single kinds are in `coracle-kinds` only; verbs are generic over its resources.
//! - A write is answered after the cache has it, so a client always reads its own writes.
//! - A request that no authorizer allows is forbidden.

mod admit;
mod aggregation;
mod allocate;
mod audit;
mod authn;
mod authz;
mod backup;
mod body;
mod bootstrap;
mod bundle_verifier;
mod cache;
mod call;
mod compression;
mod config;
mod convert;
mod custom_resources;
mod documents;
mod error;
mod field_manager;
mod file_watch;
mod flow_control;
mod freshness;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod health;
mod in_flight;
mod list_body;
mod listen;
mod media;
mod metrics;
mod offload;
mod quota;
mod registry;
mod remote;
mod reply;
mod request;
mod server;
mod service_range;
mod sub;
mod usage;
mod verb;
mod webhook_client;
mod write;

pub use admit::PluginSelection;
pub use aggregation::FrontProxy;
pub use audit::AuditWebhookConfig;
pub use authn::{RequestHeaderConfig, TokenWebhookConfig, User};
pub use authz::AuthorizationConfig;
pub use backup::PATH as BACKUP_PATH;
pub use config::{ApiserverConfig, AuditConfig, KubeletTls, OpenError};
pub use coracle_audit::LogOptions as AuditLogOptions;
pub use error::ApiError;
pub use file_watch::follow_file;
pub use in_flight::{MAX_IN_FLIGHT, REQUEST_TIMEOUT};
pub use registry::RegistryError;
pub use reply::Body;
pub use server::Apiserver;
pub use service_range::{ServiceRange, ServiceRanges};
