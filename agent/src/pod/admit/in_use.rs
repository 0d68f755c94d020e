//! Check of host ports against sockets of the node: the kubelet API, the API server, the overlay, sshd and others.
//!
//! A host port is a firewall rule that takes precedence over sockets. Upstream's portmap shadows a listening process
//! silently, so that the pod receives connections for the node.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use coracle_cni::{Backend, Listener, Protocol, listeners};
use coracle_events::printable;
use k8s_openapi::api::core::v1::Pod;

use super::input::{HostPort, refuse};
use super::ports::host_ports;
use crate::config::{AgentConfig, ServiceProxyConfig};
use crate::pod::state::Verdict;

/// Rejects a pod with a host port that a process of the node uses. As upstream, a pod with the host's network is not
/// rejected: its process fails to listen on a used port.
pub(crate) fn check(pod: &Pod, config: &AgentConfig) -> Result<(), Verdict> {
    if pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true)) {
        return Ok(());
    }
    let mut refused = REFUSED.lock().unwrap_or_else(PoisonError::into_inner);
    check_free(host_ports(pod), &own_ports(config), &mut Sockets::default(), &mut refused, Instant::now())
}

/// Rejects host ports that a process of the node uses, or has used shortly before. The sockets are listed once for all
/// ports of a pod.
fn check_free(
    ports: impl IntoIterator<Item = HostPort>,
    own: &[OwnPort],
    sockets: &mut Sockets,
    refused: &mut RefusedSockets,
    now: Instant,
) -> Result<(), Verdict> {
    for wanted in ports {
        let Some((protocol, port)) = parse(&wanted) else { continue };
        let used = own.iter().find(|own| (own.protocol, own.port) == (protocol, port));
        if let Some(used) = used {
            return Err(port_in_use(&wanted, used.purpose));
        }
        let found = sockets.of(protocol).map_err(|error| ports_unknown(&error))?;
        if let Some(socket) = conflicting_socket(&wanted, port, found) {
            refused.keep(found.iter().filter(|socket| socket.port == port), now);
            let mut recent = RECENT.lock().unwrap_or_else(PoisonError::into_inner);
            return Err(port_in_use(&wanted, &recent.owner(socket.inode, now, owner)));
        }
        if refused.have(&wanted, (protocol, port), now) {
            return Err(port_in_use(&wanted, "a process that listened within the last two minutes"));
        }
    }
    Ok(())
}

/// A port of this agent.
pub(crate) struct OwnPort {
    protocol: Protocol,
    port: u16,
    /// What uses the port, for messages.
    purpose: &'static str,
}

/// The listening sockets of this node, listed at the first use of each protocol.
#[derive(Debug, Default)]
pub(crate) struct Sockets {
    listed: Vec<(Protocol, Vec<Listener>)>,
    /// The owners of sockets, by inode. A search reads the open files of all processes in the host's network namespace.
    /// The result of a search is cached, because many services may have the same used port.
    owners: HashMap<u32, String>,
}

// === impl Sockets ===

impl Sockets {
    /// The program of this node that uses a port of one of these addresses, if any.
    ///
    /// # Errors
    /// When the kernel does not list its sockets.
    pub(crate) fn program_at(
        &mut self,
        own: &[OwnPort],
        protocol: &str,
        port: u16,
        addresses: &[IpAddr],
    ) -> io::Result<Option<String>> {
        let wanted = HostPort { ip: String::new(), port: port.into(), protocol: protocol.to_owned() };
        let Some((protocol, port)) = parse(&wanted) else { return Ok(None) };
        let own = own.iter().find(|own| (own.protocol, own.port) == (protocol, port));
        if let Some(own) = own {
            return Ok(Some(own.purpose.to_owned()));
        }
        let taking = self.of(protocol)?.iter().find(|socket| {
            socket.port == port && addresses.iter().any(|address| socket.takes(Some(*address)))
        });
        let inode = taking.map(|socket| socket.inode);
        Ok(inode.map(|inode| self.owners.entry(inode).or_insert_with(|| owner(inode)).clone()))
    }

