//! Load balancers without machines of their own: nodes serve the ports of a LoadBalancer service at their addresses.

pub(crate) mod claims;
pub(crate) mod plan;
pub(crate) mod run;
pub(crate) mod state;
