//! Nodes that are not heard of any more are said to be Unknown and tainted, so that their pods go elsewhere; nodes
//! that come back are taken as they are.
//!
//! ```text
//! heartbeat (Lease renewed, or status written)
//!     │ none for the grace period: a timer a node, moved on only when it fires
//!     ▼
//! conditions Unknown ── condition taints (NoSchedule): at once
//!     │
//!     └── taints that evict (NoExecute): a node at a time in its zone, by the zone's rate; none while
//!         every node is lost, for then it is we who are cut off
//! ```
//! What the taints do to pods is `taint_eviction`'s affair.

pub(crate) mod plan;
pub(crate) mod run;
mod turns;
mod zone;