    fn of(&mut self, protocol: Protocol) -> io::Result<&[Listener]> {
        let place = match self.listed.iter().position(|(of, _)| *of == protocol) {
            Some(place) => place,
            None => {
                self.listed.push((protocol, listeners(protocol)?));
                self.listed.len() - 1
            }
        };
        Ok(self.listed.get(place).map(|(_, sockets)| sockets.as_slice()).unwrap_or_default())
    }
}

/// Protocols and numbers of the host ports at one of these addresses.
pub(crate) fn host_ports_at<'a>(all: &'a [HostPort], addresses: &[IpAddr]) -> HashSet<(&'a str, i32)> {
    let is_ours = |ip: &str| ip.is_empty() || ip.parse().is_ok_and(|ip: IpAddr| addresses.contains(&ip));
    all.iter().filter(|port| is_ours(&port.ip)).map(|port| (&*port.protocol, port.port)).collect()
}

/// UDP port of the overlay, if it encapsulates packets.
pub(crate) fn overlay_port(config: &AgentConfig) -> Option<u16> {
    let overlay = config.overlay.as_ref()?;
    match overlay.backend {
        Backend::Vxlan { port, .. } => Some(port),
        Backend::Udp => Some(overlay.udp_port),
        Backend::HostGw => None,
    }
}

/// Ports of this agent, even while it does not listen.
pub(crate) fn own_ports(config: &AgentConfig) -> Vec<OwnPort> {
    let of_overlay = |port| OwnPort { protocol: Protocol::Udp, port, purpose: "the overlay network" };
    let overlay = overlay_port(config).map(of_overlay);
    let port = config.kubelet_listen.port();
    let kubelet = OwnPort { protocol: Protocol::Tcp, port, purpose: "the kubelet API" };
    let proxy = proxy_port(config.service_proxy.as_ref());
    let server = server_port(config.api_server_port);
    std::iter::once(kubelet).chain(overlay).chain(proxy).chain(server).collect()
}

fn server_port(port: Option<u16>) -> Option<OwnPort> {
    Some(OwnPort { protocol: Protocol::Tcp, port: port?, purpose: "the API server" })
}

fn proxy_port(proxy: Option<&ServiceProxyConfig>) -> Option<OwnPort> {
    let (port, purpose) = (proxy?.healthz?.port(), "the health checks of the service proxy");
    Some(OwnPort { protocol: Protocol::Tcp, port, purpose })
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
fn conflicting_socket<'a>(wanted: &HostPort, port: u16, sockets: &'a [Listener]) -> Option<&'a Listener> {
    let address: Option<IpAddr> = wanted.ip.parse().ok();
    sockets.iter().find(|socket| socket.port == port && socket.takes(address))
}

fn port_in_use(wanted: &HostPort, by: &str) -> Verdict {
    let message = format!(
        "Pod was rejected: hostPort {}/{} is in use on this node by {by}; choose another hostPort",
        wanted.port, wanted.protocol
    );
    refuse("NodePorts", message)
}

fn ports_unknown(error: &io::Error) -> Verdict {
    let message = format!("Pod was rejected: cannot find out which ports this node uses: {error}");
    refuse("UnexpectedAdmissionError", message)
}

/// Time for which a port counts as used after a pod was rejected because of its socket. Otherwise a user who creates
/// pods in a loop would get the port of a program that restarts.
const REFUSED_FOR: Duration = Duration::from_secs(120);
/// Maximum sockets that count as used for that time.
const MAX_REFUSED: usize = 1000;
/// The sockets of the last rejections.
static REFUSED: Mutex<RefusedSockets> = Mutex::new(RefusedSockets { seen: BTreeMap::new() });

/// The sockets because of which pods were rejected.
struct RefusedSockets {
    /// When each socket was last seen, by protocol, port, address and [`Listener::v6_only`].
    seen: BTreeMap<(Protocol, u16, IpAddr, bool), Instant>,
}

