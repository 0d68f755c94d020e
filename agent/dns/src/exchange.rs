//! Sends one query to one server by UDP. If the answer is truncated, the query is repeated by TCP. If the answer by TCP
//! cannot be used, the truncated answer is used.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use hickory_proto::op::{Edns, Header, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::RecordType;
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::{Instant, timeout_at};

use crate::cache::Question;
use crate::large::{LargeMessages, SMALL_BYTES};
use crate::summary::Summary;

/// Maximum size in bytes of a UDP message that needs no fragmentation (DNS flag day 2020).
pub(crate) const UDP_PAYLOAD: u16 = 1232;
/// An exchange fails after it has received this number of datagrams that do not answer its query.
const SKIPPED_MAX: usize = 16;

/// Maximum time for the answer of a server.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum time for an answer by TCP. The time begins after the truncated answer by UDP.
const TCP_TIMEOUT: Duration = Duration::from_millis(1500);
/// Maximum time from the start of an exchange until the end of its wait for TCP. The caller ends an exchange after
/// [`ANSWER_TIMEOUT`]. So a late truncated answer is used before that.
const TCP_END: Duration = ANSWER_TIMEOUT.saturating_sub(Duration::from_millis(100));

/// Maximum length of a chain of compression pointers that point to each other. Common servers write no such chain.
/// Without a maximum, the decoding of a name in 64 KiB could follow 8,000 pointers. Other data may look like pointers.
/// Fewer than one in 200,000 messages with 16 KiB of random data has a longer chain.
const CHAIN_MAX: u8 = 16;
/// Bytes of a message that a compression pointer can reach.
const POINTER_REACH: usize = 1 << 14;

/// The answer of a server.
pub(crate) struct Received {
    /// The decoded answer. If the answer is above 4 KiB, only its header and question are decoded.
    pub(crate) message: Message,
    /// The answer in wire format.
    pub(crate) bytes: Vec<u8>,
    pub(crate) summary: Summary,
}

/// The client for which the query is sent, and the limits on the memory for answers.
#[derive(Clone, Copy)]
pub(crate) struct Requester<'a> {
    pub(crate) client: IpAddr,
    pub(crate) large: &'a LargeMessages,
}

// === impl Received ===

impl Received {
    /// Decodes an answer. Fails if the answer does not belong to the query.
    fn read(bytes: Vec<u8>, query: &Message, kind: RecordType) -> io::Result<Self> {
        let message = decode(&bytes)?;
        if !answers(&message, query) {
            return Err(io::Error::other("the answer belongs to another query"));
        }
        Self::new(message, bytes, kind)
    }

    fn new(message: Message, bytes: Vec<u8>, kind: RecordType) -> io::Result<Self> {
        let summary =
            Summary::read(&bytes, kind).ok_or_else(|| io::Error::other("the answer is malformed"))?;
        Ok(Self { message, bytes, summary })
    }
}

/// Sends the query to the server.
pub(crate) async fn exchange(
    server: SocketAddr,
    question: &Question,
    requester: Requester<'_>,
) -> io::Result<Received> {
    let start = Instant::now();
    let mut query = query(question);
    let mut bytes = query.to_vec().map_err(io::Error::other)?;
    // A random port and id for each query: an attacker who does not see the query cannot forge an answer.
    let local: IpAddr =
        if server.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((local, 0)).await?;
    socket.connect(server).await?;
    socket.send(&bytes).await?;
    let mut buffer = vec![0; 4096];
    for _ in 0..SKIPPED_MAX {
        let size = socket.recv(&mut buffer).await?;
        let answer = buffer.get(..size).and_then(|bytes| decode(bytes).ok());
        if answer.as_ref().is_some_and(|answer| refuses_edns(answer, &query)) {
            query.edns = None;
            query.metadata.id = rand::random();
            bytes = query.to_vec().map_err(io::Error::other)?;
            socket.send(&bytes).await?;
            continue;
        }
        let Some(answer) = answer.filter(|answer| answers(answer, &query)) else { continue };
        if answer.metadata.truncation {
            // Close this socket before the TCP connection opens: a question uses one descriptor at a time.
            drop(socket);
            let end = (Instant::now() + TCP_TIMEOUT).min(start + TCP_END);
            let received = match timeout_at(end, by_tcp(server, &bytes, requester)).await {
                Ok(received) => received.and_then(|bytes| Received::read(bytes, &query, question.kind)),
                Err(elapsed) => Err(elapsed.into()),
            };
            // A failure of TCP is not a failure of the server: a firewall may drop TCP, and the server has answered by
            // UDP.
            return received.or_else(|error| {
                tracing::debug!(%server, %error, "cannot get the rest of a truncated dns answer by tcp");
                buffer.truncate(size);
                Received::new(answer, buffer, question.kind)
            });
        }
        buffer.truncate(size);
        return Received::new(answer, buffer, question.kind);
    }
    Err(io::Error::other("too many datagrams that do not answer the query"))
}

