//! Protects claims that pods use, and bound volumes: they are deleted only after their last use.

pub(crate) mod plan;
pub(crate) mod run;
