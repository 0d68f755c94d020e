//! Owners of checkpoint records: the pods that need them. Pure.

use std::collections::{HashMap, HashSet};
use std::ffi::OsString;

use super::{Key, Kind};

/// Reference counts of records.
#[derive(Default)]
pub(super) struct Owners {
    by_pod: HashMap<String, Box<[Key]>>,
    counts: HashMap<Key, usize>,
}

impl Owners {
    /// Sets the records of a pod; returns those that no pod needs any more.
    pub(super) fn set(&mut self, uid: &str, keys: Vec<Key>) -> Vec<Key> {
        let distinct: HashSet<Key> = keys.into_iter().collect();
        let keys: Box<[Key]> = distinct.into_iter().collect();
        for key in &keys {
            *self.counts.entry(key.clone()).or_default() += 1;
        }
        let before =
            if keys.is_empty() { self.by_pod.remove(uid) } else { self.by_pod.insert(uid.to_owned(), keys) };
        let mut dropped = Vec::new();
        for key in before.into_iter().flatten() {
            let Some(count) = self.counts.get_mut(&key) else { continue };
            *count -= 1;
            if *count == 0 {
                self.counts.remove(&key);
                dropped.push(key);
            }
        }
        dropped
    }

    /// Whether a pod needs the record.
    pub(super) fn has(&self, key: &Key) -> bool {
        self.counts.contains_key(key)
    }

    /// File names of the needed records of a kind.
    pub(super) fn files(&self, kind: Kind) -> HashSet<OsString> {
        self.counts.keys().filter(|key| key.kind() == kind).map(Key::file_name).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_dropped_with_the_last_pod_that_needs_it() {
        let (a, b) = (Key::secret("ns", "a"), Key::secret("ns", "b"));
        let mut owners = Owners::default();
        assert_eq!(owners.set("1", vec![a.clone(), b.clone(), b.clone()]), Vec::new());
        assert_eq!(owners.set("2", vec![b.clone()]), Vec::new());
        assert_eq!(owners.set("1", vec![a.clone()]), Vec::new(), "pod 2 still needs b");
        assert_eq!(owners.set("2", Vec::new()), vec![b.clone()]);
        assert!(owners.has(&a) && !owners.has(&b));
        assert_eq!(owners.set("1", Vec::new()), vec![a]);
        assert!(owners.by_pod.is_empty() && owners.counts.is_empty());
    }
}