impl RefusedSockets {
    /// Stores sockets that exist now. Further sockets than [`MAX_REFUSED`] are not stored.
    fn keep<'a>(&mut self, sockets: impl Iterator<Item = &'a Listener>, now: Instant) {
        self.seen.retain(|_, seen| now.duration_since(*seen) < REFUSED_FOR);
        for socket in sockets {
            let key = (socket.protocol, socket.port, socket.address, socket.v6_only);
            if self.seen.len() < MAX_REFUSED || self.seen.contains_key(&key) {
                self.seen.insert(key, now);
            }
        }
    }

    /// Whether the host port would receive packets of one of the sockets.
    fn have(&self, wanted: &HostPort, of: (Protocol, u16), now: Instant) -> bool {
        let (protocol, port) = of;
        let address: Option<IpAddr> = wanted.ip.parse().ok();
        let first = (protocol, port, IpAddr::V4(Ipv4Addr::UNSPECIFIED), false);
        let same_port = self.seen.range(first..).take_while(|(key, _)| (key.0, key.1) == of);
        let mut recent = same_port.filter(|(_, seen)| now.duration_since(**seen) < REFUSED_FOR);
        recent.any(|(&(protocol, port, at, v6_only), _)| {
            Listener { protocol, address: at, port, inode: 0, v6_only }.takes(address)
        })
    }
}

/// Time for which the result of a search is used again.
const CACHED_FOR: Duration = Duration::from_secs(60);
/// Maximum searches in that time. A user can create any number of pods with used ports, and each search blocks the
/// admission of all pods.
const MAX_SEARCHES: usize = 20;
/// The results of the last searches.
static RECENT: Mutex<RecentOwners> = Mutex::new(RecentOwners { owners: BTreeMap::new() });

/// Owners by the inode of their socket, and when each was found.
struct RecentOwners {
    owners: BTreeMap<u32, (Instant, String)>,
}

impl RecentOwners {
    /// The owner of a socket. After [`MAX_SEARCHES`] searches within [`CACHED_FOR`], further sockets get "another
    /// process" without a search.
    fn owner(&mut self, inode: u32, now: Instant, search: impl FnOnce(u32) -> String) -> String {
        self.owners.retain(|_, (found, _)| now.duration_since(*found) < CACHED_FOR);
        if let Some((_, owner)) = self.owners.get(&inode) {
            return owner.clone();
        }
        if self.owners.len() >= MAX_SEARCHES {
            return "another process".to_owned();
        }
        let owner = search(inode);
        self.owners.insert(inode, (now, owner.clone()));
        owner
    }
}

/// Maximum number of open files that [`owner`] examines. A pod may have any number of processes and files.
const MAX_EXAMINED_FILES: usize = 100_000;

/// Name and id of the process that has a socket. Processes whose first thread is in the host's network come first,
/// because other threads and other processes rarely have a socket of the host. A child has copies of its parent's
/// sockets until it executes another program, so the parent is named if it has the socket too.
fn owner(inode: u32) -> String {
    if inode == 0 {
        return "the kernel".to_owned();
    }
    let mut files = OpenFiles { link: format!("socket:[{inode}]"), budget: MAX_EXAMINED_FILES };
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    // /proc has other entries, such as `self`.
    let processes = processes.filter(|process| process.file_name().to_string_lossy().parse::<u32>().is_ok());
    let network = |process: &Path| fs::read_link(process.join("ns/net")).ok();
    let own = network(Path::new("/proc/self"));
    let (host, others): (Vec<_>, Vec<_>) =
        processes.map(|process| process.path()).partition(|process| network(process) == own);
    let found = host.into_iter().chain(others).find(|process| files.have_socket(process));
    let Some(mut process) = found else { return "another process".to_owned() };
    while let Some(parent) = parent(&process).filter(|parent| files.have_socket(parent)) {
        process = parent;
    }
    let name = coracle_tree::read_lossy(process.join("comm")).unwrap_or_default();
    let id = process.file_name().unwrap_or_default().to_string_lossy();
    format!("{} (process {id})", printable(name.trim(), 16))
}

