//! Creates the service account `default` in every namespace.

pub(crate) mod plan;
pub(crate) mod run;
