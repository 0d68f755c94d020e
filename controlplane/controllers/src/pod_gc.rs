//! Deletes pods whose node does not exist any more, and the oldest finished pods above the limit. Also deletes
//! terminating pods that have no node, or whose node is out of service.

pub(crate) mod plan;
pub(crate) mod run;
