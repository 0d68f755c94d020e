//! Evicts pods from nodes with NoExecute taints that the pods do not tolerate, or whose `tolerationSeconds` have
//! passed.

pub(crate) mod plan;
pub(crate) mod run;
