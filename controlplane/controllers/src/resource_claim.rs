//! Creates the resource claims that pods have by template, and releases claims that no pod uses any more.
//!
//! Source: upstream's controller `resourceclaim`. `run` handles pods, `release` claims.

pub(crate) mod plan;
pub(crate) mod release;
pub(crate) mod run;
