//! The summary of another server's answer, for the forwarder and the cache.
//!
//! The summary is read from the wire format in one pass. The pass decodes no names and no data of records, so it is
//! cheap for large answers, too. A large answer is decoded later for each reply, in the turn of the client that gets
//! the reply.

use std::time::Duration;

use hickory_proto::op::{Header, Query, ResponseCode};
use hickory_proto::rr::RecordType;
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};

use crate::answer::Ttls;

/// Maximum time for which an answer is used, even if its time to live is longer.
const MAX_TTL: Duration = Duration::from_secs(3600);
/// Maximum time for which a negative answer is used. RFC 2308 section 5 allows hours; a short time makes new names
/// visible soon.
const MAX_NEGATIVE_TTL: Duration = Duration::from_secs(30);

/// The summary of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) code: ResponseCode,
    /// Whether the message had no room for all records.
    pub(crate) is_truncated: bool,
    /// Whether the section answer has records.
    pub(crate) is_positive: bool,
    /// The time for which the answer may be cached. `None` if it must not be cached.
    pub(crate) lifetime: Option<Duration>,
}

/// A record whose name and data are not decoded.
struct RawRecord<'a> {
    kind: u16,
    /// The field of the time to live. The record of EDNS has other data in it.
    ttl: u32,
    data: &'a [u8],
}

/// The records that determine the lifetime of an answer. Times are in seconds.
#[derive(Default)]
struct Lifetimes {
    /// The shortest time to live of the section answer.
    answer: Option<u32>,
    /// Whether the section answer has a record of the queried type, and not only aliases.
    is_complete: bool,
    /// The time for which the SOA record permits the use of a negative answer.
    soa: Option<u32>,
}

// === impl Summary ===

impl Summary {
    /// Reads the summary of the answer to a question of the type `kind`. `None` if the message is malformed.
    pub(crate) fn read(bytes: &[u8], kind: RecordType) -> Option<Self> {
        let mut decoder = BinDecoder::new(bytes);
        let Header { metadata, counts, .. } = Header::read(&mut decoder).ok()?;
        for _ in 0..counts.queries {
            Query::read(&mut decoder).ok()?;
        }
        let mut rest = bytes.get(decoder.index()..)?;
        let mut lifetimes = Lifetimes::default();
        for _ in 0..counts.answers {
            let record = RawRecord::read(&mut rest)?;
            let ttl = time_to_live(record.ttl);
            lifetimes.answer = Some(lifetimes.answer.map_or(ttl, |shortest| shortest.min(ttl)));
            lifetimes.is_complete |= kind == RecordType::ANY || record.kind == u16::from(kind);
        }
        for _ in 0..counts.authorities {
            let record = RawRecord::read(&mut rest)?;
            if record.kind == u16::from(RecordType::SOA) && lifetimes.soa.is_none() {
                // The data end with the field `minimum` (RFC 1035, section 3.3.13).
                let minimum = u32::from_be_bytes(*record.data.last_chunk()?);
                lifetimes.soa = Some(time_to_live(minimum).min(time_to_live(record.ttl)));
            }
        }
        let mut code = metadata.response_code;
        for _ in 0..counts.additionals {
            let record = RawRecord::read(&mut rest)?;
            if record.kind == u16::from(RecordType::OPT) {
                // The record of EDNS extends the code (RFC 6891, section 6.1.3).
                let [high, ..] = record.ttl.to_be_bytes();
                code = ResponseCode::from(high, code.low());
            }
        }
        let is_truncated = metadata.truncation;
        let lifetime = lifetimes.of_answer(code).filter(|_| !is_truncated);
        Some(Self { code, is_truncated, is_positive: counts.answers > 0, lifetime })
    }

    /// The times to live of a new answer. As in CoreDNS, no record has a longer time to live than the cached answer.
    pub(crate) fn ttls(&self) -> Ttls {
        let seconds = |lifetime: Duration| u32::try_from(lifetime.as_secs()).unwrap_or(u32::MAX);
        Ttls::Fresh { most: self.lifetime.map_or(u32::MAX, seconds), age: 0 }
    }
}