/// Sends the query by TCP. Fails if the answer exceeds the limits on memory for answers.
async fn by_tcp(server: SocketAddr, bytes: &[u8], requester: Requester<'_>) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(bytes.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], bytes].concat()).await?;
    let size = usize::from(stream.read_u16().await?);
    let no_memory = || {
        let message = "the memory limit for answers is reached";
        io::Error::other(format!("cannot receive an answer of {size} bytes by TCP: {message}"))
    };
    let _memory = requester.large.reserve(requester.client, size).ok_or_else(no_memory)?;
    let mut buffer = vec![0; size];
    stream.read_exact(&mut buffer).await?;
    Ok(buffer)
}

/// Decodes the message of another server. Of a large message, only the header and the question are decoded. Decoded
/// records need up to 100 times the memory, and their decoding takes long.
fn decode(bytes: &[u8]) -> io::Result<Message> {
    let mut decoder = BinDecoder::new(bytes);
    let Header { metadata, counts, .. } = Header::read(&mut decoder).map_err(io::Error::other)?;
    if counts.queries > 1 {
        return Err(io::Error::other("the answer has several questions"));
    }
    if has_long_chain(bytes) {
        return Err(io::Error::other("the answer has a long chain of compression pointers"));
    }
    if bytes.len() <= SMALL_BYTES {
        return Message::from_vec(bytes).map_err(io::Error::other);
    }
    let mut message = Message::response(metadata.id, metadata.op_code);
    message.metadata = metadata;
    let count = usize::from(counts.queries);
    message.queries = Message::read_queries(&mut decoder, count).map_err(io::Error::other)?;
    Ok(message)
}

