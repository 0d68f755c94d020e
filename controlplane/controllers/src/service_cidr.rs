//! Marks ServiceCIDRs as ready, and prevents the deletion of those with used addresses.

pub(crate) mod plan;
pub(crate) mod run;
