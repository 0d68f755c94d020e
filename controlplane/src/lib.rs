//! The control plane in one process: store, apiserver, controllers and scheduler.
//!
//! Start reading at [`start()`], which wires the parts in the order in which they need each other.
//! Controllers and scheduler get a `kube::Client` that ends in the apiserver itself, so they are
//! identified, allowed and admitted like anybody, without a socket.
//!
//! Invariants: nothing runs when `start` fails; once it returned, the API answers.

mod kubeconfig;
pub mod pki;
mod start;
mod tls;

pub use pki::Pki;
pub use start::{ControlPlane, ControlPlaneConfig, Error, NodeIdentity, start};
