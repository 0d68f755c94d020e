//! Sockets: queries by UDP and TCP, from permitted clients only.

use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket as StdUdpSocket};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use coracle_connections::Share;
use ipnetwork::IpNetwork;
use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket, sockopt,
};
use tokio::net::{TcpListener, UdpSocket};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::fair_queue::FairQueue;
use crate::forward::Upstream;
use crate::limit::Limit;
use crate::metrics::{ForwarderState, ReceivedQuery};
use crate::reply::{Reply, Response, Sources, Transport, reply};
use crate::tcp;
use crate::zone::Zone;

/// Maximum bytes of a query.
const QUERY_MAX: usize = 4096;
/// Maximum queries that wait for other servers. It is lower if the process has few descriptors: each waiting query may
/// start a query to a server, which needs a descriptor.
const FORWARDS: usize = 1024;
/// Maximum queries of each client that wait for other servers.
const FORWARDS_OF_CLIENT: usize = 128;
/// Maximum TCP connections of each client.
const CONNECTIONS_OF_CLIENT: usize = 16;
/// Maximum queries that are received before some of them are answered.
const RECEIVED_MAX: usize = 1024;
/// Maximum number of replies that are sent before the socket is read again. While its buffer is full, the kernel drops
/// the queries of all clients.
const REPLIES_MAX: usize = 16;
/// Size of the kernel's buffer for queries, in bytes.
const KERNEL_BUFFER: usize = 1 << 20;
/// Delay after an error of a socket, before the next attempt.
const ERROR_DELAY: Duration = Duration::from_millis(100);

/// The reason why the server cannot serve.
#[derive(Debug, thiserror::Error)]
#[error("cannot serve DNS at {address} by {protocol}")]
pub struct ServerError {
    address: SocketAddr,
    protocol: &'static str,
    #[source]
    source: io::Error,
}

/// Whether an address belongs to a pod of the node.
pub type IsPod = Arc<dyn Fn(IpAddr) -> bool + Send + Sync>;

/// A DNS server.
pub struct Server {
    pub(crate) zone: Zone,
    pub(crate) upstream: Arc<Upstream>,
    /// Networks of the node's pods. Clients outside of them are refused, except the node itself and addresses for which
    /// `is_pod` returns true.
    clients: watch::Receiver<Vec<IpNetwork>>,
    /// Recognizes pods outside of the networks in `clients`: a network plugin may have ranges of its own.
    is_pod: IsPod,
    forwards: Limit,
    connections: Limit,
}

// === impl Server ===

impl Server {
    /// Creates a server that answers names of the zone and forwards all other names.
    #[must_use]
    pub fn new(zone: Zone, upstream: Upstream, clients: watch::Receiver<Vec<IpNetwork>>) -> Self {
        let upstream = Arc::new(upstream);
        let forwards = Limit::new(FORWARDS.min(upstream.max_of_clients()), FORWARDS_OF_CLIENT);
        upstream.metrics.show_forwarder(Arc::downgrade(&upstream) as Weak<dyn ForwarderState>);
        Self {
            zone,
            upstream,
            clients,
            is_pod: Arc::new(|_address| false),
            forwards,
            connections: Limit::new(Share::DnsConnections.count(), CONNECTIONS_OF_CLIENT),
        }
    }

    /// Sets the function that finds pods outside of the networks of pods. The server calls the function for each query
    /// from outside of these networks, so it must be fast.
    #[must_use]
    pub fn with_pods(self, is_pod: IsPod) -> Self {
        Self { is_pod, ..self }
    }

    /// Serves at these addresses until dropped.
    ///
    /// # Errors
    /// When an address cannot be bound. Nothing is served then.
    pub async fn run(self, addresses: &[SocketAddr]) -> Result<(), ServerError> {
        let server = Arc::new(self);
        let mut sockets = Vec::new();
        for address in addresses {
            let failed = |protocol| {
                let address = *address;
                move |source| ServerError { address, protocol, source }
            };
            let udp = udp(*address).map_err(failed("UDP"))?;
            let tcp = tcp_listener(*address).map_err(failed("TCP"))?;
            sockets.push((Arc::new(udp), tcp));
        }
        let mut tasks = JoinSet::new();
        for (udp, listener) in sockets {
            tasks.spawn(Arc::clone(&server).serve_udp(udp));
            tasks.spawn(Arc::clone(&server).serve_tcp(listener));
        }
        while tasks.join_next().await.is_some() {}
        Ok(())
    }

