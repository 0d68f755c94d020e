//! Evicts pods whose claims have devices with NoExecute taints, if the claims do not tolerate the taints or no longer
//! tolerate them.

pub(crate) mod plan;
pub(crate) mod run;
