//! Signs approved certificate signing requests of the Kubernetes signers.

pub(crate) mod run;
