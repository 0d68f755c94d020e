//! Deletes what nobody owns any more.

mod graph;
pub(crate) mod plan;
pub(crate) mod run;
