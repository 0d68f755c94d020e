//! The controllers of the control plane, as API clients. Workloads: deployments, replica sets, stateful sets, daemon
//! sets, jobs, cron jobs, pod autoscalers, disruption budgets. Cluster: garbage collection, namespaces, node
//! lifecycle, certificates, tokens, endpoints, volumes, resource claims, migrations of stored objects.
//!
//! Each controller is a directory. `plan` compares the desired with the observed state and returns actions, without
//! I/O. `run` reads the observed state and applies the actions. All controllers share one set of caches (`caches`) with
//! one watch for each kind. A write is in the cache before the next reconcile (`cache`), so a plan never uses a state
//! older than the controller's own last write. Indexes that follow the caches are in `state`. State that only one
//! controller has is created in `run` and passed to its functions.
//!
//! Invariants: the only access to the API is a [`kube::Client`]. A plan does no I/O and does not read the clock.
//! Controllers write patches of exactly the fields that they own, so that fields newer than this crate survive.

mod account_token;
mod account_token_signer;
mod address_pool;
mod annotation;
mod api_kind;
mod attributes_class_protection;
mod autoscaler_metrics;
mod bootstrap_signer;
mod cache;
mod caches;
mod certificate;
mod certificate_signer;
mod cluster_role_aggregation;
mod config;
mod context;
mod cron_job;
mod csr_approving;
mod csr_cleaner;
mod csr_signing;
mod daemon_set;
mod deployment;
mod device_taint_eviction;
mod disruption;
mod endpoint_slice;
mod endpoint_slice_metrics;
mod endpoint_slice_mirroring;
mod endpoints;
mod ephemeral_volume;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzz;
mod garbage;
mod ip_address;
mod job;
mod job_metrics;
mod legacy_token_cleaner;
mod live;
mod local_volume;
mod metric_text;
mod namespace;
mod node_balancer;
mod node_lifecycle;
mod node_ttl;
mod object;
mod pod_autoscaler;
mod pod_cidr;
mod pod_control;
mod pod_gc;
mod pod_group_protection;
mod queue;
mod queueing;
mod replica_set;
mod replication_controller;
mod resource_claim;
mod resource_quota;
mod revision_history;
mod root_ca;
mod run;
mod running_controllers;
mod scale_target;
mod selection;
mod service_account;
mod service_cidr;
mod service_finalizer;
mod stale_disruption;
mod state;
mod stateful_set;
mod stateful_set_metrics;
mod storage_version_migration;
mod taint_eviction;
mod template;
#[cfg(test)]
mod test_api;
mod timestamp;
mod token_cleaner;
mod ttl_after_finished;
mod volume_binding;
mod volume_protection;
mod watch;
mod write;
mod zone_metrics;

pub use account_token_signer::AccountTokenSigner;
pub use autoscaler_metrics::AutoscalerMetrics;
pub use certificate_signer::{SignError, Signer};
pub use config::{AutoscalerOptions, ControllersConfig};
pub use endpoint_slice_metrics::EndpointSliceMetrics;
pub use job_metrics::JobMetrics;
pub use queue::QueueMetrics;
pub use run::run;
pub use running_controllers::RunningControllers;
pub use selection::{ControllerSelection, UnknownController};
pub use stateful_set_metrics::StatefulSetMetrics;
pub use zone_metrics::ZoneMetrics;
