//! Services and EndpointSlices of a cluster as indexed tables, for the service proxy, cluster DNS and the environment
//! variables of containers. Pure: the agent's watches feed the tables.
//!
//! Start at [`Tables`]. Invariants:
//! - a change touches only the entries of the changed object;
//! - addresses are parsed once, when an EndpointSlice is read; an invalid address is not an endpoint.

mod claims;
mod slice;
mod tables;

pub use slice::{AddressType, Conditions, Endpoint, EndpointSlice, Hints, Named, SlicePort};
pub use tables::{ServiceState, Tables, cluster_ips, is_headless};
