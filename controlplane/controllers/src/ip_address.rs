//! Keeps one IPAddress for each address of a service. Reports addresses and node ports that are outside of their
//! ranges, or that several services have.

pub(crate) mod plan;
mod problems;
pub(crate) mod run;
