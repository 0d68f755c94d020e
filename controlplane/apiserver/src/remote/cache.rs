//! Cache of webhook responses with a time to live. Acceptances and refusals are separate parts. A full part evicts its
//! oldest entry.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

/// Maximum number of acceptances, and of refusals.
const MAX_ENTRIES: usize = 4096;

/// Responses by the digest of the request. Acceptances and refusals have separate limits: clients without permissions
/// cause refusals only, and must not evict the acceptances of other clients.
pub(crate) struct ResponseCache<V> {
    outcomes: Mutex<Outcomes<V>>,
}

/// The entries by outcome.
struct Outcomes<V> {
    accepted: Entries<V>,
    refused: Entries<V>,
}

struct Entries<V> {
    /// Maximum number of entries.
    max: usize,
    /// The responses, with the time at which they expire.
    by_key: HashMap<Key, (V, Instant)>,
    /// Keys in the order in which they were added.
    order: VecDeque<Key>,
}

/// The kind of a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Accepted,
    Refused,
}

/// The digest of a request.
pub(crate) type Key = [u8; 32];

/// The digest of the parts of a request.
pub(crate) fn key(parts: &[&[u8]]) -> Key {
    let mut digest = Sha256::new();
    for part in parts {
        digest.update(part.len().to_be_bytes());
        digest.update(part);
    }
    digest.finalize().into()
}

impl<V: Clone> ResponseCache<V> {
    pub(crate) fn new() -> Self {
        Self::with_max_entries(MAX_ENTRIES)
    }

    /// A cache for at most `max` acceptances and `max` refusals.
    pub(crate) fn with_max_entries(max: usize) -> Self {
        Self { outcomes: Mutex::new(Outcomes { accepted: Entries::new(max), refused: Entries::new(max) }) }
    }

    /// The response, unless it has expired.
    pub(crate) fn get(&self, key: &Key) -> Option<V> {
        let outcomes = self.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        outcomes.accepted.get(key).or_else(|| outcomes.refused.get(key))
    }

    /// Adds a response with a time to live; zero adds nothing. Replaces an earlier response to the same request.
    pub(crate) fn insert(&self, key: Key, value: V, outcome: Outcome, lasts: Duration) {
        if lasts.is_zero() {
            return;
        }
        let mut outcomes = self.outcomes.lock().unwrap_or_else(PoisonError::into_inner);
        let Outcomes { accepted, refused } = &mut *outcomes;
        let (own, other) = match outcome {
            Outcome::Accepted => (accepted, refused),
            Outcome::Refused => (refused, accepted),
        };
        if other.by_key.remove(&key).is_some() {
            other.order.retain(|one| *one != key);
        }
        own.insert(key, value, Instant::now() + lasts);
    }
}

impl<V: Clone> Entries<V> {
    fn new(max: usize) -> Self {
        Self { max, by_key: HashMap::new(), order: VecDeque::new() }
    }

    fn get(&self, key: &Key) -> Option<V> {
        let (value, ends) = self.by_key.get(key)?;
        (Instant::now() < *ends).then(|| value.clone())
    }

    fn insert(&mut self, key: Key, value: V, ends: Instant) {
        if self.by_key.insert(key, (value, ends)).is_none() {
            self.order.push_back(key);
        }
        while self.order.len() > self.max {
            let Some(oldest) = self.order.pop_front() else { return };
            self.by_key.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbered(number: usize) -> Key {
        key(&[&number.to_be_bytes()])
    }

    #[tokio::test(start_paused = true)]
    async fn answers_expire_and_their_number_is_limited() {
        let cache = ResponseCache::new();
        let lasts = Duration::from_secs(10);
        cache.insert(numbered(0), 7, Outcome::Accepted, lasts);
        cache.insert(numbered(1), 8, Outcome::Accepted, Duration::ZERO);
        assert_eq!((cache.get(&numbered(0)), cache.get(&numbered(1))), (Some(7), None));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(cache.get(&numbered(0)), None);
        for number in 0..2 * MAX_ENTRIES {
            cache.insert(numbered(number), 1, Outcome::Accepted, lasts);
        }
        let outcomes = cache.outcomes.lock().unwrap();
        assert_eq!(
            (outcomes.accepted.by_key.len(), outcomes.accepted.order.len()),
            (MAX_ENTRIES, MAX_ENTRIES)
        );
    }

    #[tokio::test(start_paused = true)]
    async fn refusals_evict_no_acceptance_and_the_last_answer_counts() {
        let cache = ResponseCache::new();
        let lasts = Duration::from_secs(10);
        cache.insert(numbered(0), 7, Outcome::Accepted, lasts);
        for number in 1..=2 * MAX_ENTRIES {
            cache.insert(numbered(number), 1, Outcome::Refused, lasts);
        }
        assert_eq!(cache.get(&numbered(0)), Some(7));
        for round in 0..2 * MAX_ENTRIES {
            let outcome = if round % 2 == 0 { Outcome::Refused } else { Outcome::Accepted };
            cache.insert(numbered(0), round, outcome, lasts);
            assert_eq!(cache.get(&numbered(0)), Some(round));
        }
        let outcomes = cache.outcomes.lock().unwrap();
        assert!(outcomes.accepted.order.len() <= MAX_ENTRIES && outcomes.refused.order.len() <= MAX_ENTRIES);
    }

    #[test]
    fn parts_of_a_question_do_not_run_together() {
        assert_ne!(key(&[b"ab", b"c"]), key(&[b"a", b"bc"]));
    }
}
