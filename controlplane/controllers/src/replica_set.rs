//! The replica set controller: creates and deletes pods until each replica set has its number of replicas.

pub(crate) mod plan;
mod rank;
pub(crate) mod run;

pub(crate) use rank::DELETION_COST;
