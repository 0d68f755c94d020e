//! Keeps one IPAddress for each address of a service.

pub(crate) mod plan;
pub(crate) mod run;
