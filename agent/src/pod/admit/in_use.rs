//! Host ports that this node's own processes use: the kubelet API, the API server, the overlay, sshd and all others.
//!
//! A host port is a rule of the firewall that comes before sockets. Upstream's portmap shadows a process that listens
//! there, without a word; then a pod takes connections that were meant for the node.

use std::fs;
use std::io;
use std::net::IpAddr;

use coracle_cni::{Backend, Listener, Protocol, listeners};
use coracle_events::printable;
use k8s_openapi::api::core::v1::Pod;

use super::ports::{HostPort, host_ports};
use super::refuse;
use crate::pod::state::Verdict;
use crate::run::AgentConfig;

/// Refuses a pod whose host port something of the node uses. With the host's network a pod shadows nothing: there
/// its process cannot listen, as upstream.
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

/// Ports of this agent, also when nothing listens there at the moment.
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

/// The socket whose packets a host port would take.
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

/// The process that has a socket, by name and number.
fn owner(inode: u32) -> String {
    if inode == 0 {
        return "the kernel".to_owned();
    }
    let link = format!("socket:[{inode}]");
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    // Beside the numbers there is `self`, among others.
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
