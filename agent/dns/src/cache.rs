//! Cache of the answers of upstream servers, bounded in number and size.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use hickory_proto::op::{Message, OpCode, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use tokio::time::Instant;

use crate::answer::{LargeAnswer, ServerAnswer, Ttls};
use crate::large::SMALL_BYTES;
use crate::summary::Summary;

/// Maximum answers in each of the two generations.
const GENERATION_ENTRIES: usize = 4096;
/// Maximum bytes of the small answers and their names in each of the two generations: 8 MiB in total.
const GENERATION_BYTES: usize = 4 << 20;
/// Maximum bytes of the large answers and their names in each of the two generations: 4 MiB in total.
const LARGE_GENERATION_BYTES: usize = 2 << 20;
/// Maximum bytes of all names in a stored small answer, without compression. Each use of the answer decodes the names.
/// A compressed answer of 4 KiB can contain 80 KiB of names.
const MAX_NAME_BYTES: usize = 24 << 10;
/// Time for which a failure is cached if no server has a usable answer. CoreDNS has the same time. RFC 9520 requires at
/// least one second.
const FAILURE_TTL: Duration = Duration::from_secs(5);
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

/// An answer and the time at which it was stored. The message is in wire format, because a decoded message needs up to
/// 100 times the memory.
struct Entry {
    message: Arc<[u8]>,
    code: ResponseCode,
    stored: Instant,
    lifetime: Duration,
    uses: u32,
    /// Whether the answer has records.
    is_positive: bool,
}

/// An answer whose records have their remaining times to live.
pub(crate) enum Cached {
    /// The answer has not expired. With `is_due`, it is used frequently and expires soon, so it must be renewed.
    Fresh { answer: ServerAnswer, is_due: bool },
    /// The answer expired, at most an hour ago.
    Stale(ServerAnswer),
}

/// The cache. Large answers have their own generations, so they cannot evict the small answers.
pub(crate) struct Cache {
    small: Generations,
    large: Generations,
    /// Number of removed answers with records, and number of removed negative answers.
    evictions: [u64; 2],
}

/// Answers in two generations. When the new generation is full, the old generation is dropped, and the new generation
/// becomes the old generation. An entry that is used moves to the new generation. So the number and the size of the
/// entries are bounded, and entries in use stay.
struct Generations {
    new: HashMap<Question, Entry>,
    old: HashMap<Question, Entry>,
    /// Bytes of the entries in `new`.
    new_bytes: usize,
    /// Maximum bytes of each generation.
    max_bytes: usize,
}

impl Default for Cache {
    fn default() -> Self {
        let [small, large] = [GENERATION_BYTES, LARGE_GENERATION_BYTES].map(Generations::new);
        Self { small, large, evictions: [0; 2] }
    }
}

// === impl Cache ===

impl Cache {
    /// The cached answer. Its records have their remaining times to live.
    pub(crate) fn get(&mut self, question: &Question) -> Option<Cached> {
        let (entry, is_large) = match self.small.get(question, &mut self.evictions) {
            Some(entry) => (entry, false),
            None => (self.large.get(question, &mut self.evictions)?, true),
        };
        let age = entry.stored.elapsed();
        if age >= entry.lifetime + MAX_STALE {
            return None;
        }
        entry.uses = entry.uses.saturating_add(1);
        let is_fresh = age < entry.lifetime;
        if !is_fresh && entry.code == ResponseCode::ServFail {
            return None;
        }
        let ttls = match is_fresh {
            true => Ttls::Fresh { most: seconds(entry.lifetime), age: seconds(age) },
            false => Ttls::Stale,
        };
        let answer = match is_large {
            true => ServerAnswer::Large(LargeAnswer::new(Arc::clone(&entry.message), entry.code, ttls)),
            false => {
                let mut message = Message::from_vec(&entry.message).ok()?;
                ttls.apply(&mut message);
                ServerAnswer::Decoded(Arc::new(message))
            }
        };
        if !is_fresh {
            return Some(Cached::Stale(answer));
        }
        let expires_soon = entry.lifetime - age <= entry.lifetime * PREFETCH_PERCENT / 100;
        let is_due = expires_soon && entry.uses >= PREFETCH_USES && entry.is_positive;
        Some(Cached::Fresh { answer, is_due })
    }

    /// Number of answers with records, and number of negative answers.
    pub(crate) fn counts(&self) -> [usize; 2] {
        let all = || [&self.small, &self.large].into_iter().flat_map(Generations::entries);
        let positive = all().filter(|entry| entry.is_positive).count();
        [positive, all().count() - positive]
    }

    /// Number of removed answers with records, and of removed negative answers, since the start.
    pub(crate) fn evictions(&self) -> [u64; 2] {
        self.evictions
    }

