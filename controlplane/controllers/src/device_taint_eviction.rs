//! Evicts pods from devices whose NoExecute taints their claims do not, or no longer, tolerate.

pub(crate) mod plan;
pub(crate) mod run;
