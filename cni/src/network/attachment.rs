//! Sandboxes to attach, and the results.

use std::net::IpAddr;
use std::path::PathBuf;

use ipnetwork::IpNetwork;

use super::namespace_process::NamespaceProcess;
use crate::invoke::Parameters;
use crate::ports::PortMapping;
use crate::spec::list::Capabilities;
use crate::spec::result::Answer;

/// A sandbox to attach.
#[derive(Debug, Clone, Default)]
pub struct Attachment {
    /// ID of the sandbox: the key for [`Network::del`](super::Network::del).
    pub id: String,
    /// The sandbox's network namespace, for example `/proc/42/ns/net`.
    pub netns: PathBuf,
    /// The process to which this path belongs. After the process has ended, [`Network::reconcile`] does not adopt the
    /// sandbox. `None` if the path belongs to no process.
    ///
    /// [`Network::reconcile`]: super::Network::reconcile
    pub process: Option<NamespaceProcess>,
    /// Name of the interface to make inside, `eth0`.
    pub ifname: String,
    /// `CNI_ARGS` of the plugins, in order.
    pub args: Vec<(String, String)>,
    /// Host ports that are forwarded to the sandbox: the capability `portMappings`.
    pub ports: Vec<PortMapping>,
    /// Other capabilities by name (the CNI conventions): `bandwidth`, `dns` and so on. Requests by `ips` and `mac` are
    /// fulfilled exactly, or ADD fails.
    pub capabilities: Capabilities,
}

/// The result of an ADD.
#[derive(Debug, Clone)]
pub struct Attached {
    /// The addresses of the sandbox's interface with the prefix of the pod network.
    pub addresses: Vec<IpNetwork>,
    /// The gateways of the addresses. An address without a gateway has no entry.
    pub gateways: Vec<IpAddr>,
    /// Hardware address of the sandbox's interface. Empty if the plugins do not report it.
    pub mac: String,
    /// Interfaces of the host that the plugins made or used.
    pub host_interfaces: Vec<String>,
}

pub(super) fn parameters(at: &Attachment) -> Parameters {
    let mut capabilities = at.capabilities.clone();
    if !at.ports.is_empty() {
        capabilities.insert("portMappings".to_owned(), serde_json::json!(at.ports));
    }
    let args: Vec<String> = at.args.iter().map(|(key, value)| format!("{key}={value}")).collect();
    Parameters {
        container_id: at.id.clone(),
        netns: Some(at.netns.clone()),
        ifname: at.ifname.clone(),
        args: args.join(";"),
        capabilities,
    }
}

pub(super) fn attached(answer: &Answer, ifname: &str) -> Attached {
    let of_host = answer.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
    Attached {
        addresses: answer.addresses_of(ifname).map(|ip| ip.address).collect(),
        gateways: answer.addresses_of(ifname).filter_map(|ip| ip.gateway).collect(),
        mac: answer.inside(ifname).map(|interface| interface.mac.clone()).unwrap_or_default(),
        host_interfaces: of_host.map(|interface| interface.name.clone()).collect(),
    }
}
