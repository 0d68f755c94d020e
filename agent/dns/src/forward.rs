//! Names outside the cluster: asks the host's servers, and caches their answers.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

use crate::cache::{Cache, Question};

/// Time in which a server must answer.
const ANSWER: Duration = Duration::from_secs(2);
/// Maximum servers of a `resolv.conf`, as the C library's.
const SERVERS_MAX: usize = 3;
/// Maximum size of a `resolv.conf` that is read.
const RESOLV_CONF_MAX: u64 = 64 << 10;
/// Size of UDP messages that never need fragments (DNS flag day 2020).
pub(crate) const UDP_PAYLOAD: u16 = 1232;
/// Datagrams that do not answer the query are skipped, at most this many.
const STRANGERS_MAX: usize = 16;

/// The servers to which other names are forwarded.
pub struct Upstream {
    resolv_conf: PathBuf,
    /// Addresses of this server: it never asks itself.
    own: Vec<IpAddr>,
    servers: Mutex<Servers>,
    cache: Mutex<Cache>,
}

#[derive(Default)]
struct Servers {
    modified: Option<SystemTime>,
    all: Vec<SocketAddr>,
}

// === impl Upstream ===

impl Upstream {
    /// The servers in the file, which is read again when it changes.
    #[must_use]
    pub fn new(resolv_conf: PathBuf, own: Vec<IpAddr>) -> Self {
        Self { resolv_conf, own, servers: Mutex::default(), cache: Mutex::default() }
    }

    /// A cached answer.
    pub(crate) fn cached(&self, question: &Question) -> Option<Message> {
        self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(question, false)
    }

    /// Asks the servers in order. An expired answer serves if none of them does.
    pub(crate) async fn resolve(&self, question: Question) -> Message {
        if let Some(cached) = self.cached(&question) {
            return cached;
        }
        for server in self.servers() {
            match timeout(ANSWER, exchange(server, &question)).await {
                Ok(Ok((message, bytes))) if is_useful(&message) => {
                    self.cache.lock().unwrap_or_else(PoisonError::into_inner).put(question, &message, &bytes);
                    return message;
                }
                Ok(Ok(_)) => {}
                Ok(Err(error)) => tracing::debug!(%server, %error, "a DNS server cannot be asked"),
                Err(_) => tracing::debug!(%server, "a DNS server does not answer"),
            }
        }
        let stale = self.cache.lock().unwrap_or_else(PoisonError::into_inner).get(&question, true);
        stale.unwrap_or_else(|| Message::error_msg(0, OpCode::Query, ResponseCode::ServFail))
    }

    fn servers(&self) -> Vec<SocketAddr> {
        let modified = std::fs::metadata(&self.resolv_conf).and_then(|meta| meta.modified()).ok();
        let mut servers = self.servers.lock().unwrap_or_else(PoisonError::into_inner);
        if modified.is_none() || servers.modified != modified {
            servers.all = parse(&read(&self.resolv_conf).unwrap_or_default(), &self.own);
            servers.modified = modified;
        }
        servers.all.clone()
    }
}

fn read(path: &std::path::Path) -> io::Result<String> {
    use std::io::Read as _;
    let mut text = String::new();
    std::fs::File::open(path)?.take(RESOLV_CONF_MAX).read_to_string(&mut text)?;
    Ok(text)
}

/// The servers of a `resolv.conf` without our own addresses.
fn parse(text: &str, own: &[IpAddr]) -> Vec<SocketAddr> {
    let server = |line: &str| {
        let mut words = line.split_whitespace();
        let address = words.next().filter(|word| *word == "nameserver").and_then(|_| words.next())?;
        address.parse::<IpAddr>().ok()
    };
    let all = text.lines().filter_map(server).filter(|address| !own.contains(address));
    all.take(SERVERS_MAX).map(|address| SocketAddr::new(address, 53)).collect()
}

/// Whether another server cannot know better.
fn is_useful(message: &Message) -> bool {
    !matches!(
        message.metadata.response_code,
        ResponseCode::ServFail | ResponseCode::Refused | ResponseCode::NotImp
    )
}

/// Asks by UDP, and by TCP if the answer does not fit. Returns the answer and its bytes.
async fn exchange(server: SocketAddr, question: &Question) -> io::Result<(Message, Vec<u8>)> {
    let query = query(question);
    let bytes = query.to_vec().map_err(io::Error::other)?;
    // A random port and a random id for each query: an answer cannot be forged without seeing the query.
    let local: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((local, 0)).await?;
    socket.connect(server).await?;
    socket.send(&bytes).await?;
    let mut buffer = vec![0; 4096];
    for _ in 0..STRANGERS_MAX {
        let size = socket.recv(&mut buffer).await?;
        let answer = buffer.get(..size).and_then(|bytes| Message::from_vec(bytes).ok());
        match answer.filter(|answer| answers(answer, &query)) {
            Some(answer) if answer.metadata.truncation => return by_tcp(server, &query, &bytes).await,
            Some(answer) => {
                buffer.truncate(size);
                return Ok((answer, buffer));
            }
            None => {}
        }
    }
    Err(io::Error::other("too many datagrams that do not answer the query"))
}

async fn by_tcp(server: SocketAddr, query: &Message, bytes: &[u8]) -> io::Result<(Message, Vec<u8>)> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], bytes].concat()).await?;
    let size = stream.read_u16().await?;
    let mut buffer = vec![0; usize::from(size)];
    stream.read_exact(&mut buffer).await?;
    let answer = Message::from_vec(&buffer).map_err(io::Error::other)?;
    if !answers(&answer, query) {
        return Err(io::Error::other("the answer belongs to another query"));
    }
    Ok((answer, buffer))
}

fn query((name, kind): &Question) -> Message {
    let mut message = Message::new(rand::random(), MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(Name::clone(name), RecordType::clone(kind)));
    let mut edns = Edns::new();
    edns.set_max_payload(UDP_PAYLOAD);
    message.set_edns(edns);
    message
}

fn answers(answer: &Message, query: &Message) -> bool {
    let of = |message: &Message| {
        message.queries.first().map(|query| (query.name.to_lowercase(), query.query_type))
    };
    answer.metadata.id == query.metadata.id
        && answer.metadata.message_type == MessageType::Response
        && of(answer) == of(query)
}

/// An answer of another server, and the text of a `resolv.conf`.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let servers = parse(&String::from_utf8_lossy(data), &[]);
    assert!(servers.len() <= SERVERS_MAX);
    let Ok(answer) = Message::from_vec(data) else { return };
    let Some(first) = answer.queries.first() else { return };
    let question = (first.name.clone(), first.query_type);
    let _same = answers(&answer, &query(&question));
    let mut cache = crate::cache::Cache::default();
    cache.put(question.clone(), &answer, data);
    let _stored = cache.get(&question, true);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_those_of_the_file_without_our_own() {
        let text = "# x\nnameserver 10.43.0.10\nnameserver 9.9.9.9\nsearch nameserver\nnameserver fd00::1\n\
            nameserver x\nnameserver 1.1.1.1\nnameserver 8.8.8.8\n";
        let own = ["10.43.0.10".parse().unwrap()];
        let all: Vec<String> = parse(text, &own).iter().map(|server| server.to_string()).collect();
        assert_eq!(all, ["9.9.9.9:53", "[fd00::1]:53", "1.1.1.1:53"]);
    }
}
