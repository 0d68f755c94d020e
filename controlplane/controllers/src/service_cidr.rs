//! Marks ServiceCIDRs as ready, and keeps those with addresses from being deleted.

pub(crate) mod plan;
pub(crate) mod run;
