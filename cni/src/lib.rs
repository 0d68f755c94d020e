//! Pod networking by the Container Network Interface: configuration lists, plugins, addresses, the node's
//! bridge, host ports and masquerading, all over netlink.
//!
//! The crate implements both sides of the specification. The runtime's side: [`Network`] runs the plugins of a
//! configuration list, or of the default network, for each sandbox. The plugins' side: bridge, host-local,
//! loopback, portmap, bandwidth, tuning and firewall run in process for Coracle's runtime, and as executables
//! ([`plugin_main`]) for other runtimes. No `ip`, `nft`, `tc` or `iptables` is needed.
//!
//! Invariants:
//! - a sandbox is an id and a network namespace; the crate has no pod specs, and no types of the CRI or Kubernetes;
//! - all its objects are derivable: [`Network::reconcile`] rebuilds addresses and firewall from the namespaces of
//!   running sandboxes, and removes objects without an owner;
//! - each nftables table of the crate is changed by one atomic transaction at a time.

mod address_conflict;
mod address_store;
mod announce;
mod announced_address;
mod attachment_cache;
mod bandwidth;
mod bridge;
mod connection_limit;
mod conntrack;
mod error;
mod executable;
mod file;
mod firewall;
mod firewall_plugin;
mod firewall_repair;
mod host;
mod host_address;
mod host_local;
mod invoke;
mod ipam;
mod kernel_module;
mod link;
mod listeners;
mod loopback;
mod name_lock;
mod netns;
mod network;
mod nft;
mod overlay;
mod parameters;
mod plugin;
mod plugin_executables;
mod plugin_kind;
mod port_condition;
mod portmap;
mod ports;
mod process_group;
mod route_socket;
mod socket_filter;
mod source_guard;
mod spec;
mod sysctl;
mod tuning;
mod virtual_host;
mod watch;

pub use address_conflict::ConflictMonitor;
pub use announced_address::{announce_address, repeat_announcement, withdraw_address};
pub use error::Error;
pub use executable::main as plugin_main;
pub use host_address::{add_host_address, remove_host_address};
pub use listeners::{Listener, listeners};
pub use network::{Attached, Attachment, NamespaceProcess, Network, NetworkConfig};
pub use overlay::{
    AddressMonitor, Announcement, Applied, Backend, End, ForeignDevice, Local, LocalAddress, Mac, Offload,
    Overlay, OverlayConfig, OverlayError, Peer, PeerKind, ProbePath, ProbeResult, examine, has_vxlan,
    local_addresses, merged,
};
pub use plugin_kind::Kind as PluginKind;
pub use ports::{PortMapping, Protocol};
pub use process_group::ProcessGroup;
#[cfg(any(test, feature = "fuzzing"))]
pub use spec::list::fuzz;
#[cfg(any(test, feature = "fuzzing"))]
pub use spec::result::fuzz_result;
pub use sysctl::filters_bridges;
pub use virtual_host::{HostNetwork, VirtualHost, in_empty_namespace};
pub use watch::Watch as DirectoryWatch;
