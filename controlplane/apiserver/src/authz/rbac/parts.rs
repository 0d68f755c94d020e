//! A map in parts. A clone of the map shares all parts. A change of a shared map copies only the part of the changed
//! key.

use std::{
    borrow::Borrow,
    collections::HashMap,
    hash::{BuildHasher, Hash, RandomState},
    sync::Arc,
};

const PARTS: usize = 64;

/// A map that is cheap to clone.
#[derive(Clone)]
pub(super) struct Parts<K, V> {
    /// Randomly seeded, so that a user cannot choose names that all belong to one part.
    hasher: RandomState,
    parts: Box<[Arc<HashMap<K, V>>]>,
}

// === impl Parts ===

impl<K, V> Default for Parts<K, V> {
    fn default() -> Self {
        let parts = (0..PARTS).map(|_| Arc::default()).collect();
        Self { hasher: RandomState::new(), parts }
    }
}

impl<K: Eq + Hash + Clone, V: Clone> Parts<K, V> {
    pub(super) fn get<Q: Eq + Hash + ?Sized>(&self, key: &Q) -> Option<&V>
    where
        K: Borrow<Q>,
    {
        self.parts[self.place(key)].get(key)
    }

    /// The part to which the key belongs. If another clone of the map shares the part, the part is copied first.
    pub(super) fn part_mut<Q: Hash + ?Sized>(&mut self, key: &Q) -> &mut HashMap<K, V>
    where
        K: Borrow<Q>,
    {
        let place = self.place(key);
        Arc::make_mut(&mut self.parts[place])
    }

    fn place<Q: Hash + ?Sized>(&self, key: &Q) -> usize {
        (self.hasher.hash_one(key) % PARTS as u64) as usize
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.parts.iter().flat_map(|part| part.iter())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_copies_one_part() {
        let mut map = Parts::<String, usize>::default();
        for number in 0..10_000 {
            let key = number.to_string();
            map.part_mut(&key).insert(key, number);
        }
        let read = map.clone();
        map.part_mut("7").insert("7".to_owned(), 0);
        map.part_mut("8").remove("8");
        assert_eq!((map.get("7"), map.get("8"), map.get("9")), (Some(&0), None, Some(&9)));
        assert_eq!((read.get("7"), read.get("8"), read.iter().count()), (Some(&7), Some(&8), 10_000));
        let copied = map.parts.iter().zip(&read.parts).filter(|(own, other)| !Arc::ptr_eq(own, other));
        assert!(copied.count() <= 2);
    }
}