/// Whether a message may have a long chain of compression pointers. Any two bytes can be a pointer. A pointer points to
/// an earlier byte (RFC 1035, section 4.1.4), so one pass over the bytes finds all chains.
fn has_long_chain(bytes: &[u8]) -> bool {
    const POINTER: u8 = 0b1100_0000;
    let mut lengths: Vec<u8> = Vec::with_capacity(bytes.len().min(POINTER_REACH));
    for pair in bytes.windows(2).take(POINTER_REACH) {
        let length = match *pair {
            [high, low] if high & POINTER == POINTER => {
                let target = usize::from(u16::from_be_bytes([high & !POINTER, low]));
                lengths.get(target).map_or(0, |length| length + 1)
            }
            _ => 0,
        };
        if length > CHAIN_MAX {
            return true;
        }
        lengths.push(length);
    }
    false
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

/// Whether the server refuses the query because it does not support EDNS (RFC 6891, section 7). Such an answer often
/// has no question, so the question is not compared.
fn refuses_edns(answer: &Message, query: &Message) -> bool {
    query.edns.is_some()
        && answer.edns.is_none()
        && answer.metadata.id == query.metadata.id
        && answer.metadata.message_type == MessageType::Response
        && answer.metadata.response_code == ResponseCode::FormErr
}

fn answers(answer: &Message, query: &Message) -> bool {
    let of = |message: &Message| {
        message.queries.first().map(|query| (query.name.to_lowercase(), query.query_type, query.query_class))
    };
    answer.metadata.id == query.metadata.id
        && answer.metadata.message_type == MessageType::Response
        && of(answer) == of(query)
}

/// Fuzz target: any bytes as the answer of a server.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(data: &[u8]) {
    use crate::answer::LargeAnswer;

    let Ok(answer) = decode(data) else { return };
    let Some(first) = answer.queries.first() else { return };
    let question = Question { name: first.name.clone(), kind: first.query_type };
    let _same = answers(&answer, &query(&question));
    let is_large = data.len() > SMALL_BYTES;
    let Some(summary) = Summary::read(data, question.kind) else {
        assert!(is_large, "a decoded answer has no summary");
        return;
    };
    let mut cache = crate::cache::Cache::default();
    cache.put(question.clone(), &answer, summary, data.into());
    let _stored = cache.get(&question);
    let large = LargeAnswer::new(data.into(), summary.code, summary.ttls());
    let _decoded = large.decode();
    for most in [0, 1, 50] {
        let head = large.head(most);
        let is_as_decoded = head.is_some_and(|head| head.answers.len() == answer.answers.len().min(most));
        assert!(is_large || is_as_decoded && summary.code == answer.metadata.response_code);
    }
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::rdata::{NULL, TXT};
    use hickory_proto::rr::{Name, RData, Record};

    use super::*;

    /// A message whose first record has a chain of compression pointers in its data. The name of each further record is
    /// at the end of the chain.
    fn with_chain(length: u16, records: u16) -> Vec<u8> {
        // A header, then a record of the root with the type NULL (10).
        let mut bytes = vec![0, 1, 0x80, 0, 0, 0];
        bytes.extend((1 + records).to_be_bytes());
        bytes.extend([0; 4]);
        bytes.extend([0, 0, 10, 0, 1, 0, 0, 0, 60]);
        bytes.extend((1 + 2 * length).to_be_bytes());
        // A root name, and the pointers: the first one points to the root name.
        bytes.push(0);
        let start = u16::try_from(bytes.len()).unwrap() - 1;
        let pointer = |number: u16| {
            let target = if number == 0 { start } else { start + 1 + 2 * (number - 1) };
            (0xc000 | target).to_be_bytes()
        };
        bytes.extend((0..length).flat_map(pointer));
        for _ in 0..records {
            bytes.extend(pointer(length));
            bytes.extend([0, 10, 0, 1, 0, 0, 0, 60, 0, 1, 7]);
        }
        bytes
    }

    #[test]
    fn answers_with_long_chains_of_compression_pointers_are_not_decoded() {
        let short = with_chain(u16::from(CHAIN_MAX) - 1, 5);
        assert_eq!(decode(&short).unwrap().answers.len(), 6);
        let long = with_chain(5000, 4000);
        assert!(long.len() <= usize::from(u16::MAX));
        let error = decode(&long).unwrap_err().to_string();
        assert!(error.contains("compression pointers"), "{error}");
    }

    #[test]
    fn answers_with_several_questions_are_not_decoded() {
        let mut message = Message::response(1, OpCode::Query);
        message.add_query(Query::query(Name::root(), RecordType::A));
        assert!(decode(&message.to_vec().unwrap()).is_ok());
        message.add_query(Query::query(Name::root(), RecordType::A));
        assert!(decode(&message.to_vec().unwrap()).is_err());
    }

    #[test]
    fn the_records_of_a_large_answer_are_not_decoded() {
        let mut message = Message::response(1, OpCode::Query);
        message.metadata.authoritative = true;
        message.add_query(Query::query(Name::from_ascii("a.example.").unwrap(), RecordType::TXT));
        for (length, is_decoded) in [(100, true), (2000, true), (4000, false)] {
            let data = RData::NULL(NULL::with(vec![0; length]));
            message.add_answer(Record::from_rdata(Name::root(), 60, data));
            let decoded = decode(&message.to_vec().unwrap()).unwrap();
            assert_eq!((decoded.metadata, &decoded.queries), (message.metadata, &message.queries));
            assert_eq!(!decoded.answers.is_empty(), is_decoded, "{length}");
        }
    }

    #[test]
    fn data_that_looks_like_pointers_is_decoded() {
        let mut message = Message::response(1, OpCode::Query);
        let text = TXT::from_bytes(vec![&[0xc0; 255][..]]);
        message.add_answer(Record::from_rdata(Name::root(), 60, RData::TXT(text)));
        // A pointer of these bytes points beyond the message.
        message.add_answer(Record::from_rdata(Name::root(), 60, RData::NULL(NULL::with(vec![0xff; 3000]))));
        assert_eq!(decode(&message.to_vec().unwrap()).unwrap().answers.len(), 2);
    }
}
