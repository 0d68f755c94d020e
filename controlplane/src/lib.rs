//! The control plane in one process: store, apiserver, controllers and scheduler.
//!
//! Start reading at [`start()`], which starts the parts in the order of their dependencies. Controllers and scheduler
//! get a `kube::Client` that calls the API server in process. Authentication, authorization and admission apply to
//! them as to every client.
//!
//! Several control planes can share a store on etcd. Each control plane serves the API. Leader election (`leader`)
//! selects one of them to run the controllers, and one to run the scheduler.
//!
//! Controllers and scheduler also run for an API server of another program (`clients`).
//!
//! Invariants: if `start` fails, no part runs. When `start` returns, the API server accepts requests.

mod backup;
mod clients;
mod config;
mod error;
#[cfg(test)]
mod fault_tests;
#[cfg(test)]
mod following_tests;
mod host_name;
mod kubeconfig;
mod leader;
pub mod pki;
mod restart;
mod serving;
mod start;
mod store;
#[cfg(test)]
mod tests;
mod tls;

pub use backup::{BackupError, BackupFile, offline_backup, restore_backup};
pub use clients::{ExternalClients, ExternalServer};
pub use config::{ControlPlaneConfig, EncryptionFile, EtcdConfig};
pub use coracle_apiserver::{
    AuditBatch, AuditConfig, AuditLogOptions, AuditMode, AuditThrottle, AuditTruncateConfig,
    AuditWebhookConfig, AuthorizationConfig, BACKUP_PATH, InitialResourcesOptions, OidcConfig,
    PluginSelection, RequestHeaderConfig, RuntimeConfig, ServerFeatures, ServerOptions, StoreOptions,
    TokenWebhookConfig, TolerationSeconds,
};
pub use coracle_controllers::{AutoscalerOptions, ControllerSelection};
pub use coracle_scheduler::SchedulerConfig;
pub use error::Error;
pub use leader::LeaderElection;
pub use pki::Pki;
pub use serving::{CertificateFiles, NamedCertificate, ServingOptions};
pub use start::{ControlPlane, NodeIdentity, start};
pub use store::OpenStoreError;
