//! The control plane in one process: store, apiserver, controllers and scheduler.
//!
//! Start reading at [`start()`], which starts the parts in the order of their dependencies. Controllers and scheduler
//! get a `kube::Client` that calls the API server in process. Authentication, authorization and admission apply to
//! them as to every client.
//!
//! Invariants: if `start` fails, nothing runs. After it returned, the API server accepts requests.

mod kubeconfig;
pub mod pki;
mod start;
mod tls;

pub use coracle_apiserver::{AuditConfig, AuditLogOptions, PluginSelection};
pub use pki::Pki;
pub use start::{ControlPlane, ControlPlaneConfig, Error, NodeIdentity, start};
