//! Assigns pod CIDRs to nodes.

pub(crate) mod plan;
pub(crate) mod run;
