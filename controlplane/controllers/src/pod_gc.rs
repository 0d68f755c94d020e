//! Deletes pods whose node does not exist any more, terminating pods whose node is out of service or that have no node, and
//! the oldest finished pods above the limit.

pub(crate) mod plan;
pub(crate) mod run;