// === impl Lifetimes ===

impl Lifetimes {
    /// The time for which an answer with this code may be used. An answer is negative if it has a SOA record, but no
    /// record of the queried type. It may begin with aliases (RFC 2308, section 2).
    fn of_answer(&self, code: ResponseCode) -> Option<Duration> {
        let (ttl, most) = match (code, self.answer, self.soa) {
            (ResponseCode::NoError, Some(ttl), soa) if self.is_complete || soa.is_none() => (ttl, MAX_TTL),
            (ResponseCode::NoError | ResponseCode::NXDomain, ttl, Some(soa)) => {
                (ttl.map_or(soa, |ttl| ttl.min(soa)), MAX_NEGATIVE_TTL)
            }
            _ => return None,
        };
        Some(Duration::from_secs(ttl.into()).min(most))
    }
}

// === impl RawRecord ===

impl<'a> RawRecord<'a> {
    /// Reads a record from the start of `rest`, and sets `rest` to the bytes after it.
    fn read(rest: &mut &'a [u8]) -> Option<Self> {
        skip_name(rest)?;
        let kind = u16::from_be_bytes(take(rest)?);
        let _class: [u8; 2] = take(rest)?;
        let ttl = u32::from_be_bytes(take(rest)?);
        let length = u16::from_be_bytes(take(rest)?);
        let (data, after) = rest.split_at_checked(length.into())?;
        *rest = after;
        Some(Self { kind, ttl, data })
    }
}

/// A time to live in seconds. A value with the top bit set counts as 0 (RFC 2181, section 8).
fn time_to_live(field: u32) -> u32 {
    i32::try_from(field).map_or(0, i32::unsigned_abs)
}

