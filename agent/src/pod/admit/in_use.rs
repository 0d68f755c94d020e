//! Check of host ports against sockets of the node: the kubelet API, the API server, the overlay, sshd and others.
//!
//! A host port is a firewall rule that takes precedence over sockets. Upstream's portmap shadows a listening process
//! silently, so that the pod receives connections for the node.

use std::fs;
use std::io;
use std::net::IpAddr;

use coracle_cni::{Backend, Listener, Protocol, listeners};
use coracle_events::printable;
use k8s_openapi::api::core::v1::Pod;

use super::facts::{HostPort, refuse};
use super::ports::host_ports;
use crate::config::AgentConfig;
use crate::pod::state::Verdict;

/// Rejects a pod with a host port that a process of the node uses. A pod with the host's network shadows nothing: its
/// process cannot listen there, as upstream.
pub(crate) fn check(pod: &Pod, config: &AgentConfig) -> Result<(), Verdict> {
    if pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true)) {
        return Ok(());
    }
    let own = own(config);
    for wanted in host_ports(pod) {
        let Some((protocol, port)) = parse(&wanted) else { continue };
        let used = own.iter().find(|(p, number, _)| (*p, *number) == (protocol, port));
        if let Some((.., by)) = used {
            return Err(taken(&wanted, by));
        }
        let found = listeners(protocol).map_err(|error| unknown(&error))?;
        if let Some(socket) = shadowed(&wanted, port, &found) {
            return Err(taken(&wanted, &owner(socket.inode)));
        }
    }
    Ok(())
}

/// Ports of this agent, also while it does not listen.
fn own(config: &AgentConfig) -> Vec<(Protocol, u16, &'static str)> {
    let overlay = config.overlay.iter().filter_map(|overlay| match overlay.backend {
        Backend::Vxlan { port, .. } => Some(port),
        Backend::Udp => Some(overlay.udp_port),
        Backend::HostGw => None,
    });
    let overlay = overlay.map(|port| (Protocol::Udp, port, "the network between nodes"));
    std::iter::once((Protocol::Tcp, config.kubelet_listen.port(), "the kubelet API")).chain(overlay).collect()
}

fn parse(wanted: &HostPort) -> Option<(Protocol, u16)> {
    let protocol = match wanted.protocol.as_str() {
        "UDP" => Protocol::Udp,
        "SCTP" => Protocol::Sctp,
        _ => Protocol::Tcp,
    };
    Some((protocol, u16::try_from(wanted.port).ok()?))
}

/// The socket whose packets a host port would receive.
fn shadowed<'a>(wanted: &HostPort, port: u16, sockets: &'a [Listener]) -> Option<&'a Listener> {
    let address: Option<IpAddr> = wanted.ip.parse().ok();
    sockets.iter().find(|socket| socket.port == port && socket.takes(address))
}

fn taken(wanted: &HostPort, by: &str) -> Verdict {
    let message = format!(
        "Pod was rejected: hostPort {}/{} is in use on this node by {by}; choose another hostPort",
        wanted.port, wanted.protocol
    );
    refuse("NodePorts", message)
}

fn unknown(error: &io::Error) -> Verdict {
    let message = format!("Pod was rejected: cannot find out which ports this node uses: {error}");
    refuse("UnexpectedAdmissionError", message)
}

/// Name and id of the process that has a socket.
fn owner(inode: u32) -> String {
    if inode == 0 {
        return "the kernel".to_owned();
    }
    let link = format!("socket:[{inode}]");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    // /proc has other entries, such as `self`.
    let processes = processes.filter(|process| process.file_name().to_string_lossy().parse::<u32>().is_ok());
    let mut processes = processes.filter(|process| {
        let files = fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten();
        files
            .into_iter()
            .any(|file| fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == link.as_str()))
    });
    let Some(process) = processes.next() else { return "another process".to_owned() };
    let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
    format!("{} (process {})", printable(name.trim(), 16), process.file_name().to_string_lossy())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_port_shadows_sockets_of_its_address_and_port() {
        let socket = |address: &str| Listener {
            protocol: Protocol::Tcp,
            address: address.parse().unwrap(),
            port: 22,
            inode: 1,
            v6_only: false,
        };
        let wanted = |ip: &str, port| HostPort { ip: ip.to_owned(), port, protocol: "TCP".to_owned() };
        for (ip, port, address, expected) in [
            ("", 22, "0.0.0.0", true),
            ("", 22, "127.0.0.1", true),
            ("", 22, "::", true),
            ("192.0.2.1", 22, "::", true),
            ("192.0.2.1", 22, "192.0.2.1", true),
            ("192.0.2.1", 22, "192.0.2.2", false),
            ("192.0.2.1", 22, "::1", false),
            ("", 23, "0.0.0.0", false),
        ] {
            let sockets = [socket(address)];
            let found = shadowed(&wanted(ip, port), port.try_into().unwrap(), &sockets).is_some();
            assert_eq!(found, expected, "{ip}:{port} {address}");
        }
    }

    #[test]
    fn the_owner_of_a_socket_is_named() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        let found = listeners(Protocol::Tcp).unwrap();
        let socket = found.iter().find(|socket| socket.port == port).unwrap();
        assert!(owner(socket.inode).ends_with(&format!("(process {})", std::process::id())));
        assert_eq!(owner(0), "the kernel");
    }
}
