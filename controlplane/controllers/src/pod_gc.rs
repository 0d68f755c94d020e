//! Pods whose node is gone for good.

pub(crate) mod plan;
pub(crate) mod run;
