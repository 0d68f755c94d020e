//! Approves certificate signing requests of nodes, if the requester may have the certificate.

mod claim;
mod plan;
mod reserved;
pub(crate) mod run;
