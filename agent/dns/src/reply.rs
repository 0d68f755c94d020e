//! Replies to queries: answers from the zone, forwarding, and the encoding of messages.

use std::sync::Arc;

use hickory_proto::op::{
    Edns, Header, HeaderCounts, Message, MessageType, OpCode, Query, ResponseCode, emit_message_parts,
};
use hickory_proto::rr::{DNSClass, Name, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder, BinEncoder};

use crate::answer::{LargeAnswer, ServerAnswer};
use crate::cache::Question;
use crate::exchange::UDP_PAYLOAD;
use crate::forward::Upstream;
use crate::large::SMALL_RECORDS;
use crate::limit::Permit;
use crate::zone::Zone;

/// Maximum size in bytes of a UDP message without EDNS (RFC 1035, section 2.3.4). All clients accept this size.
const UDP_MIN: u16 = 512;
/// Minimum bytes of an encoded record: name, type, class, time to live, and the length and first byte of the data.
const RECORD_MIN: u16 = 12;

/// Maximum number of aliases of the cluster that an answer follows. CoreDNS follows `maxCnameChainLength` (10) aliases
/// after the first one.
const ALIASES_MAX: usize = 11;

/// The protocol of a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Transport {
    Udp,
    /// TCP. Few records of the zone are built: a reply with more than [`SMALL_RECORDS`] records is cut.
    Tcp,
    /// TCP, with all records. The caller holds the turn for large messages.
    TcpLarge,
}

/// The decision about a query.
pub(crate) enum Reply {
    /// The reply is complete.
    Now(Response),
    /// The query must be forwarded to upstream servers.
    Forward(Pending),
    /// No reply: the message is not a query.
    Nothing,
}

/// A reply before it is encoded.
pub(crate) struct Response {
    /// The reply without the records of other servers.
    pub(crate) message: Message,
    /// Maximum bytes of the encoded reply.
    pub(crate) limit: u16,
    /// Number of records up to which an answer of the zone is built.
    built_records: usize,
    forwarded: Option<Forwarded>,
    /// A large answer that is not decoded yet, for a reply by TCP.
    undecoded: Option<Undecoded>,
}

/// The answer of another server. All clients that wait for it share its records.
struct Forwarded {
    answer: Arc<Message>,
    /// The queried name in the spelling of the client. The records of the name repeat this spelling.
    name: Name,
}

/// A large answer of another server that is not decoded yet. [`Response::decoded`] turns it into [`Forwarded`].
struct Undecoded {
    answer: LargeAnswer,
    name: Name,
}

/// A query that upstream servers must answer.
pub(crate) struct Pending {
    reply: Response,
    name: Name,
    question: Question,
}

/// The sources of the records of a reply: the zone, and the servers to which queries for other names are forwarded.
#[derive(Clone, Copy)]
pub(crate) struct Sources<'a> {
    pub(crate) zone: &'a Zone,
    pub(crate) upstream: &'a Arc<Upstream>,
}