    /// Stores an answer if it may be cached. `bytes` is the answer in wire format. `message` is the decoded answer; the
    /// records of a large answer are not decoded.
    pub(crate) fn put(&mut self, question: Question, message: &Message, summary: Summary, bytes: Arc<[u8]>) {
        let Summary { code, is_positive, lifetime, .. } = summary;
        if !matches!(code, ResponseCode::NoError | ResponseCode::NXDomain) {
            return;
        }
        // Remove the older answer, even if the new answer is not stored (RFC 8767, section 4).
        self.small.remove(&question);
        self.large.remove(&question);
        let is_stored = |lifetime: &Duration| !lifetime.is_zero() && name_bytes(message) <= MAX_NAME_BYTES;
        let Some(lifetime) = lifetime.filter(is_stored) else { return };
        let generations = if bytes.len() > SMALL_BYTES { &mut self.large } else { &mut self.small };
        let stored = Instant::now();
        let entry = Entry { message: bytes, code, stored, lifetime, uses: 0, is_positive };
        generations.insert(question, entry, &mut self.evictions);
    }

    /// Caches the failure of the servers for a question. If the cache has an answer, the function does nothing: even an
    /// expired answer is more useful than a failure.
    pub(crate) fn put_failure(&mut self, question: Question) {
        if self.get(&question).is_some() {
            return;
        }
        let code = ResponseCode::ServFail;
        let Ok(bytes) = Message::error_msg(0, OpCode::Query, code).to_vec() else { return };
        let (stored, lifetime) = (Instant::now(), FAILURE_TTL);
        let entry = Entry { message: bytes.into(), code, stored, lifetime, uses: 0, is_positive: false };
        self.small.insert(question, entry, &mut self.evictions);
    }
}

// === impl Generations ===

impl Generations {
    fn new(max_bytes: usize) -> Self {
        Self { new: HashMap::new(), old: HashMap::new(), new_bytes: 0, max_bytes }
    }

    fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.new.values().chain(self.old.values())
    }

    fn get(&mut self, question: &Question, evictions: &mut [u64; 2]) -> Option<&mut Entry> {
        if let Some(entry) = self.old.remove(question) {
            self.insert(question.clone(), entry, evictions);
        }
        self.new.get_mut(question)
    }

    fn remove(&mut self, question: &Question) {
        self.old.remove(question);
        if let Some(entry) = self.new.remove(question) {
            self.new_bytes -= size(question, &entry);
        }
    }

    fn insert(&mut self, question: Question, entry: Entry, evictions: &mut [u64; 2]) {
        let bytes = size(&question, &entry);
        if self.new.len() >= GENERATION_ENTRIES || self.new_bytes + bytes > self.max_bytes {
            let removed = std::mem::replace(&mut self.old, std::mem::take(&mut self.new));
            removed.values().for_each(|entry| evictions[usize::from(!entry.is_positive)] += 1);
            self.new_bytes = 0;
        }
        // Drop an older answer to the question. Otherwise the next `get` would replace the new answer by that answer.
        self.remove(&question);
        self.new_bytes += bytes;
        self.new.insert(question, entry);
    }
}

/// Bytes of the names of all records.
fn name_bytes(message: &Message) -> usize {
    message.all_sections().map(|record| record.name.len()).sum()
}

fn size(question: &Question, entry: &Entry) -> usize {
    question.name.len() + entry.message.len()
}

