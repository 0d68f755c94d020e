//! Keeps as many pods as each replica set wants.

pub(crate) mod plan;
mod rank;
pub(crate) mod run;

pub(crate) use rank::DELETION_COST;
