//! Cache of the answers of upstream servers, bounded in number and size.

use std::collections::HashMap;
use std::time::Duration;

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name, RData, RecordType};
use tokio::time::Instant;

/// Maximum answers in each of the two generations.
const GENERATION_ENTRIES: usize = 4096;
/// Maximum bytes of the answers and names in each of the two generations: 8 MiB in total.
const GENERATION_BYTES: usize = 4 << 20;
/// Largest answer that is stored, in bytes on the wire.
const MAX_ANSWER_BYTES: usize = 4096;
/// Maximum bytes of the names of the records of a stored answer, without compression. Each use of an answer decodes the
/// names, and a compressed answer of 4 KiB can contain 80 KiB of names.
const MAX_NAME_BYTES: usize = 24 << 10;
/// Maximum time for which an answer is used, even if its time to live is longer.
const MAX_TTL: Duration = Duration::from_secs(3600);
/// Maximum time for which a negative answer is used. RFC 2308 section 5 allows hours; a short time makes new names
/// visible soon.
const MAX_NEGATIVE_TTL: Duration = Duration::from_secs(30);
/// Maximum time after expiry for which an answer is still used while no server responds (RFC 8767).
const MAX_STALE: Duration = Duration::from_secs(3600);

/// Last part of an answer's lifetime, in percent. In this part a frequently used answer is renewed.
const PREFETCH_PERCENT: u32 = 10;
/// Minimum number of uses of a frequently used answer.
const PREFETCH_USES: u32 = 2;

/// A question. It is the key of the cache.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Question {
    pub(crate) name: Name,
    pub(crate) kind: RecordType,
}

/// An answer and its age. The message is stored in wire format: a parsed message needs up to 100 times the memory.
struct Entry {
    message: Box<[u8]>,
    stored: Instant,
    lifetime: Duration,
    uses: u32,
    /// Whether the answer has records.
    is_positive: bool,
}

/// An answer whose records have their remaining times to live.
pub(crate) enum Cached {
    /// The answer has not expired. With `is_due`, it is used frequently and expires soon, so it must be renewed.
    Fresh { message: Message, is_due: bool },
    /// The answer expired, at most an hour ago.
    Stale(Message),
}

/// A cache of two generations. When the new generation is full, the old generation is dropped, and the new generation
/// becomes the old generation. An entry that is used moves to the new generation. So the number and the size of the
/// entries are bounded, and entries in use stay.
#[derive(Default)]
pub(crate) struct Cache {
    new: HashMap<Question, Entry>,
    old: HashMap<Question, Entry>,
    /// Bytes of the entries in `new`.
    new_bytes: usize,
    /// Number of removed answers with records, and number of removed negative answers.
    evictions: [u64; 2],
}

// === impl Cache ===

impl Cache {
    /// The cached answer. Its records have their remaining times to live.
    pub(crate) fn get(&mut self, question: &Question) -> Option<Cached> {
        if let Some(entry) = self.old.remove(question) {
            self.insert(question.clone(), entry);
        }
        let entry = self.new.get_mut(question)?;
        let age = entry.stored.elapsed();
        if age >= entry.lifetime + MAX_STALE {
            return None;
        }
        entry.uses = entry.uses.saturating_add(1);
        let is_fresh = age < entry.lifetime;
        let mut message = Message::from_vec(&entry.message).ok()?;
        // RFC 8767 recommends 30 seconds for stale answers.
        let left = |ttl: u32| if is_fresh { ttl.saturating_sub(seconds(age)) } else { 30 };
        let records =
            message.answers.iter_mut().chain(&mut message.authorities).chain(&mut message.additionals);
        records.for_each(|record| record.ttl = left(record.ttl));
        if !is_fresh {
            return Some(Cached::Stale(message));
        }
        let expires_soon = entry.lifetime - age <= entry.lifetime * PREFETCH_PERCENT / 100;
        let is_due = expires_soon && entry.uses >= PREFETCH_USES && entry.is_positive;
        Some(Cached::Fresh { message, is_due })
    }

    /// Number of answers with records, and number of negative answers.
    pub(crate) fn counts(&self) -> [usize; 2] {
        let all = || self.new.values().chain(self.old.values());
        let positive = all().filter(|entry| entry.is_positive).count();
        [positive, all().count() - positive]
    }

    /// Number of removed answers with records, and of removed negative answers, since the start.
    pub(crate) fn evictions(&self) -> [u64; 2] {
        self.evictions
    }

    /// Stores an answer if it may be cached. `bytes` is the answer in wire format.
    pub(crate) fn put(&mut self, question: Question, message: &Message, bytes: &[u8]) {
        if bytes.len() > MAX_ANSWER_BYTES || name_bytes(message) > MAX_NAME_BYTES {
            return;
        }
        let Some(lifetime) = lifetime(message).filter(|lifetime| !lifetime.is_zero()) else { return };
        let is_positive = !message.answers.is_empty();
        let entry = Entry { message: bytes.into(), stored: Instant::now(), lifetime, uses: 0, is_positive };
        self.insert(question, entry);
    }

    fn insert(&mut self, question: Question, entry: Entry) {
        let bytes = size(&question, &entry);
        if self.new.len() >= GENERATION_ENTRIES || self.new_bytes + bytes > GENERATION_BYTES {
            let removed = std::mem::replace(&mut self.old, std::mem::take(&mut self.new));
            removed.values().for_each(|entry| self.evictions[usize::from(!entry.is_positive)] += 1);
            self.new_bytes = 0;
        }
        // Drop an older answer to the question. Otherwise the next `get` would replace the new answer by that answer.
        self.old.remove(&question);
        let name_bytes = question.name.len();
        self.new_bytes += bytes;
        if let Some(before) = self.new.insert(question, entry) {
            self.new_bytes -= name_bytes + before.message.len();
        }
    }
}

