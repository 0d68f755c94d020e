//! The service proxy: Services and EndpointSlices as nftables chains, sets and verdict maps.
//!
//! `plan` turns one service and its slices into a [`program::Program`]: chains that choose an endpoint, and map
//! elements that jump to these chains. `plan` is pure. [`Proxy`] compares the new program of each changed service with
//! the applied program, and commits the difference as one transaction. The behaviour is that of kube-proxy's nftables
//! mode (`pkg/proxy/nftables`).
//!
//! Invariants:
//! - the work for a change is proportional to the changed services, not to all services;
//! - a key of a map belongs to one service: the oldest service that claims the key;
//! - connections are translated by conntrack, so they survive changes of other endpoints, restarts and repairs;
//! - a service never takes addresses that the node serves itself, nor external addresses outside the permitted ranges.

mod choice;
mod endpoints;
mod flows;
mod layout;
mod node_view;
mod plan;
mod program;
mod proxy;

pub use node_view::NodeView;
pub use proxy::{Proxy, State};
