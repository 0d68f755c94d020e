//! Upstream servers of the host's `resolv.conf` and of stub domains, their health, and the detection of loops.

use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use hickory_proto::rr::{Name, RecordType};
use tokio::time::Instant;

use crate::cache::Question;
use crate::metrics::{ServerMetrics, ServerMetricsByAddress};

/// Maximum servers of a `resolv.conf`, as in the C library.
const SERVERS_MAX: usize = 3;
/// Maximum size of a `resolv.conf` that is read.
const RESOLV_CONF_MAX: u64 = 64 << 10;
/// Number of failures after which a server is tried last.
const FAILURES: u32 = 2;
/// Time for which a failing server is tried last. It doubles with each failure, up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(2);
/// Maximum time for which a failing server is tried last.
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Time without queries to a server that forwards them back to this node.
const LOOP_BACKOFF: Duration = Duration::from_secs(300);
/// Port of DNS servers in `resolv.conf`.
const PORT: u16 = 53;

/// A domain whose names are resolved by its own servers instead of the host's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StubDomain {
    /// The domain.
    pub domain: String,
    /// Its servers, in the order in which they are queried.
    pub servers: Vec<SocketAddr>,
}

/// A server and its health.
#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) address: SocketAddr,
    pub(crate) metrics: Arc<ServerMetrics>,
    health: Mutex<Health>,
}

#[derive(Debug, Default)]
struct Health {
    /// Failures since the last answer.
    failures: u32,
    /// Time of the last answer.
    answered: Option<Instant>,
    /// The server is tried last until this time.
    down_until: Option<Instant>,
    /// The server gets no queries until this time, because it forwards them back to this node.
    loops_until: Option<Instant>,
    /// Name in the probe for a loop.
    probe: Option<Name>,
}

/// The upstream servers of all domains.
#[derive(Debug)]
pub(crate) struct Servers {
    resolv_conf: PathBuf,
    /// Addresses at which this node serves DNS. Queries are never sent to these addresses.
    own: Vec<IpAddr>,
    /// The longest domain first.
    stubs: Vec<(Name, Vec<Arc<Server>>)>,
    host: Mutex<Host>,
}

#[derive(Debug, Default)]
struct Host {
    modified: Option<SystemTime>,
    all: Vec<Arc<Server>>,
}

// === impl Server ===

impl Server {
    fn new(address: SocketAddr) -> Arc<Self> {
        Arc::new(Self { address, metrics: Arc::default(), health: Mutex::default() })
    }

