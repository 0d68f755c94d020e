//! Addresses of LoadBalancer services from a pool. One node announces each address in its network.

pub(crate) mod claims;
pub(crate) mod plan;
pub(crate) mod run;
mod runs;
mod service;
pub(crate) mod state;