/// Reads a message and decides the reply.
pub(crate) fn reply(bytes: &[u8], transport: Transport, sources: Sources<'_>) -> Reply {
    if let Some(refused) = refused_by_header(bytes) {
        return refused;
    }
    let Ok(query) = Message::from_vec(bytes) else { return malformed(bytes) };
    let mut reply = Response::new(Message::response(query.metadata.id, query.metadata.op_code));
    reply.limit = match transport {
        Transport::Udp => udp_size(query.edns.as_ref()),
        Transport::Tcp | Transport::TcpLarge => u16::MAX,
    };
    reply.built_records = match transport {
        Transport::Udp | Transport::TcpLarge => reply.max_records(),
        Transport::Tcp => SMALL_RECORDS + 1,
    };
    reply.message.metadata.recursion_desired = query.metadata.recursion_desired;
    reply.message.metadata.recursion_available = true;
    reply.message.queries.clone_from(&query.queries);
    if let Some(theirs) = &query.edns {
        // A reply with all records is the second reply to its query: the query was counted for the first reply.
        if theirs.flags().dnssec_ok && transport != Transport::TcpLarge {
            sources.upstream.metrics.signatures_requested();
        }
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_PAYLOAD);
        // The reply copies the flag DO of the query (RFC 3225, section 3).
        edns.set_dnssec_ok(theirs.flags().dnssec_ok);
        reply.message.set_edns(edns);
        if theirs.version() > 0 {
            return with_code(reply, ResponseCode::BADVERS);
        }
    }
    let [question] = &query.queries[..] else { return with_code(reply, ResponseCode::FormErr) };
    let kind = question.query_type;
    if question.query_class != DNSClass::IN || matches!(kind, RecordType::AXFR | RecordType::IXFR) {
        return with_code(reply, ResponseCode::Refused);
    }
    if let Some(answer) = sources.zone.answer_up_to(&question.name, kind, reply.built_records) {
        if answer.code == ResponseCode::ServFail {
            return with_code(reply, answer.code);
        }
        let message = &mut reply.message;
        message.metadata.authoritative = true;
        message.metadata.response_code = answer.code;
        if answer.records.is_empty() {
            message.add_authority(sources.zone.soa());
        }
        message.add_answers(answer.records);
        message.add_additionals(answer.additionals);
        return match answer.alias {
            Some(alias) => complete(reply, question, alias, sources),
            None => Reply::Now(reply),
        };
    }
    forward(reply, question, question.name.to_lowercase(), sources.upstream)
}

/// The reply to a message that is refused because of its header. The message is not decoded, because the decoding of
/// many questions and records takes long. The limits are those of CoreDNS' library.
fn refused_by_header(bytes: &[u8]) -> Option<Reply> {
    let Header { metadata, counts, .. } = Header::read(&mut BinDecoder::new(bytes)).ok()?;
    if metadata.message_type != MessageType::Query {
        return Some(Reply::Nothing);
    }
    let is_plain =
        counts.queries == 1 && counts.answers <= 1 && counts.authorities <= 1 && counts.additionals <= 2;
    let code = match metadata.op_code {
        OpCode::Query if is_plain => return None,
        OpCode::Query => ResponseCode::FormErr,
        _ => ResponseCode::NotImp,
    };
    let message = Message::error_msg(metadata.id, metadata.op_code, code);
    Some(Reply::Now(Response::new(message)))
}

/// Adds the addresses of an alias. The target of an alias may be another alias of the cluster.
fn complete(mut reply: Response, question: &Query, mut alias: Name, sources: Sources<'_>) -> Reply {
    for _ in 0..ALIASES_MAX {
        let found = sources.zone.answer_up_to(&alias, question.query_type, reply.built_records);
        let Some(answer) = found else {
            return forward(reply, question, alias.to_lowercase(), sources.upstream);
        };
        let message = &mut reply.message;
        // The response code is the code of the alias's target: the target may not exist.
        message.metadata.response_code = answer.code;
        if answer.records.is_empty() && answer.code != ResponseCode::ServFail {
            message.add_authority(sources.zone.soa());
        }
        message.add_answers(answer.records);
        match answer.alias {
            Some(next) => alias = next,
            None => return Reply::Now(reply),
        }
    }
    // The aliases form a loop.
    reply.message.answers.clear();
    with_code(reply, ResponseCode::ServFail)
}

fn forward(reply: Response, query: &Query, name: Name, upstream: &Arc<Upstream>) -> Reply {
    let question = Question { name, kind: query.query_type };
    if upstream.detect_loop(&question) {
        return with_code(reply, ResponseCode::Refused);
    }
    let pending = Pending { reply, name: query.name.clone(), question };
    match upstream.cached(&pending.question) {
        Some(answer) => Reply::Now(pending.merged(answer)),
        None => Reply::Forward(pending),
    }
}