/// Bytes of the names of all records.
fn name_bytes(message: &Message) -> usize {
    message.all_sections().map(|record| record.name.len()).sum()
}

fn size(question: &Question, entry: &Entry) -> usize {
    question.name.len() + entry.message.len()
}

/// The time for which an answer may be used.
fn lifetime(message: &Message) -> Option<Duration> {
    if message.metadata.truncation {
        return None;
    }
    let shortest = message.answers.iter().map(|record| record.ttl).min();
    match (message.metadata.response_code, shortest) {
        (ResponseCode::NoError, Some(ttl)) => Some(Duration::from_secs(ttl.into()).min(MAX_TTL)),
        (ResponseCode::NoError | ResponseCode::NXDomain, _) => {
            let soa = message.authorities.iter().find_map(|record| match &record.data {
                RData::SOA(soa) => Some(soa.minimum.min(record.ttl)),
                _ => None,
            })?;
            Some(Duration::from_secs(soa.into()).min(MAX_NEGATIVE_TTL))
        }
        _ => None,
    }
}

fn seconds(age: Duration) -> u32 {
    u32::try_from(age.as_secs()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use hickory_proto::op::OpCode;
    use hickory_proto::rr::Record;
    use hickory_proto::rr::rdata::A;

    use super::*;

    fn message(ttl: u32) -> Message {
        let mut message = Message::response(1, OpCode::Query);
        message.add_answer(Record::from_rdata(Name::root(), ttl, RData::A(A([1, 2, 3, 4].into()))));
        message
    }

    impl Cache {
        fn store(&mut self, question: Question, message: &Message) {
            self.put(question, message, &message.to_vec().unwrap());
        }

        /// The remaining time of the first record, and whether the answer is fresh.
        fn left(&mut self, question: &Question) -> Option<(u32, bool)> {
            match self.get(question)? {
                Cached::Fresh { message, .. } => Some((message.answers[0].ttl, true)),
                Cached::Stale(message) => Some((message.answers[0].ttl, false)),
            }
        }

        /// Makes all answers older.
        pub(crate) fn age(&mut self, by: Duration) {
            let all = self.new.values_mut().chain(self.old.values_mut());
            all.for_each(|entry| entry.stored = entry.stored.checked_sub(by).unwrap());
        }
    }

    fn question(number: usize) -> Question {
        Question { name: Name::from_ascii(format!("n{number}.")).unwrap(), kind: RecordType::A }
    }

    #[tokio::test(start_paused = true)]
    async fn answers_expire_and_serve_as_stale_for_an_hour() {
        let mut cache = Cache::default();
        cache.store(question(1), &message(10));
        tokio::time::advance(Duration::from_secs(4)).await;
        assert_eq!(cache.left(&question(1)), Some((6, true)));
        tokio::time::advance(Duration::from_secs(6)).await;
        assert_eq!(cache.left(&question(1)), Some((30, false)));
        tokio::time::advance(MAX_STALE).await;
        assert_eq!(cache.left(&question(1)), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_of_names_is_bounded_and_keeps_used_answers() {
        let mut cache = Cache::default();
        cache.store(question(0), &message(1000));
        for number in 1..5 * GENERATION_ENTRIES {
            cache.store(question(number), &message(1000));
            if number % 1000 == 0 {
                assert!(cache.left(&question(0)).is_some());
            }
        }
        assert!(cache.new.len() + cache.old.len() <= 2 * GENERATION_ENTRIES);
        let removed = u64::try_from(5 * GENERATION_ENTRIES - cache.new.len() - cache.old.len()).unwrap();
        assert_eq!(cache.evictions(), [removed, 0]);
        cache.put(question(1), &message(1000), &[0; MAX_ANSWER_BYTES + 1]);
        cache.store(question(2), &message(0));
        assert!(cache.get(&question(1)).is_none() && cache.get(&question(2)).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_short_answer_with_many_long_names_is_not_stored() {
        let mut cache = Cache::default();
        let long = Name::from_ascii("a.".repeat(120)).unwrap();
        for (number, count, is_stored) in [(1, 10, true), (2, 110, false)] {
            let mut answer = message(1000);
            for _ in 0..count {
                answer.add_answer(Record::from_rdata(long.clone(), 1000, RData::A(A([1, 2, 3, 4].into()))));
            }
            let bytes = answer.to_vec().unwrap();
            assert!(bytes.len() <= MAX_ANSWER_BYTES);
            cache.put(question(number), &answer, &bytes);
            assert_eq!(cache.get(&question(number)).is_some(), is_stored, "{count} names");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_answer_replaces_one_of_the_old_generation() {
        let mut cache = Cache::default();
        for number in 0..=GENERATION_ENTRIES {
            cache.store(question(number), &message(1000));
        }
        assert!(cache.old.contains_key(&question(0)));
        cache.store(question(0), &message(2000));
        assert_eq!(cache.counts(), [GENERATION_ENTRIES + 1, 0]);
        assert_eq!(cache.left(&question(0)), Some((2000, true)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_size_of_all_answers_is_bounded() {
        let mut cache = Cache::default();
        for number in 0..3 * GENERATION_ENTRIES {
            cache.put(question(number), &message(1000), &[0; MAX_ANSWER_BYTES]);
            cache.put(question(number), &message(1000), &[0; MAX_ANSWER_BYTES]);
            let all = |generation: &HashMap<Question, Entry>| {
                generation.iter().map(|(question, entry)| size(question, entry)).sum::<usize>()
            };
            if number % 500 == 0 {
                assert_eq!(all(&cache.new), cache.new_bytes);
                assert!(all(&cache.new) + all(&cache.old) <= 2 * GENERATION_BYTES);
            }
        }
    }
}
