//! Evicts pods whose claims have devices with NoExecute taints, unless the claims tolerate the taints. Tolerations can
//! expire.

pub(crate) mod plan;
pub(crate) mod run;
