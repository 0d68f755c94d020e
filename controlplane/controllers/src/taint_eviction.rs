//! Evicts pods from nodes with NoExecute taints that the pods do not tolerate, or that they have tolerated for their
//! `tolerationSeconds`.

pub(crate) mod plan;
pub(crate) mod run;