    fn with<T>(&self, act: impl FnOnce(&mut Health) -> T) -> T {
        act(&mut self.health.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn succeeded(&self) {
        self.with(|health| {
            health.failures = 0;
            health.answered = Some(Instant::now());
            health.down_until = None;
        });
    }

    pub(crate) fn failed(&self) {
        self.with(|health| {
            health.failures = health.failures.saturating_add(1);
            if health.failures >= FAILURES {
                let backoff = FIRST_BACKOFF * 2u32.saturating_pow((health.failures - FAILURES).min(5));
                health.down_until = Some(Instant::now() + backoff.min(MAX_BACKOFF));
            }
        });
    }

    /// Records that a query that was sent at the time `sent_at` got no answer. Returns whether this counts as a failure
    /// of the server. A missing answer does not count if the server has answered another query since then: the name is
    /// slow, not the server. Otherwise the owner of a name could make a working server count as failing.
    pub(crate) fn timed_out(&self, sent_at: Instant) -> bool {
        let is_failure = self.with(|health| health.answered.is_none_or(|answered| answered < sent_at));
        if is_failure {
            self.failed();
        }
        is_failure
    }

    pub(crate) fn is_up(&self) -> bool {
        self.with(|health| health.down_until.is_none_or(|until| until <= Instant::now()))
    }

    fn loops(&self) -> bool {
        self.with(|health| health.loops_until.is_some_and(|until| until > Instant::now()))
    }

    /// The probe for a loop. `None` if it was sent already.
    pub(crate) fn probe(&self) -> Option<Question> {
        let name =
            Name::from_ascii(format!("{:x}.{:x}.", rand::random::<u64>(), rand::random::<u64>())).ok()?;
        self.with(|health| match health.probe {
            Some(_) => None,
            None => Some(Question { name: health.probe.insert(name).clone(), kind: RecordType::HINFO }),
        })
    }

    /// Records a loop if a query that arrived at this node has the name of the server's [`probe`](Self::probe). Returns
    /// whether the query was the probe.
    fn received(&self, name: &Name) -> bool {
        self.with(|health| {
            let is_own = health.probe.as_ref() == Some(name);
            if is_own {
                health.loops_until = Some(Instant::now() + LOOP_BACKOFF);
                // After this time the server is probed again.
                health.probe = None;
            }
            is_own
        })
    }
}

// === impl Servers ===

impl Servers {
    pub(crate) fn new(resolv_conf: PathBuf, own: Vec<IpAddr>, stubs: &[StubDomain]) -> Self {
        let mut all: Vec<_> = stubs
            .iter()
            .filter_map(|stub| {
                let mut domain = Name::from_ascii(&stub.domain).ok()?.to_lowercase();
                domain.set_fqdn(true);
                let servers = stub.servers.iter().filter(|server| !own.contains(&server.ip()));
                Some((domain, servers.map(|server| Server::new(*server)).collect::<Vec<_>>()))
            })
            .collect();
        all.sort_by_key(|(domain, _)| std::cmp::Reverse(domain.num_labels()));
        Self { resolv_conf, own, stubs: all, host: Mutex::default() }
    }

    /// The servers of a lower-case name in the order of queries. Failing servers come last.
    pub(crate) fn of(&self, name: &Name) -> Vec<Arc<Server>> {
        let stub = self.stubs.iter().find(|(domain, _)| domain.zone_of(name));
        let mut all = stub.map_or_else(|| self.of_host(), |(_, servers)| servers.clone());
        all.retain(|server| !server.loops());
        working_first(all, |server| server.is_up())
    }

    /// Records a loop if a query is a probe that a server forwarded back. Returns whether the query was a probe.
    pub(crate) fn detect_loop(&self, name: &Name, kind: RecordType) -> bool {
        if kind != RecordType::HINFO {
            return false;
        }
        let host = self.host.lock().unwrap_or_else(PoisonError::into_inner).all.clone();
        let mut all = host.iter().chain(self.stubs.iter().flat_map(|(_, servers)| servers));
        let Some(server) = all.find(|server| server.received(name)) else { return false };
        tracing::error!(
            server = %server.address,
            "a DNS server forwards queries back to this node and is not used; remove it from the node's resolv-conf"
        );
        true
    }

    /// The counters of the servers of stub domains and of the host's `resolv.conf`, as it was last read. If a change
    /// removes a server from that file, the counters of the server are lost.
    pub(crate) fn metrics(&self) -> ServerMetricsByAddress {
        let mut all = ServerMetricsByAddress::new();
        let host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        for server in host.all.iter().chain(self.stubs.iter().flat_map(|(_, servers)| servers)) {
            all.entry(server.address).or_default().push(Arc::clone(&server.metrics));
        }
        all
    }

    /// The servers of the host's `resolv.conf`, which is read again when it changes. If the file cannot be read, for
    /// example for lack of descriptors, the former servers stay, and the next query reads the file again.
    fn of_host(&self) -> Vec<Arc<Server>> {
        let modified = std::fs::metadata(&self.resolv_conf).and_then(|meta| meta.modified()).ok();
        let mut host = self.host.lock().unwrap_or_else(PoisonError::into_inner);
        if modified.is_none() || host.modified != modified {
            match read(&self.resolv_conf) {
                Ok(text) => host.replace(parse(&text, &self.own), modified),
                Err(error) if error.kind() == io::ErrorKind::NotFound => host.replace(Vec::new(), None),
                Err(error) => tracing::debug!(%error, "cannot read the node's resolv.conf"),
            }
        }
        host.all.clone()
    }
}

// === impl Host ===

impl Host {
    /// Sets the servers of a `resolv.conf` and the modification time of the file. Known servers keep their health.
    fn replace(&mut self, addresses: Vec<SocketAddr>, modified: Option<SystemTime>) {
        let known = |address| self.all.iter().find(|server| server.address == address).cloned();
        let all = addresses.into_iter().map(|one| known(one).unwrap_or_else(|| Server::new(one)));
        self.all = all.collect();
        self.modified = modified;
    }
}

/// The servers in their order, except that servers that are down come last. The state of each server is read once: the
/// state may change meanwhile, and a sort by changing keys may panic.
fn working_first(mut all: Vec<Arc<Server>>, is_up: impl Fn(&Server) -> bool) -> Vec<Arc<Server>> {
    all.sort_by_cached_key(|server| !is_up(server));
    all
}

/// Reads a `resolv.conf`. Bytes that are not UTF-8, for example in a comment, are replaced.
fn read(path: &std::path::Path) -> io::Result<String> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(RESOLV_CONF_MAX).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// The servers of a `resolv.conf` without this node's own addresses.
fn parse(text: &str, own: &[IpAddr]) -> Vec<SocketAddr> {
    let server = |line: &str| {
        let mut words = line.split_whitespace();
        words.next().filter(|word| *word == "nameserver").and_then(|_| words.next()).and_then(parse_address)
    };
    let all = text.lines().filter_map(server).filter(|server| !own.contains(&server.ip()));
    all.take(SERVERS_MAX).collect()
}

/// Parses the address of a server. A link-local address names its interface, for example `fe80::1%eth0`.
fn parse_address(text: &str) -> Option<SocketAddr> {
    if let Ok(address) = text.parse() {
        return Some(SocketAddr::new(address, PORT));
    }
    let (address, interface) = text.split_once('%')?;
    let address: Ipv6Addr = address.parse().ok()?;
    let index = interface.parse().ok().or_else(|| nix::net::if_::if_nametoindex(interface).ok())?;
    Some(SocketAddrV6::new(address, PORT, 0, index).into())
}

/// Parses any bytes as a `resolv.conf`, for the fuzz target.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    assert!(parse(&String::from_utf8_lossy(data), &[]).len() <= SERVERS_MAX);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_of_the_file_are_used_except_this_node() {
        let text = "# x\nnameserver 10.43.0.10\nnameserver 9.9.9.9\nsearch nameserver\nnameserver fd00::1\n\
            nameserver x\nnameserver 1.1.1.1\nnameserver 8.8.8.8\n";
        let own = ["10.43.0.10".parse().unwrap()];
        let all: Vec<String> = parse(text, &own).iter().map(|server| server.to_string()).collect();
        assert_eq!(all, ["9.9.9.9:53", "[fd00::1]:53", "1.1.1.1:53"]);
    }