fn seconds(age: Duration) -> u32 {
    u32::try_from(age.as_secs()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use hickory_proto::rr::rdata::A;
    use hickory_proto::rr::{RData, Record};

    use super::*;

    fn message(ttl: u32) -> Message {
        let mut message = Message::response(1, OpCode::Query);
        message.add_answer(Record::from_rdata(Name::root(), ttl, RData::A(A([1, 2, 3, 4].into()))));
        message
    }

    impl Cache {
        fn store(&mut self, question: Question, message: &Message) {
            self.store_as(question, message, message.to_vec().unwrap());
        }

        /// Stores `bytes` in place of the message.
        fn store_as(&mut self, question: Question, message: &Message, bytes: Vec<u8>) {
            let summary = Summary::read(&message.to_vec().unwrap(), question.kind).unwrap();
            self.put(question, message, summary, bytes.into());
        }

        /// The remaining time of the first record, and whether the answer is fresh.
        fn left(&mut self, question: &Question) -> Option<(u32, bool)> {
            match self.get(question)? {
                Cached::Fresh { answer, .. } => Some((answer.message().answers[0].ttl, true)),
                Cached::Stale(answer) => Some((answer.message().answers[0].ttl, false)),
            }
        }

        /// Makes all answers older.
        pub(crate) fn age(&mut self, by: Duration) {
            for part in [&mut self.small, &mut self.large] {
                let all = part.new.values_mut().chain(part.old.values_mut());
                all.for_each(|entry| entry.stored = entry.stored.checked_sub(by).unwrap());
            }
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
        let left = cache.small.entries().count();
        assert!(left <= 2 * GENERATION_ENTRIES);
        let removed = u64::try_from(5 * GENERATION_ENTRIES - left).unwrap();
        assert_eq!(cache.evictions(), [removed, 0]);
        cache.store(question(2), &message(0));
        assert!(cache.get(&question(2)).is_none());
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
            assert!(answer.to_vec().unwrap().len() <= SMALL_BYTES);
            cache.store(question(number), &answer);
            assert_eq!(cache.get(&question(number)).is_some(), is_stored, "{count} names");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_that_is_not_stored_removes_an_older_one() {
        let mut cache = Cache::default();
        cache.store(question(1), &message(10));
        tokio::time::advance(Duration::from_secs(11)).await;
        let mut refused = message(10);
        refused.metadata.response_code = ResponseCode::FormErr;
        cache.store(question(1), &refused);
        assert_eq!(cache.left(&question(1)), Some((30, false)), "a failure removes no answer");
        cache.store(question(1), &message(0));
        assert!(cache.get(&question(1)).is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn a_new_answer_replaces_one_of_the_old_generation() {
        let mut cache = Cache::default();
        for number in 0..=GENERATION_ENTRIES {
            cache.store(question(number), &message(1000));
        }
        assert!(cache.small.old.contains_key(&question(0)));
        cache.store(question(0), &message(2000));
        assert_eq!(cache.counts(), [GENERATION_ENTRIES + 1, 0]);
        assert_eq!(cache.left(&question(0)), Some((2000, true)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_size_of_all_answers_is_bounded() {
        let mut cache = Cache::default();
        let bytes = |part: &Generations| {
            let all = part.new.iter().chain(&part.old);
            all.map(|(question, entry)| size(question, entry)).sum::<usize>()
        };
        for number in 0..3 * GENERATION_ENTRIES {
            for length in [SMALL_BYTES, SMALL_BYTES, 60_000] {
                let number = if length > SMALL_BYTES { number + 1_000_000 } else { number };
                cache.store_as(question(number), &message(1000), vec![0; length]);
            }
            if number % 500 == 0 {
                let of_new = cache.small.new.iter().map(|(question, entry)| size(question, entry));
                assert_eq!(of_new.sum::<usize>(), cache.small.new_bytes);
                assert!(bytes(&cache.small) <= 2 * GENERATION_BYTES);
                assert!(bytes(&cache.large) <= 2 * LARGE_GENERATION_BYTES);
            }
        }
        assert!(cache.small.entries().count() > 1000, "large answers do not remove small ones");
    }

    #[tokio::test(start_paused = true)]
    async fn a_large_answer_is_stored_once_and_not_decoded() {
        let mut cache = Cache::default();
        let mut large = message(100);
        for number in 0..1000u32 {
            large.add_answer(Record::from_rdata(Name::root(), 200, RData::A(A(number.into()))));
        }
        cache.store(question(1), &message(1000));
        cache.store(question(1), &large);
        tokio::time::advance(Duration::from_secs(40)).await;
        let Some(Cached::Fresh { answer: ServerAnswer::Large(answer), .. }) = cache.get(&question(1)) else {
            panic!("no large answer");
        };
        let message = answer.decode().unwrap();
        assert_eq!(message.answers.len(), 1001);
        assert!(message.answers.iter().all(|record| record.ttl == 60), "at most the lifetime of the answer");
        assert_eq!(cache.counts(), [1, 0]);
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(cache.left(&question(1)), Some((30, false)));
        cache.store(question(1), &self::message(1000));
        assert_eq!((cache.counts(), cache.left(&question(1))), ([1, 0], Some((1000, true))));
        assert_eq!(cache.large.new_bytes, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn failures_expire_soon_and_replace_no_answer() {
        let mut cache = Cache::default();
        cache.store(question(1), &message(10));
        tokio::time::advance(Duration::from_secs(11)).await;
        cache.put_failure(question(1));
        assert_eq!(cache.left(&question(1)), Some((30, false)));
        cache.put_failure(question(2));
        let Some(Cached::Fresh { answer, .. }) = cache.get(&question(2)) else { panic!("no failure") };
        assert_eq!((answer.code(), answer.is_positive()), (ResponseCode::ServFail, false));
        tokio::time::advance(FAILURE_TTL).await;
        assert!(cache.get(&question(2)).is_none(), "no expired failure is used");
        cache.put_failure(question(2));
        assert!(cache.get(&question(2)).is_some());
    }
}