fn with_code(mut reply: Response, code: ResponseCode) -> Reply {
    reply.message.metadata.response_code = code;
    Reply::Now(reply)
}

/// A message that cannot be parsed gets the response "format error" if its header marks it as a query.
fn malformed(bytes: &[u8]) -> Reply {
    const RESPONSE: u8 = 0x80;
    match bytes {
        [high, low, flags, _, _, _, _, _, _, _, _, _, ..] if flags & RESPONSE == 0 => {
            let id = u16::from_be_bytes([*high, *low]);
            let message = Message::error_msg(id, OpCode::Query, ResponseCode::FormErr);
            Reply::Now(Response::new(message))
        }
        _ => Reply::Nothing,
    }
}

// === impl Pending ===

impl Pending {
    /// Forwards the query to the upstream servers, and completes the reply with their answer.
    pub(crate) async fn resolve(self, upstream: Arc<Upstream>, permit: Permit) -> Response {
        let answer = upstream.resolve(self.question.clone(), permit).await;
        self.merged(answer)
    }

    /// The reply for a query that exceeds a limit: an expired answer, or a refusal.
    pub(crate) fn without_permit(self, upstream: &Upstream) -> Response {
        if let Some(answer) = upstream.expired(&self.question) {
            return self.merged(answer);
        }
        upstream.metrics.rejected();
        let mut reply = self.reply;
        reply.message.metadata.response_code = ResponseCode::Refused;
        reply
    }

    fn merged(self, answer: ServerAnswer) -> Response {
        let Self { mut reply, name, .. } = self;
        reply.message.metadata.response_code = answer.code();
        reply.message.metadata.authoritative = false;
        match answer {
            ServerAnswer::Decoded(answer) if answer.metadata.truncation => {
                reply.forward_truncated(answer, name)
            }
            ServerAnswer::Decoded(answer) => reply.forwarded = Some(Forwarded { answer, name }),
            ServerAnswer::Large(answer) if reply.limit < u16::MAX => {
                let head = answer.head(reply.max_records());
                reply.forward(head, name);
            }
            ServerAnswer::Large(answer) => reply.undecoded = Some(Undecoded { answer, name }),
        }
        reply
    }
}

// === impl Response ===

impl Response {
    /// A reply that all clients accept by UDP.
    fn new(message: Message) -> Self {
        Self { message, limit: UDP_MIN, built_records: 0, forwarded: None, undecoded: None }
    }

    /// Adds the records of another server's answer.
    fn forward(&mut self, answer: Option<Message>, name: Name) {
        match answer {
            Some(answer) => self.forwarded = Some(Forwarded { answer: Arc::new(answer), name }),
            None => self.message.metadata.response_code = ResponseCode::ServFail,
        }
    }

    /// Adds the records of a truncated answer. A reply by TCP is a failure instead, because the client cannot ask for
    /// the rest.
    fn forward_truncated(&mut self, answer: Arc<Message>, name: Name) {
        if self.limit == u16::MAX {
            self.message.metadata.response_code = ResponseCode::ServFail;
        } else {
            self.message.metadata.truncation = true;
            self.forwarded = Some(Forwarded { answer, name });
        }
    }

    /// Decodes the large answer of another server, if the reply has one. The caller holds the turn for large messages.
    pub(crate) fn decoded(mut self) -> Self {
        if let Some(Undecoded { answer, name }) = self.undecoded.take() {
            self.forward(answer.decode(), name);
        }
        self
    }

    /// Number of records of the reply, without regard to its maximum size. An answer that is not decoded counts as
    /// large.
    pub(crate) fn records(&self) -> usize {
        if self.undecoded.is_some() {
            return SMALL_RECORDS + 1;
        }
        let forwarded = self.forwarded.as_ref().map_or(0, |forwarded| count(&forwarded.answer));
        count(&self.message) + forwarded
    }

    /// Whether the zone may have more records for a reply by [`Transport::Tcp`].
    pub(crate) fn is_cut(&self) -> bool {
        count(&self.message) > SMALL_RECORDS
    }

