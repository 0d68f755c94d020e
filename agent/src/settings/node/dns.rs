//! Settings of the DNS of pods.

use std::net::IpAddr;
use std::path::PathBuf;

use coracle_agent::StubDomain;
use ipnetwork::IpNetwork;

use super::super::value::StubServer;
use super::NodeSettings;

/// Offset of the cluster DNS address in the service range.
const DNS_NUMBER: u32 = 10;

/// Checked settings of the DNS of pods.
#[derive(Clone, Debug)]
pub(crate) struct NodeDns {
    /// Addresses of the cluster's DNS service.
    pub(crate) addresses: Vec<IpAddr>,
    /// Whether the node serves DNS at `addresses`.
    pub(crate) is_served: bool,
    /// Further addresses at which the node serves DNS, because running pods use them.
    former: Vec<IpAddr>,
    /// Domains whose names are resolved by their own servers instead of the host's.
    pub(crate) stub_domains: Vec<StubDomain>,
    /// DNS domain of the cluster.
    pub(crate) domain: String,
    /// Resolver configuration of the host.
    pub(crate) resolv_conf: Option<PathBuf>,
    /// Whether `is_served` is set explicitly.
    is_explicit: bool,
    /// Whether `addresses` is derived from the local service range.
    is_derived: bool,
}

// === impl NodeDns ===

impl NodeDns {
    /// Addresses that the node serves itself.
    pub(crate) fn served_here(&self) -> Vec<IpAddr> {
        let own: &[IpAddr] = if self.is_served { &self.addresses } else { &[] };
        own.iter().chain(&self.former).copied().collect()
    }

    /// Whether the node serves DNS at an address that is not configured, but derived from the local service range.
    pub(crate) fn is_address_derived(&self) -> bool {
        self.is_served && self.is_derived
    }

    /// Leaves DNS to pods of the cluster: the node stops serving, unless `serve-dns` is set explicitly.
    pub(crate) fn leave_to_pods(&mut self) {
        self.is_served &= self.is_explicit;
    }

    /// Serves these addresses, too, because running pods use them. An address of the cluster's DNS service is left out.
    pub(crate) fn keep_serving(&mut self, former: impl IntoIterator<Item = IpAddr>) {
        let addresses = &self.addresses;
        self.former = former.into_iter().filter(|address| !addresses.contains(address)).collect();
    }

    /// Sets the address of the DNS server that the node runs, unless one is configured.
    pub(in crate::settings) fn serve_in(&mut self, services: IpNetwork) {
        if !self.is_served || !self.addresses.is_empty() {
            return;
        }
        let address = match services {
            IpNetwork::V4(network) => network.nth(DNS_NUMBER).map(IpAddr::V4),
            IpNetwork::V6(network) => network.nth(DNS_NUMBER.into()).map(IpAddr::V6),
        };
        self.addresses.extend(address);
        self.is_served = address.is_some();
        self.is_derived = true;
    }

    /// Stops serving, and removes addresses of the local service range.
    pub(super) fn disable(&mut self) {
        self.is_served = false;
        if self.is_derived {
            self.addresses.clear();
        }
    }
}

// === impl NodeSettings ===

impl NodeSettings {
    pub(super) fn dns(&self) -> NodeDns {
        NodeDns {
            addresses: self.cluster_dns.clone(),
            is_served: self.serve_dns.unwrap_or(self.cluster_dns.is_empty()),
            former: Vec::new(),
            stub_domains: stub_domains(self.dns_stub_domains.clone()),
            domain: self.cluster_domain.clone(),
            resolv_conf: self.resolv_conf.0.clone(),
            is_explicit: self.serve_dns.is_some(),
            is_derived: false,
        }
    }
}

/// Groups the servers by domain. Keeps the order of the servers.
fn stub_domains(all: Vec<StubServer>) -> Vec<StubDomain> {
    let mut domains: Vec<StubDomain> = Vec::new();
    for StubServer(domain, server) in all {
        match domains.iter_mut().find(|known| known.domain == domain) {
            Some(known) => known.servers.push(server),
            None => domains.push(StubDomain { domain, servers: vec![server] }),
        }
    }
    domains
}
