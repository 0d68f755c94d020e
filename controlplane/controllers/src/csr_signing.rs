//! Signs approved certificate signing requests of the Kubernetes signers.

mod plan;
pub(crate) mod run;
