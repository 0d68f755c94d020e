//! Creates resource claims from the templates that pods refer to, and releases claims that are no longer used.
//!
//! Source: upstream's controller `resourceclaim`. `run` reconciles pods, `release` reconciles claims.

pub(crate) mod plan;
pub(crate) mod release;
pub(crate) mod run;
