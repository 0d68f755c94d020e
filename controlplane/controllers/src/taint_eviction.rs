//! Evicts pods from nodes whose NoExecute taints they do not tolerate, or not any longer.

pub(crate) mod plan;
pub(crate) mod run;
