//! Limits on the events about one object, with upstream's figures (`EventCorrelator`). Pure.
//!
//! Events of one component about one object: 25 at once, then one every 5 minutes. Events that differ only in their
//! message: after 10 of them within 10 minutes, all further ones count as repeats of one combined event.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};

use jiff::Timestamp;

use crate::event::{Key, Record};

/// Maximum number of events about one object at once.
const BURST: f64 = 25.0;
/// Seconds after which one more event about the object is allowed.
const REFILL_SECONDS: f64 = 300.0;
/// Maximum number of different messages of similar events. Events with further messages are combined into one.
const SIMILAR_MAX: usize = 10;
/// Seconds without a similar event after which the count of messages restarts.
const SIMILAR_SECONDS: f64 = 600.0;
/// Capacity of the tables of objects and of groups of similar events.
const KEPT_MAX: usize = 4096;

#[derive(Default)]
pub(crate) struct Correlator {
    /// By component and uid.
    quotas: HashMap<(Cow<'static, str>, String), Quota>,
    similar: HashMap<Key, Similar>,
}

#[derive(Clone, Copy)]
struct Quota {
    left: f64,
    at: Timestamp,
}

struct Similar {
    /// Hashes of messages.
    messages: HashSet<u64>,
    last: Timestamp,
}

// === impl Correlator ===

impl Correlator {
    /// The key under which an event is counted. None if it exceeds the limit of its object. Changes the message of a
    /// combined event.
    pub(crate) fn admit(&mut self, record: &mut Record) -> Option<Key> {
        let key = self.aggregate(record);
        self.has_quota(&key, record.at).then_some(key)
    }

    fn aggregate(&mut self, record: &mut Record) -> Key {
        let own = record.key();
        let group = Key { message: String::new(), ..own.clone() };
        keep_newest(&mut self.similar, KEPT_MAX, |similar| similar.last);
        let new = Similar { messages: HashSet::new(), last: record.at };
        let similar = self.similar.entry(group.clone()).or_insert(new);
        if seconds(similar.last, record.at) > SIMILAR_SECONDS {
            similar.messages.clear();
        }
        similar.last = record.at;
        let mut hasher = DefaultHasher::new();
        own.message.hash(&mut hasher);
        let hash = hasher.finish();
        if similar.messages.contains(&hash) || similar.messages.len() < SIMILAR_MAX {
            similar.messages.insert(hash);
            return own;
        }
        record.event.message.insert_str(0, "(combined from similar events): ");
        group
    }

    fn has_quota(&mut self, key: &Key, now: Timestamp) -> bool {
        keep_newest(&mut self.quotas, KEPT_MAX, |quota| quota.at);
        let object = (key.component.clone(), key.uid.clone());
        self.quotas.entry(object).or_insert(Quota { left: BURST, at: now }).take(now)
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

impl Quota {
    fn take(&mut self, now: Timestamp) -> bool {
        self.left = (self.left + seconds(self.at, now) / REFILL_SECONDS).min(BURST);
        self.at = now;
        let allowed = self.left >= 1.0;
        if allowed {
            self.left -= 1.0;
        }
        allowed
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ObjectReference;

    use super::*;
    use crate::event::Event;

    fn record(uid: &str, message: &str, second: i64) -> Record {
        let about = ObjectReference { uid: Some(uid.to_owned()), ..ObjectReference::default() };
        let at = Timestamp::from_second(second).unwrap();
        Record { about, component: "c".into(), event: Event::warning("Unhealthy", message), at }
    }

    #[test]
    fn events_of_a_noisy_object_are_limited_until_later() {
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
        assert_eq!(keys.len(), 11, "10 of their own and one for all others");
        assert_eq!(admit("at 99".to_owned(), 1).1, "(combined from similar events): at 99");
        assert_eq!(admit("at 5".to_owned(), 1).1, "at 5", "an event that is known is counted up");
        assert_eq!(admit("late".to_owned(), 700).1, "late");
    }

    #[test]
    fn the_tables_are_bounded() {
        let mut correlator = Correlator::default();
        for n in 0..20_000 {
            correlator.admit(&mut record(&n.to_string(), "x", n));
        }
        assert!(correlator.quotas.len() <= KEPT_MAX && correlator.similar.len() <= KEPT_MAX);
    }
}
