//! Reserved names and addresses. No node gets a certificate for them. Otherwise clients that trust the cluster's CA
//! would accept the node as the API server or as a service.
//!
//! A node on the control plane's machine has the same address as the API server. If both run in one process, the node
//! gets its certificate without a request. If they are two processes, the control plane's configuration must have the
//! node's name. Otherwise an administrator must approve the request.

use std::net::IpAddr;

use ipnetwork::IpNetwork;

use crate::config::ControllersConfig;

/// The reserved names and addresses.
#[derive(Clone, Copy)]
pub(crate) struct Reserved<'a> {
    /// The API server's DNS names.
    pub(crate) names: &'a [String],
    /// The API server's addresses.
    pub(crate) addresses: &'a [IpAddr],
    /// Addresses of pods and of services.
    pub(crate) ranges: &'a [IpNetwork],
    /// The node on the API server's machine. It may have the names and addresses of that machine.
    pub(crate) own_node: Option<&'a str>,
}

/// Suffixes of service names.
const SERVICES: [&str; 2] = [".svc", ".cluster.local"];
/// Names of the API server in every cluster.
const SERVER: [&str; 3] = ["kubernetes", "kubernetes.default", "localhost"];

impl<'a> Reserved<'a> {
    /// Reads the configuration.
    pub(crate) fn of(config: &'a ControllersConfig) -> Self {
        Self {
            names: &config.server_names,
            addresses: &config.server_addresses,
            ranges: &config.reserved_ranges,
            own_node: config.own_node.as_deref(),
        }
    }

    /// The reason why the node cannot have the name. `None` if the node can have it.
    pub(crate) fn refusal_of_name(&self, node: &str, dns: &str) -> Option<String> {
        let dns = dns.trim_end_matches('.').to_ascii_lowercase();
        if SERVICES.iter().any(|end| dns.ends_with(end)) {
            return Some(format!("{dns} is the name of a service"));
        }
        let shared = self.own_node == Some(node);
        let found = !shared && self.names.iter().any(|own| own.eq_ignore_ascii_case(&dns));
        (found || SERVER.contains(&dns.as_str())).then(|| format!("{dns} is a name of the API server"))
    }

    /// The reason why the node cannot have the address. `None` if the node can have it.
    pub(crate) fn refusal_of_address(&self, node: &str, address: &IpAddr) -> Option<String> {
        let address = address.to_canonical();
        if address.is_loopback() || address.is_unspecified() || address.is_multicast() {
            return Some(format!("{address} cannot be the address of a machine"));
        }
        if let Some(range) = self.ranges.iter().find(|range| range.contains(address)) {
            return Some(format!("{address} is one of the addresses of pods and services, {range}"));
        }
        let shared = self.own_node == Some(node);
        let found = !shared && self.addresses.iter().any(|own| own.to_canonical() == address);
        found.then(|| format!("{address} is an address of the API server"))
    }
}
