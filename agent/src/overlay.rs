//! The overlay of this node: reads its peers from the Node objects, and announces this node in its own Node object.
//!
//! ```text
//! watch of all Nodes ─► peers ─┐                        ┌─► kernel (coracle_cni::Overlay)
//! podCIDRs of this node ───────┼─► apply ───────────────┼─► pod network: MTU, ranges without masquerading
//! netlink ─► own addresses ────┘                        └─► state ─► status, annotations
//! ```
//! Until the Nodes are listed once, the kernel's tables stay as an earlier agent left them. So pods of other nodes
//! stay reachable while the control plane is unreachable.

mod annotation;
mod retest;
mod run;
mod test_results;

use std::net::IpAddr;

use coracle_cni::Announcement;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use annotation::fuzz as fuzz_annotations;
pub(crate) use annotation::{patch as annotations, removal as without_annotations};
pub(crate) use run::OverlayAgent;

/// State of the overlay that the Node object reports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// Whether pods of other nodes are reachable at all. `None` before the first attempt, and without an overlay.
    pub(crate) reached: Option<Result<(), String>>,
    /// Faults, a sentence each.
    pub(crate) impaired: Vec<String>,
    /// The data of this node that other nodes need.
    pub(crate) announced: Option<Announcement>,
}

/// Addresses in the order of preference, at most one of each family.
pub(crate) fn one_of_each(ips: &[IpAddr]) -> Vec<IpAddr> {
    let mut chosen: Vec<IpAddr> = Vec::new();
    for ip in ips {
        if chosen.iter().all(|other| other.is_ipv4() != ip.is_ipv4()) {
            chosen.push(*ip);
        }
    }
    chosen
}
