//! Equal values in cached objects are stored once.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// The values that objects share. A value is freed with the last object that has it.
pub(super) struct SharedValues<T> {
    entries: Mutex<Entries<T>>,
    /// Random keys, so that clients cannot choose values with equal hashes.
    hasher: RandomState,
}

struct Entries<T> {
    /// The values by a hash of some of their fields. If two different values have the same hash, the map has the newer
    /// value.
    by_hash: HashMap<u64, Weak<T>>,
    /// The number of entries at which the entries of freed values are removed.
    sweep_at: usize,
}

// === impl SharedValues ===

impl<T: PartialEq> SharedValues<T> {
    /// The minimum number of entries before a sweep.
    const SWEEP_MIN: usize = 1024;

    pub(super) fn new() -> Self {
        let entries = Entries { by_hash: HashMap::new(), sweep_at: Self::SWEEP_MIN };
        Self { entries: Mutex::new(entries), hasher: RandomState::new() }
    }

    /// Returns the equal value that another object has, otherwise the new value. `facts` returns a hash of some fields
    /// of a value. Equal values must have equal hashes.
    pub(super) fn share(&self, value: T, facts: impl Fn(&T) -> u64) -> Arc<T> {
        let hash = facts(&value);
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = entries.by_hash.get(&hash).and_then(Weak::upgrade)
            && *known == value
        {
            return known;
        }
        let value = Arc::new(value);
        entries.by_hash.insert(hash, Arc::downgrade(&value));
        if entries.by_hash.len() >= entries.sweep_at {
            entries.by_hash.retain(|_, value| value.strong_count() > 0);
            entries.by_hash.shrink_to(Self::SWEEP_MIN);
            entries.sweep_at = (entries.by_hash.len() * 2).max(Self::SWEEP_MIN);
        }
        value
    }

    /// The hash of some fields of a value, for [`SharedValues::share`].
    pub(super) fn hash(&self, facts: impl Hash) -> u64 {
        self.hasher.hash_one(facts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_values_are_stored_once_and_entries_of_freed_values_are_removed() {
        let values = SharedValues::<String>::new();
        let share = |text: &str| values.share(text.to_owned(), |text| values.hash(text));
        let (one, other) = (share("a"), share("a"));
        assert!(Arc::ptr_eq(&one, &other) && !Arc::ptr_eq(&one, &share("b")));
        for number in 0..10_000 {
            share(&number.to_string());
        }
        assert!(values.entries.lock().unwrap().by_hash.len() <= 1024);
        assert!(Arc::ptr_eq(&one, &share("a")));
    }

    #[test]
    fn different_values_with_equal_hashes_are_kept_apart() {
        let values = SharedValues::<String>::new();
        let share = |text: &str| values.share(text.to_owned(), |_| 1);
        let (one, other) = (share("a"), share("b"));
        assert_eq!((one.as_str(), other.as_str()), ("a", "b"));
    }
}
