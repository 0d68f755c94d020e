//! Protects claims that pods use (`claim`), and bound volumes (`run`): claims and volumes are deleted only after their
//! last use.

pub(crate) mod claim;
pub(crate) mod plan;
pub(crate) mod run;
