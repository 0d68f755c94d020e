//! Sends one query to one server: by UDP, and by TCP if the answer is truncated.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};

use crate::cache::Question;

/// Maximum size in bytes of a UDP message that needs no fragmentation (DNS flag day 2020).
pub(crate) const UDP_PAYLOAD: u16 = 1232;
/// An exchange fails after it has received this number of datagrams that do not answer its query.
const SKIPPED_MAX: usize = 16;

/// Sends the query to the server. Returns the answer and its bytes.
pub(crate) async fn exchange(server: SocketAddr, question: &Question) -> io::Result<(Message, Vec<u8>)> {
    let query = query(question);
    let bytes = query.to_vec().map_err(io::Error::other)?;
    // A random port and id for each query: an attacker who does not see the query cannot forge an answer.
    let local: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((local, 0)).await?;
    socket.connect(server).await?;
    socket.send(&bytes).await?;
    let mut buffer = vec![0; 4096];
    for _ in 0..SKIPPED_MAX {
        let size = socket.recv(&mut buffer).await?;
        let answer = buffer.get(..size).and_then(|bytes| Message::from_vec(bytes).ok());
        match answer.filter(|answer| answers(answer, &query)) {
            Some(answer) if answer.metadata.truncation => {
                // Close this socket before the TCP connection opens: a question has one descriptor at a time.
                drop(socket);
                return by_tcp(server, &query, &bytes).await;
            }
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

fn query(question: &Question) -> Message {
    let mut message = Message::new(rand::random(), MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.add_query(Query::query(question.name.clone(), question.kind));
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

/// Fuzz target: any bytes as the answer of a server.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    let Ok(answer) = Message::from_vec(data) else { return };
    let Some(first) = answer.queries.first() else { return };
    let question = Question { name: first.name.clone(), kind: first.query_type };
    let _same = answers(&answer, &query(&question));
    let mut cache = crate::cache::Cache::default();
    cache.put(question.clone(), &answer, data);
    let _stored = cache.get(&question);
}
