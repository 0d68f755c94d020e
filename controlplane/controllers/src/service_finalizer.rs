//! The finalizer of LoadBalancer services. The API server keeps a deleted service until its addresses are withdrawn.

pub(crate) mod plan;
pub(crate) mod run;
