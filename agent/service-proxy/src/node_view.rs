//! The properties of the proxy's node.

use std::net::IpAddr;

use ipnetwork::IpNetwork;

/// The properties of the proxy's node on which its rules depend.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeView {
    /// Name of the node.
    pub name: String,
    /// Zone of the node (`topology.kubernetes.io/zone`).
    pub zone: Option<String>,
    /// Networks of this node's pods. Clients outside them are masqueraded.
    pub pod_networks: Vec<IpNetwork>,
    /// Whether packets between pods of one bridge bypass the hooks of the IP layer.
    pub bridge_bypasses_filters: bool,
    /// Addresses that the node serves itself, such as cluster DNS.
    pub served_here: Vec<IpAddr>,
    /// Ranges of service addresses, from the ServiceCIDRs. A packet to an address in them is dropped if no
    /// service has the address.
    pub service_ranges: Vec<IpNetwork>,
    /// Ranges of addresses that services may take by `externalIPs`.
    pub external_ips: Vec<IpNetwork>,
    /// Ranges of addresses that services may take by `status.loadBalancer`. If empty, all addresses are permitted.
    pub load_balancer_ips: Vec<IpNetwork>,
    /// Ranges of this node's addresses that have node ports. If no range belongs to an address family, all addresses of
    /// this family have node ports.
    pub node_port_addresses: Vec<IpNetwork>,
    /// UDP port of the overlay. Packets of pods to this port are dropped. The kernel cannot distinguish them from
    /// packets of other nodes, and would deliver the inner packet with any source address.
    pub overlay_port: Option<u16>,
    /// Addresses of this node. If the status of a load balancer has one of these addresses, the node accepts packets
    /// for the load balancer at all these addresses.
    pub addresses: Vec<IpAddr>,
}
