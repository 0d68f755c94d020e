//! Cache of webhook responses with a time to live. A full cache evicts the oldest entry.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use sha2::{Digest as _, Sha256};
use tokio::time::Instant;

/// Maximum number of entries.
const ENTRIES: usize = 4096;

/// Responses by the digest of the request.
pub(crate) struct AnswerCache<V> {
    entries: Mutex<Entries<V>>,
}

struct Entries<V> {
    by_key: HashMap<Key, (V, Instant)>,
    /// Keys in the order in which they were added.
    order: VecDeque<Key>,
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

impl<V: Clone> AnswerCache<V> {
    pub(crate) fn new() -> Self {
        Self { entries: Mutex::new(Entries { by_key: HashMap::new(), order: VecDeque::new() }) }
    }

    /// The response, unless it has expired.
    pub(crate) fn get(&self, key: &Key) -> Option<V> {
        let entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        let (value, ends) = entries.by_key.get(key)?;
        (Instant::now() < *ends).then(|| value.clone())
    }

    /// Adds a response with a time to live. Zero adds nothing.
    pub(crate) fn insert(&self, key: Key, value: V, lasts: Duration) {
        if lasts.is_zero() {
            return;
        }
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if entries.by_key.insert(key, (value, Instant::now() + lasts)).is_none() {
            entries.order.push_back(key);
        }
        while entries.by_key.len() > ENTRIES {
            let Some(oldest) = entries.order.pop_front() else { return };
            entries.by_key.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn answers_expire_and_their_number_is_limited() {
        let cache = AnswerCache::new();
        let numbered = |number: usize| key(&[&number.to_be_bytes()]);
        cache.insert(numbered(0), 7, Duration::from_secs(10));
        cache.insert(numbered(1), 8, Duration::ZERO);
        assert_eq!((cache.get(&numbered(0)), cache.get(&numbered(1))), (Some(7), None));
        tokio::time::advance(Duration::from_secs(10)).await;
        assert_eq!(cache.get(&numbered(0)), None);
        for number in 0..2 * ENTRIES {
            cache.insert(numbered(number), 1, Duration::from_secs(10));
        }
        let entries = cache.entries.lock().unwrap();
        assert_eq!((entries.by_key.len(), entries.order.len()), (ENTRIES, ENTRIES));
    }

    #[test]
    fn parts_of_a_question_do_not_run_together() {
        assert_ne!(key(&[b"ab", b"c"]), key(&[b"a", b"bc"]));
    }
}