    #[test]
    fn link_local_servers_have_an_interface() {
        let index = nix::net::if_::if_nametoindex("lo").unwrap();
        let text =
            "nameserver fe80::1%lo\nnameserver fe80::2%7\nnameserver fe80::3%\nnameserver 192.0.2.1%lo\n";
        let server = |last, index| {
            let address = Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, last);
            SocketAddr::from(SocketAddrV6::new(address, PORT, 0, index))
        };
        assert_eq!(parse(text, &[]), [server(1, index), server(2, 7)]);
    }

    fn stubs() -> Servers {
        let stub = |domain: &str, servers: &[&str]| StubDomain {
            domain: domain.to_owned(),
            servers: servers.iter().map(|server| server.parse().unwrap()).collect(),
        };
        let all = [
            stub("corp.example", &["192.0.2.1:53", "192.0.2.2:5353", "10.43.0.10:53"]),
            stub("Lab.corp.example.", &["192.0.2.3:53"]),
        ];
        Servers::new("/nonexistent".into(), vec!["10.43.0.10".parse().unwrap()], &all)
    }

    fn asked(servers: &Servers, name: &str) -> Vec<String> {
        let all = servers.of(&Name::from_ascii(name).unwrap());
        all.iter().map(|server| server.address.to_string()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_stub_domain_decides_and_failing_servers_come_last() {
        let servers = stubs();
        assert_eq!(asked(&servers, "a.corp.example."), ["192.0.2.1:53", "192.0.2.2:5353"]);
        assert_eq!(asked(&servers, "lab.corp.example."), ["192.0.2.3:53"]);
        assert!(asked(&servers, "xcorp.example.").is_empty(), "the host has no servers");
        let first = servers.of(&Name::from_ascii("corp.example.").unwrap()).remove(0);
        first.failed();
        assert_eq!(asked(&servers, "corp.example.")[0], "192.0.2.1:53", "one failure may be a lost packet");
        first.failed();
        assert_eq!(asked(&servers, "corp.example."), ["192.0.2.2:5353", "192.0.2.1:53"]);
        tokio::time::advance(FIRST_BACKOFF).await;
        assert_eq!(asked(&servers, "corp.example.")[0], "192.0.2.1:53");
        (0..40).for_each(|_| first.failed());
        tokio::time::advance(MAX_BACKOFF).await;
        assert_eq!(asked(&servers, "corp.example.")[0], "192.0.2.1:53");
        first.succeeded();
        first.failed();
        assert!(first.is_up());
    }

    #[test]
    fn the_state_of_each_server_is_read_once_for_an_order() {
        // A server may fail or recover during the sort. The standard library may panic if the order of two items
        // changes, but only for more than 20 items.
        let all: Vec<_> =
            (0..200u16).map(|port| Server::new(SocketAddr::from(([192, 0, 2, 1], port)))).collect();
        let reads = std::cell::Cell::new(0);
        let sorted = working_first(all, |server| {
            reads.set(reads.get() + 1);
            server.address.port() % 2 == 0
        });
        assert_eq!(reads.get(), 200);
        let ports: Vec<u16> = sorted.iter().map(|server| server.address.port()).collect();
        assert!(ports[..100].iter().all(|port| port % 2 == 0) && ports[..100].is_sorted());
        assert!(ports[100..].iter().all(|port| port % 2 == 1) && ports[100..].is_sorted());
    }

    #[test]
    fn a_file_that_could_not_be_read_is_read_again() {
        let path = std::env::temp_dir().join(format!("resolv-{:x}", rand::random::<u64>()));
        let servers = Servers::new(path.clone(), Vec::new(), &[]);
        let asked = || servers.of_host().iter().map(|server| server.address.to_string()).collect::<Vec<_>>();
        let modified = |seconds| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        // Each write sets its own modification time, so the clock tick of the file system has no effect.
        let write = |text: &[u8], seconds| {
            std::fs::write(&path, text).unwrap();
            std::fs::File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_modified(modified(seconds))
                .unwrap();
        };
        assert!(asked().is_empty(), "the file does not exist");
        write(b"# caf\xe9\nnameserver 192.0.2.1\n", 1);
        assert_eq!(asked(), ["192.0.2.1:53"], "a comment in another encoding");
        std::fs::remove_file(&path).unwrap();
        // A directory has a modification time, but it cannot be read.
        std::fs::create_dir(&path).unwrap();
        std::fs::File::open(&path).unwrap().set_modified(modified(2)).unwrap();
        assert_eq!(asked(), ["192.0.2.1:53"], "the former servers stay");
        std::fs::remove_dir(&path).unwrap();
        write(b"nameserver 192.0.2.2\n", 2);
        assert_eq!(asked(), ["192.0.2.2:53"], "the time is the time of the failed attempt");
        std::fs::remove_file(&path).unwrap();
        assert!(asked().is_empty(), "the file was removed");
    }

    #[tokio::test(start_paused = true)]
    async fn slow_names_do_not_make_a_working_server_count_as_failing() {
        let server = Server::new("192.0.2.1:53".parse().unwrap());
        for _ in 0..9 {
            let asked = Instant::now();
            tokio::time::advance(Duration::from_secs(1)).await;
            server.succeeded();
            tokio::time::advance(Duration::from_secs(1)).await;
            assert!(!server.timed_out(asked));
        }
        assert!(server.is_up());
        for _ in 0..FAILURES {
            let asked = Instant::now();
            tokio::time::advance(Duration::from_secs(2)).await;
            assert!(server.timed_out(asked));
        }
        assert!(!server.is_up());
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_returns_the_probe_is_not_queried() {
        let servers = stubs();
        let server = servers.of(&Name::from_ascii("lab.corp.example.").unwrap()).remove(0);
        let Question { name, kind } = server.probe().unwrap();
        assert!(server.probe().is_none(), "once");
        assert!(!servers.detect_loop(&Name::from_ascii("x.y.").unwrap(), kind));
        assert!(!servers.detect_loop(&name, RecordType::A));
        assert!(servers.detect_loop(&name, kind) && asked(&servers, "lab.corp.example.").is_empty());
        tokio::time::advance(LOOP_BACKOFF).await;
        assert_eq!(asked(&servers, "lab.corp.example.").len(), 1);
        assert!(server.probe().is_some(), "the server is probed again");
    }
}
