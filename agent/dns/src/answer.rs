//! An answer of another server: decoded, or in wire format if it is large.

use std::sync::Arc;

use hickory_proto::op::{Header, Message, Query, ResponseCode};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};

/// Time to live of the records of an expired answer, in seconds, as RFC 8767 recommends.
const STALE_TTL: u32 = 30;

/// An answer of another server. All clients that wait for the answer share it.
#[derive(Clone, Debug)]
pub(crate) enum ServerAnswer {
    Decoded(Arc<Message>),
    /// A large answer. The answer is decoded for one reply at a time, because a decoded message needs up to 100 times
    /// the memory.
    Large(LargeAnswer),
}

/// A large answer in wire format.
#[derive(Clone, Debug)]
pub(crate) struct LargeAnswer {
    bytes: Arc<[u8]>,
    code: ResponseCode,
    ttls: Ttls,
}

/// The remaining times to live of the records of an answer.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Ttls {
    /// The answer was received `age` seconds ago. At that time, no record had a time to live above `most` seconds.
    Fresh { most: u32, age: u32 },
    /// The answer has expired.
    Stale,
}

// === impl ServerAnswer ===

impl ServerAnswer {
    pub(crate) fn code(&self) -> ResponseCode {
        match self {
            Self::Decoded(message) => message.metadata.response_code,
            Self::Large(answer) => answer.code,
        }
    }

    /// Whether the section answer has records. A large answer is not decoded: it counts as positive if its code is
    /// `NOERROR`.
    pub(crate) fn is_positive(&self) -> bool {
        match self {
            Self::Decoded(message) => !message.answers.is_empty(),
            Self::Large(answer) => answer.code == ResponseCode::NoError,
        }
    }

    /// The decoded answer.
    #[cfg(test)]
    pub(crate) fn message(&self) -> Arc<Message> {
        match self {
            Self::Decoded(message) => Arc::clone(message),
            Self::Large(answer) => Arc::new(answer.decode().unwrap()),
        }
    }
}

// === impl LargeAnswer ===

impl LargeAnswer {
    pub(crate) fn new(bytes: Arc<[u8]>, code: ResponseCode, ttls: Ttls) -> Self {
        Self { bytes, code, ttls }
    }

    /// Decodes the answer. The caller holds the turn for large messages.
    pub(crate) fn decode(&self) -> Option<Message> {
        let mut message = Message::from_vec(&self.bytes).ok()?;
        self.ttls.apply(&mut message);
        Some(message)
    }

    /// Decodes the first `most` records: those of the section answer, then those of the section authority.
    pub(crate) fn head(&self, most: usize) -> Option<Message> {
        let mut decoder = BinDecoder::new(&self.bytes);
        let Header { metadata, counts, .. } = Header::read(&mut decoder).ok()?;
        let mut message = Message::response(metadata.id, metadata.op_code);
        for _ in 0..counts.queries {
            message.add_query(Query::read(&mut decoder).ok()?);
        }
        let answers = usize::from(counts.answers);
        let authorities = usize::from(counts.authorities).min(most.saturating_sub(answers));
        let mut read =
            |count| Some(Message::read_records(&mut decoder, count, false, metadata.op_code).ok()?.0);
        message.answers = read(answers.min(most))?;
        message.authorities = read(authorities)?;
        self.ttls.apply(&mut message);
        Some(message)
    }
}

// === impl Ttls ===

impl Ttls {
    /// Sets the remaining times to live of all records.
    pub(crate) fn apply(self, message: &mut Message) {
        let records =
            message.answers.iter_mut().chain(&mut message.authorities).chain(&mut message.additionals);
        records.for_each(|record| record.ttl = self.left(record.ttl));
    }

    fn left(self, ttl: u32) -> u32 {
        match self {
            Self::Fresh { most, age } => ttl.min(most).saturating_sub(age),
            Self::Stale => STALE_TTL,
        }
    }
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::OpCode;
    use hickory_proto::rr::rdata::A;
    use hickory_proto::rr::{Name, RData, Record, RecordType};

    use super::*;

    #[test]
    fn the_first_records_of_a_large_answer_are_decoded_alone() {
        let mut message = Message::response(7, OpCode::Query);
        let name = Name::from_ascii("a.example.").unwrap();
        message.add_query(Query::query(name.clone(), RecordType::A));
        let record = |number: u32| Record::from_rdata(name.clone(), 60, RData::A(A(number.into())));
        message.add_answers((0..1000).map(record));
        message.add_authority(record(1000));
        let bytes = message.to_vec().unwrap();
        let ttls = Ttls::Fresh { most: 50, age: 20 };
        let answer = LargeAnswer::new(bytes.into(), ResponseCode::NoError, ttls);
        for (most, answers, authorities) in [(0, 0, 0), (103, 103, 0), (1000, 1000, 0), (2000, 1000, 1)] {
            let head = answer.head(most).unwrap();
            assert_eq!((head.answers.len(), head.authorities.len()), (answers, authorities));
            assert!(head.answers.iter().all(|record| record.ttl == 30));
        }
        assert_eq!(answer.decode().unwrap().answers[999].ttl, 30);
        let stale = LargeAnswer { ttls: Ttls::Stale, ..answer };
        assert_eq!(stale.decode().unwrap().answers[0].ttl, STALE_TTL);
    }
}
