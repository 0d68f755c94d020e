//! Deletes expired bootstrap tokens.

mod plan;
pub(crate) mod run;