    async fn serve_udp(self: Arc<Self>, socket: Arc<UdpSocket>) {
        let own = socket.local_addr().map(|address| address.ip()).ok();
        let mut buffer = vec![0; QUERY_MAX];
        let mut queue = FairQueue::new();
        loop {
            let received = match queue.is_empty() {
                true => socket.readable().await,
                false => Ok(()),
            };
            let received = received.and_then(|()| self.receive(&socket, own, &mut buffer, &mut queue));
            if let Err(error) = received {
                tracing::debug!(%error, "cannot receive a DNS query");
                tokio::time::sleep(ERROR_DELAY).await;
            }
            for (client, query) in std::iter::from_fn(|| queue.pop()).take(REPLIES_MAX) {
                self.answer_udp(&socket, client, &query);
            }
            if !queue.is_empty() {
                tokio::task::yield_now().await;
            }
        }
    }

    /// Queues the queries that have arrived. Queries above the limits are dropped here, because otherwise the kernel
    /// would drop queries of other clients.
    fn receive(
        &self,
        socket: &UdpSocket,
        own: Option<IpAddr>,
        buffer: &mut [u8],
        queue: &mut FairQueue<(SocketAddr, Vec<u8>)>,
    ) -> io::Result<()> {
        for _ in 0..RECEIVED_MAX {
            let (size, client) = match socket.try_recv_from(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                received => received?,
            };
            if let Some(query) = buffer.get(..size).filter(|_| self.permits(client.ip(), own.as_ref())) {
                queue.push(client.ip(), (client, query.to_vec()));
            }
        }
        Ok(())
    }

    fn answer_udp(&self, socket: &Arc<UdpSocket>, client: SocketAddr, query: &[u8]) {
        let began = Instant::now();
        let (socket, size) = (Arc::clone(socket), query.len());
        let udp_query = UdpQuery { socket, client, size, began };
        match reply(query, Transport::Udp, self.sources()) {
            Reply::Nothing => {}
            Reply::Now(response) => udp_query.answer(&self.upstream, &response),
            Reply::Forward(pending) => {
                let Some(permit) = self.forwards.take(client.ip()) else {
                    let response = pending.without_permit(&self.upstream);
                    return udp_query.answer(&self.upstream, &response);
                };
                let upstream = Arc::clone(&self.upstream);
                tokio::spawn(async move {
                    let response = pending.resolve(Arc::clone(&upstream), permit).await;
                    udp_query.answer(&upstream, &response);
                });
            }
        }
    }

