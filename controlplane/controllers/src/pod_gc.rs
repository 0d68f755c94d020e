//! Deletes pods whose node does not exist any more or is out of service.

pub(crate) mod plan;
pub(crate) mod run;
