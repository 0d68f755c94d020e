//! Creates resource claims from the templates that pods name, and releases claims that no pod uses.
//!
//! Source: upstream's controller `resourceclaim`. `run` reconciles pods, `release` reconciles claims.

pub(crate) mod plan;
pub(crate) mod release;
pub(crate) mod run;
