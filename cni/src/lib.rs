//! Pod networking: addresses, the node's bridge, veth pairs, masquerading and host ports, all over
//! netlink and in process.
//!
//! Owns what a CNI plugin chain of bridge, host-local, loopback and portmap does, without running
//! one: no `ip`, `nft`, `iptables` or CNI binary is needed. Start reading at [`Network`].
//!
//! Invariants:
//! - knows sandboxes by id and network namespace only; never a pod spec, CRI or Kubernetes;
//! - everything that it makes is derivable: [`Network::reconcile`] rebuilds addresses and firewall
//!   from the namespaces that live, and removes what nobody owns;
//! - the firewall is one nftables table of ours, changed by one atomic transaction at a time.

mod conf;
mod error;
mod ipam;
mod link;
mod netns;
mod network;
mod nft;
mod record;
mod sysctl;

pub use error::Error;
pub use network::{Attached, Attachment, Live, Network, NetworkConfig, PortMapping, Protocol};
