//! Limits on the events about one object, with upstream's figures (`EventCorrelator`). The module does no I/O.
//!
//! A component may send 25 events about one object at once, then one event every 5 minutes. If 10 events differ only in
//! their message, events with further messages count as repeats of one combined event. The count restarts after 10
//! minutes without such an event.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::time::Duration;

use coracle_token_bucket::{Rate, TokenBucket};
use jiff::Timestamp;

use crate::event::Record;

/// Limit on the events about one object: 25 at once, then one every 300 seconds.
const RATE: Rate = Rate { per_second: 1.0 / 300.0, burst: 25.0 };
/// Maximum number of different messages of similar events. Events with further messages are combined into one event.
const SIMILAR_MAX: usize = 10;
/// Seconds without a similar event after which the count of messages restarts.
const SIMILAR_SECONDS: f64 = 600.0;
/// Capacity of the tables of objects and of groups of similar events.
const KEPT_MAX: usize = 4096;

/// A digest of an event's identity. It is the key in the tables, because the identity as text can take almost a
/// kilobyte for each recent event. The hash functions have random keys, so that authors of messages cannot find
/// collisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Digest(u64, u64);

/// An event that is to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Admitted {
    /// Events with the same digest are repeats.
    pub(crate) digest: Digest,
    /// Whether the event is combined with events that have other messages.
    pub(crate) is_combined: bool,
}

#[derive(Default)]
pub(crate) struct Correlator {
    hashers: [RandomState; 2],
    /// Limits on the events about one object, by component and uid.
    buckets: HashMap<Digest, ObjectLimit>,
    /// Groups of similar events, by the identity without the message.
    similar: HashMap<Digest, Similar>,
}

/// The limit on the events about one object.
#[derive(Clone, Copy)]
struct ObjectLimit {
    tokens: TokenBucket,
    /// Time of the last event.
    at: Timestamp,
}

/// The messages of events that differ in their message only.
struct Similar {
    /// Hashes of messages, at most [`SIMILAR_MAX`].
    messages: Vec<u64>,
    last: Timestamp,
}

// === impl Correlator ===

impl Correlator {
    /// The digest under which an event is counted. `None` if the event exceeds the limit of its object. Changes the
    /// message of a combined event.
    pub(crate) fn admit(&mut self, record: &mut Record) -> Option<Admitted> {
        let admitted = self.aggregate(record);
        self.take_token(record).then_some(admitted)
    }

    fn aggregate(&mut self, record: &mut Record) -> Admitted {
        let group = self.digest(&record.group());
        let message = self.hashers[0].hash_one(&record.event.message);
        keep_newest(&mut self.similar, KEPT_MAX, |similar| similar.last);
        let new = Similar { messages: Vec::new(), last: record.at };
        let similar = self.similar.entry(group).or_insert(new);
        if seconds(similar.last, record.at) > SIMILAR_SECONDS {
            similar.messages.clear();
        }
        similar.last = record.at;
        let is_known = similar.messages.contains(&message);
        if !is_known && similar.messages.len() < SIMILAR_MAX {
            // Most groups have only one message, so the list grows by one element at a time.
            similar.messages.reserve_exact(1);
            similar.messages.push(message);
        } else if !is_known {
            record.event.message.insert_str(0, "(combined from similar events): ");
            return Admitted { digest: group, is_combined: true };
        }
        Admitted { digest: self.digest(&(group, &record.event.message)), is_combined: false }
    }

    /// Takes a token of the event's object. Returns false if the object has no token left.
    fn take_token(&mut self, record: &Record) -> bool {
        keep_newest(&mut self.buckets, KEPT_MAX, |bucket| bucket.at);
        let object = self.digest(&(&record.component, record.uid()));
        let full = ObjectLimit { tokens: TokenBucket::full(RATE), at: record.at };
        self.buckets.entry(object).or_insert(full).take(record.at)
    }

    fn digest(&self, of: &impl Hash) -> Digest {
        Digest(self.hashers[0].hash_one(of), self.hashers[1].hash_one(of))
    }
}

/// Removes the older half of a full table.
pub(crate) fn keep_newest<K: Eq + Hash, V>(
    table: &mut HashMap<K, V>,
    capacity: usize,
    at: impl Fn(&V) -> Timestamp,
) {
    if table.len() < capacity {
        return;
    }
    let mut times: Vec<Timestamp> = table.values().map(&at).collect();
    times.sort();
    let middle = times[times.len() / 2];
    table.retain(|_, value| at(value) > middle);
}

fn seconds(from: Timestamp, to: Timestamp) -> f64 {
    to.duration_since(from).as_secs_f64().max(0.0)
}

impl ObjectLimit {
    fn take(&mut self, now: Timestamp) -> bool {
        let since_last = Duration::try_from(now.duration_since(self.at)).unwrap_or_default();
        self.at = now;
        self.tokens.take(RATE, since_last)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use k8s_openapi::api::core::v1::ObjectReference;

    use super::*;
    use crate::event::Event;

    fn record(uid: &str, message: &str, second: i64) -> Record {
        let about = ObjectReference { uid: Some(uid.to_owned()), ..ObjectReference::default() };
        let at = Timestamp::from_second(second).unwrap();
        Record { about, component: "c".into(), event: Event::warning("Unhealthy", message), at }
    }

    #[test]
    fn events_about_one_object_are_limited_until_there_is_a_new_token() {
        let mut correlator = Correlator::default();
        let mut sent = |uid: &str, second| correlator.admit(&mut record(uid, "x", second)).is_some();
        assert_eq!((0..40).filter(|_| sent("noisy", 0)).count(), 25);
        assert!(!sent("noisy", 299));
        assert!(sent("other", 299));
        assert!(sent("noisy", 301));
    }

    #[test]
    fn events_that_differ_only_in_their_message_are_combined() {
        let mut correlator = Correlator::default();
        let mut admit = |message: String, second| {
            let mut record = record("u", &message, second);
            (correlator.admit(&mut record), record.event.message)
        };
        let keys: HashSet<_> = (0..20).map(|n| admit(format!("at {n}"), 0).0.unwrap()).collect();
        assert_eq!(keys.len(), 11, "10 events with their own message, and one for all others");
        assert_eq!(admit("at 99".to_owned(), 1).1, "(combined from similar events): at 99");
        assert_eq!(admit("at 5".to_owned(), 1).1, "at 5", "an event with a known message is not combined");
        assert_eq!(admit("late".to_owned(), 700).1, "late");
    }

    #[test]
    fn an_entry_of_the_tables_is_small() {
        assert!(size_of::<(Digest, crate::Sent)>() + size_of::<(Digest, Similar)>() <= 128);
        let mut correlator = Correlator::default();
        correlator.admit(&mut record("u", "x", 0));
        let capacities = correlator.similar.values().map(|similar| similar.messages.capacity());
        assert_eq!(capacities.collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn the_tables_are_bounded() {
        let mut correlator = Correlator::default();
        for n in 0..20_000 {
            correlator.admit(&mut record(&n.to_string(), "x", n));
        }
        assert!(correlator.buckets.len() <= KEPT_MAX && correlator.similar.len() <= KEPT_MAX);
    }
}
