//! Replies to queries: answers from the zone, forwarding, and the encoding of messages.

use std::sync::Arc;

use hickory_proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_proto::rr::{DNSClass, RecordType};

use crate::cache::Question;
use crate::exchange::UDP_PAYLOAD;
use crate::forward::Upstream;
use crate::limit::Permit;
use crate::zone::Zone;

/// Maximum size in bytes of a UDP message without EDNS (RFC 1035, section 2.3.4). All clients accept it.
const UDP_MIN: u16 = 512;

/// The decision about a query.
pub(crate) enum Reply {
    /// The reply is complete.
    Now(Message),
    /// The query must be forwarded to upstream servers.
    Forward(Pending),
    /// No reply: the message is not a query.
    Nothing,
}

/// A query that upstream servers must answer.
pub(crate) struct Pending {
    reply: Message,
    query: Query,
    question: Question,
}

/// Reads a message and decides the reply.
pub(crate) fn reply(bytes: &[u8], zone: &Zone, upstream: &Arc<Upstream>) -> Reply {
    let Ok(query) = Message::from_vec(bytes) else { return malformed(bytes) };
    if query.metadata.message_type != MessageType::Query {
        return Reply::Nothing;
    }
    let mut reply = Message::response(query.metadata.id, query.metadata.op_code);
    reply.metadata.recursion_desired = query.metadata.recursion_desired;
    reply.metadata.recursion_available = true;
    reply.queries.clone_from(&query.queries);
    if let Some(theirs) = &query.edns {
        if theirs.flags().dnssec_ok {
            upstream.metrics.signatures_requested();
        }
        let mut edns = Edns::new();
        edns.set_max_payload(UDP_PAYLOAD);
        reply.set_edns(edns);
        if theirs.version() > 0 {
            return with_code(reply, ResponseCode::BADVERS);
        }
    }
    if query.metadata.op_code != OpCode::Query {
        return with_code(reply, ResponseCode::NotImp);
    }
    let [question] = &query.queries[..] else { return with_code(reply, ResponseCode::FormErr) };
    let kind = question.query_type;
    if question.query_class != DNSClass::IN || matches!(kind, RecordType::AXFR | RecordType::IXFR) {
        return with_code(reply, ResponseCode::Refused);
    }
    if let Some(answer) = zone.answer(&question.name, kind) {
        if answer.code == ResponseCode::ServFail {
            return with_code(reply, answer.code);
        }
        reply.metadata.authoritative = true;
        reply.metadata.response_code = answer.code;
        if answer.records.is_empty() {
            reply.add_authority(zone.soa());
        }
        reply.add_answers(answer.records);
        reply.add_additionals(answer.additionals);
        return match answer.alias {
            Some(alias) => complete(reply, question, alias, zone, upstream),
            None => Reply::Now(reply),
        };
    }
    forward(reply, question, question.name.to_lowercase(), upstream)
}

/// Adds the addresses of an alias. An alias of the cluster is resolved once, so aliases cannot form a loop.
fn complete(
    mut reply: Message,
    question: &Query,
    alias: hickory_proto::rr::Name,
    zone: &Zone,
    upstream: &Arc<Upstream>,
) -> Reply {
    match zone.answer(&alias, question.query_type) {
        Some(answer) => {
            // The response code is the one of the alias's target, which may not exist.
            reply.metadata.response_code = answer.code;
            if answer.records.is_empty() && answer.code != ResponseCode::ServFail {
                reply.add_authority(zone.soa());
            }
            reply.add_answers(answer.records);
            Reply::Now(reply)
        }
        None => forward(reply, question, alias.to_lowercase(), upstream),
    }
}

fn forward(reply: Message, query: &Query, name: hickory_proto::rr::Name, upstream: &Arc<Upstream>) -> Reply {
    let question = Question { name, kind: query.query_type };
    if upstream.detect_loop(&question) {
        return with_code(reply, ResponseCode::Refused);
    }
    let pending = Pending { reply, query: query.clone(), question };
    match upstream.cached(&pending.question) {
        Some(answer) => Reply::Now(pending.merged(answer)),
        None => Reply::Forward(pending),
    }
}

fn with_code(mut reply: Message, code: ResponseCode) -> Reply {
    reply.metadata.response_code = code;
    Reply::Now(reply)
}

/// A message that cannot be parsed gets the response "format error" if its header marks it as a query.
fn malformed(bytes: &[u8]) -> Reply {
    const RESPONSE: u8 = 0x80;
    match bytes {
        [high, low, flags, _, _, _, _, _, _, _, _, _, ..] if flags & RESPONSE == 0 => {
            let id = u16::from_be_bytes([*high, *low]);
            Reply::Now(Message::error_msg(id, OpCode::Query, ResponseCode::FormErr))
        }
        _ => Reply::Nothing,
    }
}

// === impl Pending ===

impl Pending {
    /// Forwards the query to the upstream servers, and completes the reply with their answer.
    pub(crate) async fn resolve(self, upstream: Arc<Upstream>, permit: Permit) -> Message {
        let answer = upstream.resolve(self.question.clone(), permit).await;
        self.merged(answer)
    }

    /// The reply for a query that exceeds a limit: an expired answer, or a refusal.
    pub(crate) fn without_permit(self, upstream: &Upstream) -> Message {
        if let Some(answer) = upstream.expired(&self.question) {
            return self.merged(answer);
        }
        upstream.metrics.rejected();
        let mut reply = self.reply;
        reply.metadata.response_code = ResponseCode::Refused;
        reply
    }

    fn merged(self, answer: Message) -> Message {
        let mut reply = self.reply;
        reply.metadata.response_code = answer.metadata.response_code;
        reply.metadata.authoritative = false;
        let queried = self.query.name.to_lowercase();
        let own = |mut record: hickory_proto::rr::Record| {
            // The reply repeats the client's spelling of the name.
            if record.name == queried {
                record.name = self.query.name.clone();
            }
            record
        };
        reply.add_answers(answer.answers.into_iter().map(own));
        reply.add_authorities(answer.authorities);
        reply
    }
}

/// Maximum bytes of a UDP reply that the client accepts.
pub(crate) fn udp_size(query: &[u8]) -> u16 {
    let theirs = Message::from_vec(query).ok().and_then(|query| query.edns);
    theirs.map_or(UDP_MIN, |edns| edns.max_payload()).clamp(UDP_MIN, UDP_PAYLOAD)
}

/// Encodes the message. A message of more than `limit` bytes is sent truncated: with the flag TC and without
/// records.
pub(crate) fn encode(message: &Message, limit: u16) -> Option<Vec<u8>> {
    let bytes = message.to_vec().ok().filter(|bytes| bytes.len() <= usize::from(limit));
    bytes.or_else(|| message.truncate().to_vec().ok())
}

#[cfg(test)]
mod tests;
