//! Aggregated cluster roles: their rules are those of all cluster roles that their label selectors match.

pub(crate) mod plan;
pub(crate) mod run;
