//! The addresses behind each service.

pub(crate) mod plan;
pub(crate) mod run;
