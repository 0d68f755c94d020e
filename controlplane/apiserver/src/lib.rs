//! The Kubernetes API over HTTP: authentication, authorization, admission, storage, watch, discovery.
//!
//! Start reading at [`Apiserver::handle`] (`server.rs`). Requests from the network are authenticated (`authn`). Callers
//! in this process pass their identity. Each request is authorized (`authz`), then runs one verb (`verb/`) or
//! subresource (`sub/`). `write.rs` lists the stages of a write. Reads come from the watch cache (`cache`), which holds
//! each object's bytes once. `registry.rs` has the set of served resources; [`Apiserver::add_resource`] adds a custom
//! resource at run time.
//!
//! Modules depend downwards only; `integration/tests/tidy/modules.rs` checks that there are no cycles:
//!
//! | layer | modules |
//! |---|---|
//! | server | `listen`, `server` |
//! | controllers in this process | `bootstrap`, `controllers` |
//! | handlers | `verb`, `sub`, `usage`, `aggregated`, `documents`, `health`, `backup` |
//! | write pipeline | `write`, and its stages `field_manager`, `quota` |
//! | request | `call`: one request, with the services (`state`) |
//! | services | `admit`, `aggregation`, `allocate`, `audit`, `authn`, `authz`, `custom_resources`, `drain`, `flow_control`, `in_flight`, `initialization`, `metrics`, `store_probe`, `usage_history` |
//! | storage | `registry`, `convert`, `cache` |
//! | values | `browsers`, `cel_metrics`, `error`, `media`, `object_meta`, `pod_references`, `request`, `web_socket` |
//!
//! Invariants:
//! - Rules of single kinds belong to `coracle-kinds`. Verbs are generic over its resources, with a few exceptions, such
//!   as the grace period of pods in `verb/delete.rs`.
//! - A write is answered after the cache contains it, so a client always reads its own writes.
//! - A request that no authorizer allows is forbidden.

mod admit;
mod aggregated;
mod aggregation;
mod allocate;
mod audit;
mod authn;
mod authz;
mod backup;
mod body;
mod bootstrap;
mod bounded_file;
mod browsers;
mod bundle_verifier;
mod cache;
mod call;
mod cel_metrics;
mod client_upgrade;
mod component_pages;
mod compression;
mod config;
mod controllers;
mod convert;
mod counted_body;
mod custom_resources;
mod deadline;
mod documents;
mod drain;
mod error;
mod external_name;
mod field_manager;
mod file_watch;
mod flow_control;
mod freshness;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod health;
mod in_flight;
mod initialization;
mod large_requests;
mod list_body;
mod listen;
mod long_work;
mod media;
mod merged_openapi;
mod metrics;
mod namespace_creator;
mod object_meta;
mod offload;
mod part;
mod pod_references;
mod polled_when_woken;
mod pretty;
mod protobuf_list;
mod quota;
mod quota_locks;
mod registry;
mod remote;
mod reply;
mod request;
mod request_body;
mod request_owner;
mod resolver;
mod server;
mod service_range;
mod short_lived;
mod socket_body;
mod state;
mod store_probe;
mod stored;
mod sub;
mod superseded;
mod target;
#[cfg(test)]
mod test_tls;
mod unread_bytes;
mod usage;
mod usage_history;
mod usage_samples;
mod verb;
mod version;
mod waits;
mod warnings;
mod web_socket;
mod webhook_client;
mod webhook_connections;
mod write;
mod write_turns;

pub use admit::{PluginSelection, TolerationSeconds};
pub use aggregation::FrontProxy;
pub use audit::{AuditBatch, AuditThrottle, AuditTruncateConfig, AuditWebhookConfig};
pub use authn::{OidcConfig, RequestHeaderConfig, TokenWebhookConfig, User};
pub use authz::AuthorizationConfig;
pub use config::{
    ApiserverConfig, AuditConfig, EncryptionHealth, KubeletTls, OpenError, ServerFeatures, ServerOptions,
    StoreOptions,
};
pub use coracle_audit::{LogOptions as AuditLogOptions, Mode as AuditMode};
pub use coracle_kinds::kind::{RuntimeConfig, RuntimeConfigError};
pub use error::ApiError;
pub use file_watch::follow_file;
pub use in_flight::{MAX_IN_FLIGHT, REQUEST_TIMEOUT};
pub use metrics::ComponentMetrics;
pub use registry::RegistryError;
pub use reply::Body;
pub use request::BACKUP_PATH;
pub use server::Apiserver;
pub use service_range::{ServiceRange, ServiceRanges};
pub use usage_history::InitialResourcesOptions;
