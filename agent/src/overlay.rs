//! The node among nodes: who else there is comes from the Node objects, and what others must know of this node goes
//! there.
//!
//! ```text
//! watch of all Nodes ─► peers ─┐                        ┌─► kernel (coracle_cni::Overlay)
//! podCIDRs of our own ─────────┼─► apply ───────────────┼─► pod network: MTU, what is not masqueraded
//! netlink ─► our addresses ────┘                        └─► state ─► status, annotations
//! ```
//! Until the Nodes were listed once, the kernel's tables stay as an earlier agent left them: a control plane that is
//! away cuts nobody off.

mod annotation;
mod rounds;
mod run;
mod verdict;

use std::net::IpAddr;

use coracle_cni::{End, PeerKind};

pub(crate) use annotation::{patch as annotations, removal as without_annotations};
pub(crate) use run::OverlayAgent;

/// What is told of the overlay in the Node object.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// Whether this node's pods can reach others' at all; none before the first try, and without an overlay.
    pub(crate) reached: Option<Result<(), String>>,
    /// What does not work, a sentence each.
    pub(crate) impaired: Vec<String>,
    /// What others must know of this node.
    pub(crate) announced: Option<(PeerKind, Vec<End>)>,
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
