//! Deployment, ReplicaSet, garbage, namespace and service-account controllers, as API clients.
//!
//! Each controller is a folder of two files: `plan`, which turns a snapshot into actions and touches nothing,
//! and `run`, which gathers the snapshot and carries the actions out. All of them share one set of caches
//! (`caches`): one watch a kind, and what a controller writes is in the cache before its next look (`cache`), so
//! that no plan is ever made from a state older than the controller's own last write.
//!
//! Invariants: the API is known only as a [`kube::Client`]; a plan never does I/O and never asks for the time;
//! objects are written as patches of exactly the fields that are ours, so that fields newer than this crate
//! survive.

mod account_token;
mod api_kind;
mod bootstrap_signer;
mod cache;
mod caches;
mod certificate;
mod cluster_role_aggregation;
mod config;
mod context;
mod csr_approving;
mod csr_cleaner;
mod csr_signing;
mod deployment;
mod disruption;
mod endpoints;
mod error;
mod garbage;
mod namespace;
mod node_lifecycle;
mod object;
mod pod_cidr;
mod pod_gc;
mod queue;
mod replica_set;
mod root_ca;
mod run;
mod service_account;
mod stale_disruption;
mod taint_eviction;
mod template;
mod token_cleaner;
mod watch;
mod write;

pub use account_token::signer::AccountTokenSigner;
pub use config::ControllersConfig;
pub use csr_signing::{SignError, Signer};
pub use run::run;
