//! Signs approved certificate signing requests of the Kubernetes signers.

pub(crate) mod run;
mod sign;

pub use sign::{SignError, Signer};
