//! A range of pod addresses for every node.

pub(crate) mod plan;
pub(crate) mod run;
