//! Evicts pods from nodes whose NoExecute taints they do not, or no longer, tolerate.

pub(crate) mod plan;
pub(crate) mod run;
