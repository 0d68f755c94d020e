//! Network policies as nftables chains, sets and verdict maps.
//!
//! [`Model`] turns policies, namespaces and pods into a table of chains and sets, and records the chains and elements
//! that each change affects. The model is pure. [`Enforcer`] writes the recorded difference to the kernel as one
//! transaction.
//!
//! Invariants:
//! - the work for a change is proportional to the affected chains and elements, not to all policies and pods;
//! - a pod that a policy selects is in its map before the model returns, so no packet passes without that policy;
//! - open connections that a change forbids are marked, and the table drops their packets;
//! - the table stays in the kernel when the agent ends, and is replaced in one transaction after its next start;
//! - the node always reaches its own pods. Only policies of administrators filter packets from a pod to its own node.

mod blocks;
mod cluster_policy;
mod connections;
mod enforcer;
mod facts;
mod layout;
mod model;
mod packet;
mod program;
mod rules;

pub use cluster_policy::{ClusterKind, ClusterPolicy, InvalidPolicy};
pub use connections::{ConnectionCounts, mark_connections};
pub use enforcer::{Effect, Enforcer};
pub use facts::PodFacts;
pub use layout::OwnNode;
pub use model::Model;
