//! Names and addresses that no node has, whatever it says of itself: who has a certificate for them can stand in for the
//! API server, or for a service, before everybody who trusts the cluster's authority.
//!
//! A node whose machine is also the control plane's has the API server's address in truth. In one process with it, it
//! has its certificate from there and asks for none; one in a process of its own is told to the control plane by its
//! name, or somebody has to approve what it asks.

use std::net::IpAddr;

use ipnetwork::IpNetwork;

use crate::config::ControllersConfig;

/// What is somebody else's.
#[derive(Clone, Copy)]
pub(crate) struct Reserved<'a> {
    /// The API server's names.
    pub(crate) names: &'a [String],
    /// Its addresses.
    pub(crate) addresses: &'a [IpAddr],
    /// Addresses of pods and of services.
    pub(crate) ranges: &'a [IpNetwork],
    /// The node on the API server's machine, which has the machine's names and addresses as well.
    pub(crate) own_node: Option<&'a str>,
}

/// Names of services end so, in every cluster and in this one.
const SERVICES: [&str; 2] = [".svc", ".cluster.local"];
/// What the API server is called wherever it runs.
const SERVER: [&str; 3] = ["kubernetes", "kubernetes.default", "localhost"];

impl<'a> Reserved<'a> {
    /// As the settings have it.
    pub(crate) fn of(config: &'a ControllersConfig) -> Self {
        Self {
            names: &config.server_names,
            addresses: &config.server_addresses,
            ranges: &config.reserved_ranges,
            own_node: config.own_node.as_deref(),
        }
    }

    /// Whose the name is that this node asks for.
    pub(crate) fn name(&self, node: &str, dns: &str) -> Option<String> {
        let dns = dns.trim_end_matches('.').to_ascii_lowercase();
        if SERVICES.iter().any(|end| dns.ends_with(end)) {
            return Some(format!("{dns} is the name of a service"));
        }
        let shared = self.own_node == Some(node);
        let found = !shared && self.names.iter().any(|own| own.eq_ignore_ascii_case(&dns));
        (found || SERVER.contains(&dns.as_str())).then(|| format!("{dns} is the API server"))
    }

    /// Whose the address is that this node asks for.
    pub(crate) fn address(&self, node: &str, address: &IpAddr) -> Option<String> {
        let address = address.to_canonical();
        if address.is_loopback() || address.is_unspecified() || address.is_multicast() {
            return Some(format!("{address} is no machine's own"));
        }
        if let Some(range) = self.ranges.iter().find(|range| range.contains(address)) {
            return Some(format!("{address} is one of the addresses of pods and services, {range}"));
        }
        let shared = self.own_node == Some(node);
        let found = !shared && self.addresses.iter().any(|own| own.to_canonical() == address);
        found.then(|| format!("{address} is the API server's"))
    }
}