    async fn serve_tcp(self: Arc<Self>, listener: TcpListener) {
        let own = listener.local_addr().map(|address| address.ip());
        loop {
            let (stream, client) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::debug!(%error, "cannot accept a DNS connection");
                    tokio::time::sleep(ERROR_DELAY).await;
                    continue;
                }
            };
            let permitted = self.permits(client.ip(), own.as_ref().ok());
            // A connection above the limits is closed.
            let Some(permit) =
                Some(()).filter(|()| permitted).and_then(|()| self.connections.take(client.ip()))
            else {
                continue;
            };
            let server = Arc::clone(&self);
            tokio::spawn(async move {
                let answer = |query: Vec<u8>| {
                    let server = Arc::clone(&server);
                    async move { server.answer(&query, client.ip()).await }
                };
                tcp::serve(stream, answer).await;
                drop(permit);
            });
        }
    }

    /// The reply to a query by TCP.
    async fn answer(&self, query: &[u8], client: IpAddr) -> Option<Vec<u8>> {
        let began = Instant::now();
        let response = match reply(query, Transport::Tcp, self.sources()) {
            Reply::Nothing => return None,
            Reply::Now(response) => response,
            Reply::Forward(pending) => match self.forwards.take(client) {
                Some(permit) => pending.resolve(Arc::clone(&self.upstream), permit).await,
                None => pending.without_permit(&self.upstream),
            },
        };
        record(&response, &self.upstream, ReceivedBy { client, is_tcp: true, began });
        let records = response.records();
        let build = || if response.is_cut() { self.whole_reply(query).unwrap_or(response) } else { response };
        let work = || build().decoded().encode();
        let reply = self.upstream.large.with_records(client, records, work).await??;
        self.upstream.metrics.record_sizes(true, query.len(), reply.len());
        Some(reply)
    }

    /// The reply by TCP with all records.
    fn whole_reply(&self, query: &[u8]) -> Option<Response> {
        match reply(query, Transport::TcpLarge, self.sources()) {
            Reply::Now(response) => Some(response),
            Reply::Forward(_) | Reply::Nothing => None,
        }
    }

    fn sources(&self) -> Sources<'_> {
        Sources { zone: &self.zone, upstream: &self.upstream }
    }

    /// Whether the client is a pod or a process of this node.
    fn permits(&self, client: IpAddr, own: Option<&IpAddr>) -> bool {
        let networks = self.clients.borrow();
        let is_pod = networks.iter().any(|network| network.contains(client));
        let is_node = client.is_loopback() || Some(&client) == own;
        is_pod || is_node || (self.is_pod)(client) || is_local_address(client)
    }
}

/// A query that arrived by UDP.
struct UdpQuery {
    socket: Arc<UdpSocket>,
    client: SocketAddr,
    /// Bytes of the query.
    size: usize,
    began: Instant,
}

// === impl UdpQuery ===

impl UdpQuery {
    /// Sends the reply. If the kernel's buffer is full, the reply is dropped. Otherwise a client that does not receive
    /// its replies would delay other clients. A client repeats a query without a reply.
    fn answer(&self, upstream: &Upstream, response: &Response) {
        let by = ReceivedBy { client: self.client.ip(), is_tcp: false, began: self.began };
        record(response, upstream, by);
        // The encoding ends at the maximum size of a reply by UDP, so it needs no permit.
        let Some(reply) = response.encode() else { return };
        upstream.metrics.record_sizes(false, self.size, reply.len());
        if let Err(error) = self.socket.try_send_to(&reply, self.client) {
            tracing::debug!(%error, client = %self.client, "cannot send a DNS reply");
        }
    }
}

/// The transport and the arrival time of a query.
struct ReceivedBy {
    client: IpAddr,
    is_tcp: bool,
    began: Instant,
}

/// Counts the response in the metrics.
fn record(response: &Response, upstream: &Upstream, by: ReceivedBy) {
    let reply = &response.message;
    let kind = reply.queries.first().map(|query| query.query_type);
    let received = ReceivedQuery { is_tcp: by.is_tcp, is_ipv4: by.client.is_ipv4(), kind };
    upstream.metrics.record_response(received, reply.metadata.response_code, by.began.elapsed());
}

/// Whether an interface of this machine has the address. If a bind to the address fails, no interface has the address,
/// and the interfaces need not be listed. If the bind succeeds, the interfaces are listed: a bind also succeeds for an
/// absent address if the sysctl `ip_nonlocal_bind` is set.
fn is_local_address(address: IpAddr) -> bool {
    StdUdpSocket::bind((address, 0)).is_ok() && is_of_interface(address)
}

fn is_of_interface(address: IpAddr) -> bool {
    let interfaces = nix::ifaddrs::getifaddrs().into_iter().flatten();
    interfaces.filter_map(|interface| interface.address).any(|own| match address {
        IpAddr::V4(ip) => own.as_sockaddr_in().is_some_and(|own| own.ip() == ip),
        IpAddr::V6(ip) => own.as_sockaddr_in6().is_some_and(|own| own.ip() == ip),
    })
}

