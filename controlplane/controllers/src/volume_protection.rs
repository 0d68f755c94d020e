//! Protects claims that pods use and volumes that are bound: they are deleted only after their last use.

pub(crate) mod plan;
pub(crate) mod run;