/// Skips a name. The name ends with an empty label or with a pointer (RFC 1035, section 4.1.4).
fn skip_name(rest: &mut &[u8]) -> Option<()> {
    loop {
        let [length] = take::<1>(rest)?;
        match length {
            0 => return Some(()),
            1..=63 => *rest = rest.get(usize::from(length)..)?,
            192.. => return take::<1>(rest).map(|_low_byte| ()),
            64..=191 => return None,
        }
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (first, after) = rest.split_first_chunk::<N>()?;
    *rest = after;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::{Edns, Message, OpCode};
    use hickory_proto::rr::rdata::{A, CNAME, SOA};
    use hickory_proto::rr::{Name, RData, Record};

    use super::*;

    /// An answer with these records in the sections answer and authority.
    fn answer(code: ResponseCode, answers: &[Record], authorities: &[Record]) -> Message {
        let mut message = Message::response(1, OpCode::Query);
        message.metadata.response_code = code;
        let name = Name::from_ascii("alias.example.").unwrap();
        message.add_query(Query::query(name, RecordType::A));
        message.answers = answers.to_vec();
        message.authorities = authorities.to_vec();
        message
    }

    fn read(message: &Message) -> Summary {
        Summary::read(&message.to_vec().unwrap(), RecordType::A).unwrap()
    }

    fn record(ttl: u32, data: RData) -> Record {
        Record::from_rdata(Name::from_ascii("alias.example.").unwrap(), ttl, data)
    }

    fn alias(ttl: u32) -> Record {
        record(ttl, RData::CNAME(CNAME(Name::from_ascii("target.example.").unwrap())))
    }

    fn soa(minimum: u32) -> Record {
        let name = Name::from_ascii("example.").unwrap();
        let soa = SOA::new(name.clone(), name.clone(), 1, 1, 1, 1, minimum);
        Record::from_rdata(name, 3000, RData::SOA(soa))
    }

    fn seconds(seconds: u64) -> Option<Duration> {
        Some(Duration::from_secs(seconds))
    }

    #[test]
    fn an_alias_of_an_absent_name_is_a_negative_answer() {
        for code in [ResponseCode::NoError, ResponseCode::NXDomain] {
            assert_eq!(read(&answer(code, &[alias(600)], &[soa(5)])).lifetime, seconds(5));
            assert_eq!(read(&answer(code, &[alias(600)], &[soa(3000)])).lifetime, Some(MAX_NEGATIVE_TTL));
            assert_eq!(read(&answer(code, &[alias(2)], &[soa(3000)])).lifetime, seconds(2));
            assert_eq!(read(&answer(code, &[], &[soa(7)])).lifetime, seconds(7));
        }
    }

    /// Some servers add a SOA record to each answer.
    #[test]
    fn an_answer_with_an_address_and_a_soa_record_is_positive() {
        let address = record(900, RData::A(A([1, 2, 3, 4].into())));
        let both = [alias(1000), address.clone()];
        assert_eq!(read(&answer(ResponseCode::NoError, &both, &[soa(5)])).lifetime, seconds(900));
        assert_eq!(read(&answer(ResponseCode::NXDomain, &both, &[soa(5)])).lifetime, seconds(5));
        let alone = answer(ResponseCode::NoError, &[address], &[soa(5)]).to_vec().unwrap();
        let lifetime = |kind| Summary::read(&alone, kind).unwrap().lifetime;
        assert_eq!(lifetime(RecordType::ANY), seconds(900));
        assert_eq!(lifetime(RecordType::AAAA), seconds(5));
        let long = record(9000, RData::A(A([1, 2, 3, 4].into())));
        assert_eq!(read(&answer(ResponseCode::NoError, &[long], &[])).lifetime, Some(MAX_TTL));
    }

    #[test]
    fn truncated_answers_and_failures_are_not_cached() {
        let mut truncated = answer(ResponseCode::NoError, &[alias(600)], &[]);
        assert_eq!(read(&truncated).lifetime, seconds(600));
        truncated.metadata.truncation = true;
        assert!(read(&truncated).is_truncated && read(&truncated).lifetime.is_none());
        for code in [ResponseCode::ServFail, ResponseCode::Refused, ResponseCode::FormErr] {
            let failure = read(&answer(code, &[alias(600)], &[soa(5)]));
            assert_eq!((failure.code, failure.lifetime), (code, None));
        }
        assert_eq!(read(&answer(ResponseCode::NoError, &[], &[])).lifetime, None);
    }

    #[test]
    fn a_time_to_live_with_the_top_bit_set_is_zero() {
        let address = |ttl: u32| record(ttl, RData::A(A([1, 2, 3, 4].into())));
        for (ttl, expect) in [(0x7fff_ffff, Some(MAX_TTL)), (0x8000_0000, seconds(0)), (u32::MAX, seconds(0))]
        {
            let summary = read(&answer(ResponseCode::NoError, &[alias(600), address(ttl)], &[]));
            let expect_both = expect.map(|lifetime| lifetime.min(Duration::from_secs(600)));
            assert_eq!(summary.lifetime, expect_both, "{ttl}");
            assert_eq!(read(&answer(ResponseCode::NoError, &[address(ttl)], &[])).lifetime, expect);
        }
        assert_eq!(read(&answer(ResponseCode::NXDomain, &[], &[soa(u32::MAX)])).lifetime, seconds(0));
    }

    #[test]
    fn the_code_is_extended_by_edns() {
        let mut message = answer(ResponseCode::BADCOOKIE, &[], &[]);
        message.set_edns(Edns::new());
        assert_eq!(read(&message).code, ResponseCode::BADCOOKIE);
    }

    #[test]
    fn each_cut_message_is_malformed() {
        let whole = answer(ResponseCode::NoError, &[alias(600)], &[soa(5)]).to_vec().unwrap();
        assert!(Summary::read(&whole, RecordType::A).is_some());
        for end in 0..whole.len() {
            assert_eq!(Summary::read(&whole[..end], RecordType::A), None, "{end}");
        }
    }
}