/// Binds a socket. It does not set `SO_REUSEPORT`: otherwise a pod on the host's network could receive a share of the
/// queries.
fn bind_socket(address: SocketAddr, kind: SockType) -> nix::Result<std::os::fd::OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let descriptor = socket(family, kind, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    // TCP needs `SO_REUSEADDR` while connections of an earlier process are closing. With UDP the option would permit a
    // second server.
    if kind == SockType::Stream {
        setsockopt(&descriptor, sockopt::ReuseAddr, &true)?;
    }
    // The address may still be tentative: then the kernel refuses a bind without `IP_FREEBIND`.
    setsockopt(&descriptor, sockopt::IpFreebind, &true).or_else(|errno| match address.is_ipv6() {
        true => Ok(()),
        false => Err(errno),
    })?;
    if kind == SockType::Datagram {
        // Without the right to exceed the system's limit the buffer keeps its default size.
        let _set = setsockopt(&descriptor, sockopt::RcvBufForce, &KERNEL_BUFFER);
    }
    bind(std::os::fd::AsRawFd::as_raw_fd(&descriptor), &SockaddrStorage::from(address))?;
    Ok(descriptor)
}

fn udp(address: SocketAddr) -> io::Result<UdpSocket> {
    UdpSocket::from_std(StdUdpSocket::from(bind_socket(address, SockType::Datagram)?))
}

