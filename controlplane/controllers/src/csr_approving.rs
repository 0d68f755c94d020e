//! Certificate signing requests of nodes are approved: of those that may have them, for what they are.

mod claim;
mod plan;
mod reserved;
pub(crate) mod run;
