//! The cluster's CA in every namespace, for pods to trust the server by.

pub(crate) mod plan;
pub(crate) mod run;