fn tcp_listener(address: SocketAddr) -> io::Result<TcpListener> {
    let descriptor = bind_socket(address, SockType::Stream)?;
    listen(&descriptor, Backlog::new(128)?)?;
    TcpListener::from_std(std::net::TcpListener::from(descriptor))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::sync::RwLock;

    use hickory_proto::op::Message;
    use serde_json::json;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    /// A query for a name of the zone.
    fn query() -> Vec<u8> {
        query_of("x.svc.cluster.local.")
    }

    fn query_of(name: &str) -> Vec<u8> {
        let mut query = Message::query();
        let name = hickory_proto::rr::Name::from_ascii(name).unwrap();
        query.add_query(hickory_proto::op::Query::query(name, hickory_proto::rr::RecordType::A));
        query.to_vec().unwrap()
    }

    #[test]
    fn without_pod_networks_only_the_node_itself_is_served() {
        let zone = Zone::new("cluster.local", Arc::new(RwLock::default()), Vec::new()).unwrap();
        let (networks, clients) = watch::channel(Vec::new());
        let server =
            Server::new(zone, Upstream::new(PathBuf::new(), Vec::new(), &[], Arc::default()), clients);
        let permits = |client: &str| server.permits(client.parse().unwrap(), None);
        assert!(permits("127.0.0.1") && !permits("10.254.254.254") && !permits("203.0.113.1"));
        networks.send(vec!["10.254.0.0/16".parse().unwrap()]).unwrap();
        assert!(permits("10.254.254.254") && !permits("203.0.113.1"));
        let server = server.with_pods(Arc::new(|address| address == IpAddr::from([203, 0, 113, 1])));
        let permits = |client: &str| server.permits(client.parse().unwrap(), None);
        assert!(
            permits("203.0.113.1") && !permits("203.0.113.2"),
            "a pod with an address outside of the networks"
        );
        assert!(is_of_interface("127.0.0.1".parse().unwrap()));
        assert!(!is_of_interface("203.0.113.1".parse().unwrap()), "also with ip_nonlocal_bind");
    }

    #[tokio::test]
    async fn a_flood_of_one_client_does_not_delay_the_query_of_another() {
        let zone = Zone::new("cluster.local", Arc::new(RwLock::default()), Vec::new()).unwrap();
        let upstream = Upstream::new(PathBuf::new(), Vec::new(), &[], Arc::default());
        let server = Arc::new(Server::new(zone, upstream, watch::channel(Vec::new()).1));
        let socket = Arc::new(udp("127.0.0.1:0".parse().unwrap()).unwrap());
        let address = socket.local_addr().unwrap();
        let query = query();
        let (eve, bob) = (udp("127.0.0.2:0".parse().unwrap()), udp("127.0.0.3:0".parse().unwrap()));
        let (eve, bob) = (eve.unwrap(), bob.unwrap());
        // The kernel's default buffer has room for this number of queries, so the kernel drops no query.
        for _ in 0..200 {
            eve.send_to(&query, address).await.unwrap();
        }
        bob.send_to(&query, address).await.unwrap();
        tokio::spawn(server.serve_udp(socket));
        let mut buffer = [0; 512];
        bob.recv_from(&mut buffer).await.unwrap();
        let mut before = 0;
        while eve.try_recv_from(&mut buffer).is_ok() {
            before += 1;
        }
        assert!(before <= 128, "{before} replies before that of the other client");
    }

    #[tokio::test]
    async fn tcp_connections_above_the_limit_are_closed() {
        let zone = Zone::new("cluster.local", Arc::new(RwLock::default()), Vec::new()).unwrap();
        let upstream = Upstream::new(PathBuf::new(), Vec::new(), &[], Arc::default());
        let server = Server::new(zone, upstream, watch::channel(Vec::new()).1);
        let server = Arc::new(Server { connections: Limit::new(1, 1), ..server });
        let listener = tcp_listener("127.0.0.1:0".parse().unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        let serving = tokio::spawn(server.serve_tcp(listener));
        let query = query();
        let message = [&u16::try_from(query.len()).unwrap().to_be_bytes()[..], &query].concat();
        let mut first = TcpStream::connect(address).await.unwrap();
        first.write_all(&message).await.unwrap();
        assert!(first.read_u16().await.unwrap() > 0);
        let mut second = TcpStream::connect(address).await.unwrap();
        // The server may have closed the connection already.
        let _sent = second.write_all(&message).await;
        assert!(matches!(second.read(&mut [0]).await, Ok(0) | Err(_)), "a second connection gets a reply");
        serving.abort();
    }

    /// A zone with a headless service of this number of endpoints.
    fn zone_with_endpoints(count: usize) -> Zone {
        let mut tables = coracle_services::Tables::default();
        let service = json!({"metadata": {"namespace": "ns", "name": "many"}, "spec": {"clusterIP": "None"}});
        tables.replace_services([Arc::new(serde_json::from_value(service).unwrap())]);
        let address = |number: usize| format!("10.1.{}.{}", number / 256, number % 256);
        let endpoints: Vec<_> = (0..count).map(|number| json!({"addresses": [address(number)]})).collect();
        let labels = json!({"kubernetes.io/service-name": "many"});
        let slice = json!({"metadata": {"namespace": "ns", "name": "x", "labels": labels},
            "addressType": "IPv4", "endpoints": endpoints});
        let slice: coracle_services::EndpointSlice = serde_json::from_value(slice).unwrap();
        tables.replace_slices([slice.slim()]);
        Zone::new("cluster.local", Arc::new(RwLock::new(tables)), Vec::new()).unwrap()
    }

    #[tokio::test]
    async fn large_replies_by_tcp_are_encoded_one_after_the_other() {
        let upstream = Upstream::new(PathBuf::new(), Vec::new(), &[], Arc::default());
        let server = Server::new(zone_with_endpoints(500), upstream, watch::channel(Vec::new()).1);
        let client = IpAddr::from([127, 0, 0, 2]);
        let held = server.upstream.large.hold().await;
        let large = query_of("many.ns.svc.cluster.local.");
        let mut waiting = std::pin::pin!(server.answer(&large, client));
        tokio::select! {
            biased;
            _ = &mut waiting => panic!("a large reply without the permit"),
            () = std::future::ready(()) => {}
        }
        assert!(server.answer(&query(), client).await.is_some(), "small replies need no permit");
        drop(held);
        let reply = waiting.await.unwrap();
        assert_eq!(Message::from_vec(&reply).unwrap().answers.len(), 500);
    }

    #[tokio::test]
    async fn no_other_socket_shares_the_port() {
        let first = udp("127.0.0.1:0".parse().unwrap()).unwrap();
        assert!(udp(first.local_addr().unwrap()).is_err());
        let first = tcp_listener("127.0.0.1:0".parse().unwrap()).unwrap();
        assert!(tcp_listener(first.local_addr().unwrap()).is_err());
    }
}
