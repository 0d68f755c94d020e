//! Node lifecycle: nodes without heartbeats get conditions Unknown and taints, so that their pods are replaced on other
//! nodes. A node whose heartbeats return writes its own conditions again.
//!
//! ```text
//! heartbeat (Lease renewed, or status written)
//!     │ none for the grace period: one timer per node, extended only when it fires
//!     ▼
//! conditions Unknown ── condition taints (NoSchedule): at once
//!     │
//!     └── NoExecute taints: one node of a zone at a time, at the zone's rate. No taints while all nodes
//!         are lost: then the control plane is probably cut off, not the nodes
//! ```
//! `taint_eviction` evicts the pods.

pub(crate) mod plan;
mod rate_limits;
pub(crate) mod run;
pub(crate) mod state;
mod zone;
