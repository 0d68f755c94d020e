//! Marks ServiceCIDRs as ready, and prevents the deletion of ServiceCIDRs with used addresses.

pub(crate) mod plan;
pub(crate) mod run;
