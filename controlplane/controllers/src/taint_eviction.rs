//! Pods leave nodes whose taints they do not tolerate, or not for any longer.

pub(crate) mod plan;
pub(crate) mod run;
