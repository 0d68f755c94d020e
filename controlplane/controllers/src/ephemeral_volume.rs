//! Creates the claims of generic ephemeral volumes. A claim belongs to its pod and is deleted with it.

pub(crate) mod plan;
pub(crate) mod run;
