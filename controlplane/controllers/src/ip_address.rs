//! Keeps one IPAddress for each address of a service. Reports addresses and node ports outside of their ranges. Also
//! reports addresses and node ports that several services have.

pub(crate) mod plan;
mod problems;
pub(crate) mod run;
