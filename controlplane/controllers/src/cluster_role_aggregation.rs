//! Aggregated cluster roles: they have the rules of all cluster roles that their label selectors match.

pub(crate) mod plan;
pub(crate) mod run;