    /// Encodes the reply. A reply by UDP above its maximum size has the flag TC and the first records of the section
    /// answer, as in CoreDNS. These records help clients that do not repeat their query by TCP. The encoding ends at
    /// the maximum size, so its cost does not depend on the number of further records.
    pub(crate) fn encode(&self) -> Option<Vec<u8>> {
        let Some((bytes, header)) = self.emit(None) else { return self.message.truncate().to_vec().ok() };
        // A message by TCP has the records for which there is room.
        if !header.metadata.truncation || self.limit == u16::MAX {
            return Some(bytes);
        }
        // The EDNS record needs the place of one encoded record, because every record is at least as long. Use the
        // place of an authority or additional record, otherwise of the last answer.
        let HeaderCounts { answers, authorities, additionals, .. } = header.counts;
        let has_room = self.message.edns.is_none() || authorities > 0 || additionals > 0;
        let kept = usize::from(answers).saturating_sub(usize::from(!has_room));
        let (bytes, _) = self.emit(Some(kept))?;
        Some(bytes)
    }

    /// Encodes the reply up to its maximum size. `kept` truncates the reply to this number of answers, without
    /// authority and additional records.
    fn emit(&self, kept: Option<usize>) -> Option<(Vec<u8>, Header)> {
        let own = &self.message;
        let (respelled, answers) =
            self.forwarded.as_ref().map_or_else(Default::default, |other| other.answers(self.max_records()));
        let authorities =
            self.forwarded.as_ref().map(|other| &other.answer.authorities[..]).unwrap_or_default();
        let mut metadata = own.metadata;
        metadata.truncation |= kept.is_some();
        let others = if kept.is_some() { 0 } else { usize::MAX };
        let mut bytes = Vec::with_capacity(usize::from(UDP_MIN));
        let header = {
            let mut encoder = BinEncoder::new(&mut bytes);
            encoder.set_max_size(self.limit);
            let header = emit_message_parts(
                &metadata,
                &mut own.queries.iter(),
                &mut own.answers.iter().chain(&respelled).chain(answers).take(kept.unwrap_or(usize::MAX)),
                &mut own.authorities.iter().chain(authorities).take(others),
                &mut own.additionals.iter().take(others),
                own.edns.as_ref(),
                own.signature.as_deref(),
                &mut encoder,
            );
            // The buffer may end with an incomplete record.
            encoder.trim();
            header
        };
        Some((bytes, header.ok()?))
    }

    /// A number of records that always exceeds the maximum size of the reply.
    fn max_records(&self) -> usize {
        usize::from(self.limit / RECORD_MIN) + 1
    }
}

// === impl Forwarded ===

impl Forwarded {
    /// The answer's records: copies of the first `most` records in the spelling of the client, and the records after
    /// them. No record is copied if the client spells the name in lower case, as nearly all clients do.
    fn answers(&self, most: usize) -> (Vec<Record>, &[Record]) {
        let all = &self.answer.answers[..];
        let is_lower_case = self.name.iter().flatten().all(|byte| !byte.is_ascii_uppercase());
        let copied = if is_lower_case { 0 } else { all.len().min(most) };
        let (first, others) = all.split_at(copied);
        let respelled = first.iter().map(|record| {
            let mut record = record.clone();
            if record.name == self.name {
                record.name = self.name.clone();
            }
            record
        });
        (respelled.collect(), others)
    }
}

/// Number of records of all sections.
fn count(message: &Message) -> usize {
    message.answers.len() + message.authorities.len() + message.additionals.len()
}

/// Maximum bytes of a UDP reply that the client accepts.
fn udp_size(theirs: Option<&Edns>) -> u16 {
    theirs.map_or(UDP_MIN, Edns::max_payload).clamp(UDP_MIN, UDP_PAYLOAD)
}

#[cfg(test)]
mod tests;
