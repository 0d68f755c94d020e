//! Cluster roles that are made of others: all those with certain labels.

pub(crate) mod plan;
pub(crate) mod run;