/// The search for a socket in the open files of processes.
struct OpenFiles {
    /// The target of the link in `/proc/<pid>/fd` if the open file is the socket.
    link: String,
    /// Number of files that may still be examined.
    budget: usize,
}

impl OpenFiles {
    fn have_socket(&mut self, process: &Path) -> bool {
        let files = fs::read_dir(process.join("fd")).into_iter().flatten().flatten().take(self.budget);
        let mut files = files.inspect(|_| self.budget -= 1);
        files.any(|file| fs::read_link(file.path()).is_ok_and(|to| to.as_os_str() == self.link.as_str()))
    }
}

/// The directory of the parent process.
fn parent(process: &Path) -> Option<PathBuf> {
    let status = coracle_tree::read_lossy(process.join("status")).ok()?;
    let id = status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim();
    (id != "0").then(|| Path::new("/proc").join(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_service_proxy_has_the_port_of_its_health_checks() {
        let with = |healthz: Option<&str>| {
            let healthz = healthz.map(|address| address.parse().unwrap());
            let table = "t".to_owned();
            let proxy = ServiceProxyConfig {
                table,
                external_ips: Vec::new(),
                load_balancer_ips: Vec::new(),
                node_port_addresses: Vec::new(),
                healthz,
                status: None,
            };
            proxy_port(Some(&proxy)).map(|own| (own.protocol, own.port))
        };
        assert_eq!(with(Some("[::]:10256")), Some((Protocol::Tcp, 10256)));
        assert_eq!(with(None), None);
        assert!(proxy_port(None).is_none());
    }

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
            let found = conflicting_socket(&wanted(ip, port), port.try_into().unwrap(), &sockets).is_some();
            assert_eq!(found, expected, "{ip}:{port} {address}");
        }
    }

    #[test]
    fn a_port_stays_used_while_its_program_restarts() {
        let socket = |address: &str| Listener {
            protocol: Protocol::Tcp,
            address: address.parse().unwrap(),
            port: 22,
            inode: 0,
            v6_only: false,
        };
        let (mut refused, begin) = (RefusedSockets { seen: BTreeMap::new() }, Instant::now());
        let mut is_free = |ip: &str, port: i32, listed: Vec<Listener>, seconds: u64| {
            let wanted = HostPort { ip: ip.to_owned(), port, protocol: "TCP".to_owned() };
            let mut sockets = Sockets { listed: vec![(Protocol::Tcp, listed)], ..Sockets::default() };
            let now = begin + Duration::from_secs(seconds);
            check_free([wanted], &[], &mut sockets, &mut refused, now).is_ok()
        };
        assert!(is_free("", 22, Vec::new(), 0), "the socket was not seen yet");
        assert!(!is_free("", 22, vec![socket("192.0.2.1")], 0));
        assert!(!is_free("", 22, Vec::new(), 60));
        assert!(!is_free("192.0.2.1", 22, Vec::new(), 119));
        assert!(is_free("192.0.2.2", 22, Vec::new(), 60), "another address");
        assert!(is_free("", 21, Vec::new(), 60) && is_free("", 23, Vec::new(), 60), "other ports");
        assert!(is_free("", 22, Vec::new(), 120), "a rejection does not extend the time");
    }

    #[test]
    fn few_sockets_of_rejected_pods_are_stored() {
        let (mut refused, begin) = (RefusedSockets { seen: BTreeMap::new() }, Instant::now());
        let address = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        let socket = |port| Listener { protocol: Protocol::Udp, address, port, inode: 0, v6_only: false };
        let all: Vec<Listener> = (1..=2000).map(socket).collect();
        refused.keep(all.iter(), begin);
        assert_eq!(refused.seen.len(), MAX_REFUSED);
        refused.keep(all.iter().skip(1900), begin + REFUSED_FOR);
        assert_eq!(refused.seen.len(), 100);
    }

    #[test]
    fn the_sockets_are_listed_once_for_all_ports_of_a_pod() {
        // This socket does not exist, so a second list of the kernel's sockets would not contain it.
        let address = "0.0.0.0".parse().unwrap();
        let kernel = Listener { protocol: Protocol::Tcp, address, port: 0, inode: 0, v6_only: false };
        let mut sockets = Sockets { listed: vec![(Protocol::Tcp, vec![kernel])], ..Sockets::default() };
        let ports = |last| {
            let port = |port| HostPort { ip: String::new(), port, protocol: "TCP".to_owned() };
            [port(1), port(2), port(last)]
        };
        let mut refused = RefusedSockets { seen: BTreeMap::new() };
        let mut is_free = |last, own: &[OwnPort]| {
            check_free(ports(last), own, &mut sockets, &mut refused, Instant::now()).is_ok()
        };
        assert!(is_free(3, &[]));
        assert!(!is_free(0, &[]));
        // The API server does not listen while it restarts.
        let own = server_port(Some(2)).unwrap();
        assert!(!is_free(3, &[own]) && server_port(None).is_none());
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

    #[test]
    fn few_owners_are_searched_in_a_minute() {
        let mut recent = RecentOwners { owners: BTreeMap::new() };
        let (begin, searches) = (Instant::now(), std::cell::Cell::new(0));
        let mut owner = |inode: u32, seconds: u64| {
            recent.owner(inode, begin + Duration::from_secs(seconds), |inode| {
                searches.set(searches.get() + 1);
                inode.to_string()
            })
        };
        let of_many: Vec<String> = (0..30).map(|number| owner(number % 25, 1)).collect();
        assert_eq!(
            (of_many[19].as_str(), of_many[20].as_str(), of_many[25].as_str()),
            ("19", "another process", "0")
        );
        assert_eq!(searches.get(), MAX_SEARCHES);
        assert_eq!(owner(24, 61), "24");
    }

    #[test]
    fn the_parent_process_is_found() {
        let own = PathBuf::from(format!("/proc/{}", std::process::id()));
        assert_eq!(
            parent(&own),
            Some(PathBuf::from(format!("/proc/{}", std::os::unix::process::parent_id())))
        );
        assert_eq!(parent(Path::new("/proc/1")), None);
    }

    #[test]
    fn host_ports_of_pods_are_used() {
        let used = |ip: &str| [HostPort { ip: ip.to_owned(), port: 80, protocol: "TCP".to_owned() }];
        let own: [IpAddr; 1] = ["192.0.2.1".parse().unwrap()];
        for (ip, port, expected) in [
            ("", ("TCP", 80), true),
            ("192.0.2.1", ("TCP", 80), true),
            ("192.0.2.2", ("TCP", 80), false),
            ("", ("UDP", 80), false),
            ("", ("TCP", 81), false),
        ] {
            assert_eq!(host_ports_at(&used(ip), &own).contains(&port), expected, "{ip} {port:?}");
        }
    }

    #[test]
    fn listening_sockets_of_this_machine_are_found() {
        let server = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = server.local_addr().unwrap().port();
        let own = [OwnPort { protocol: Protocol::Tcp, port: 10250, purpose: "the kubelet API" }];
        let mut sockets = Sockets::default();
        let mut user =
            |address: &str| sockets.program_at(&own, "TCP", port, &[address.parse().unwrap()]).unwrap();
        assert!(user("127.0.0.1").is_some_and(|user| user.contains(&std::process::id().to_string())));
        assert_eq!(user("192.0.2.1"), None, "no packet to this address reaches the socket");
        assert_eq!(sockets.owners.len(), 1);
        let mut user =
            |address: &str| sockets.program_at(&own, "TCP", port, &[address.parse().unwrap()]).unwrap();
        drop(server);
        assert!(user("127.0.0.1").is_some(), "the list and the owners are cached together");
        assert!(
            sockets.program_at(&own, "TCP", 10250, &[]).unwrap().is_some(),
            "also while it does not listen"
        );
    }
}
