//! Finds the objects of a cache, and compares resource versions.
//!
//! This module does not depend on the kind of the objects. So its maps and sets are compiled only once for all kinds.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::object::{Key, controller_of};

/// The position of an object in its cache.
pub(super) type Slot = usize;

/// The slots of the objects, and the versions that the watch has delivered.
#[derive(Default)]
pub(super) struct Index {
    objects: BTreeMap<Key, Slot>,
    /// Objects by namespace and controller's uid (empty for orphans), and by name below that.
    owned: HashMap<(String, String), BTreeMap<String, Slot>>,
    /// Slots of removed objects.
    free: Vec<Slot>,
    /// The highest resource version that the watch has delivered.
    progress: u64,
    /// Objects that this process deleted, until the watch reports their deletion.
    tombstones: HashSet<String>,
    /// Objects that were written since a running list request began. The list may be older or newer than the write.
    written: Option<BTreeSet<Key>>,
}

/// Objects that a complete list does not have.
#[derive(Default)]
pub(super) struct Missing {
    pub(super) deleted: Vec<Key>,
    /// Objects written while the list ran.
    pub(super) written: Vec<Key>,
}

/// The resource version as a number; 0 if the object has none.
pub(super) fn version(meta: &ObjectMeta) -> u64 {
    meta.resource_version.as_deref().and_then(|version| version.parse().ok()).unwrap_or_default()
}

fn uid(meta: &ObjectMeta) -> &str {
    meta.uid.as_deref().unwrap_or_default()
}

/// The namespace and the controller's uid.
fn owner(meta: &ObjectMeta) -> (String, String) {
    let owner = controller_of(meta).map(|owner| owner.uid.clone()).unwrap_or_default();
    (meta.namespace.clone().unwrap_or_default(), owner)
}

impl Index {
    /// The slot of the object with this key.
    pub(super) fn slot(&self, key: &Key) -> Option<Slot> {
        self.objects.get(key).copied()
    }

    /// All slots, in the order of the keys.
    pub(super) fn all(&self) -> Vec<Slot> {
        self.objects.values().copied().collect()
    }

    /// The slots of one namespace, in the order of the names.
    pub(super) fn in_namespace(&self, namespace: &str) -> Vec<Slot> {
        self.first_in_namespace(namespace, usize::MAX)
    }

    /// At most `limit` slots of one namespace, in the order of the names.
    pub(super) fn first_in_namespace(&self, namespace: &str, limit: usize) -> Vec<Slot> {
        let range = self.objects.range(Key::new(namespace, "")..);
        let range = range.take_while(|(key, _)| key.namespace == namespace).take(limit);
        range.map(|(_, slot)| *slot).collect()
    }

    /// The slots of the objects of one namespace with this controller; an empty uid selects objects without a
    /// controller.
    pub(super) fn owned_by(&self, namespace: &str, uid: &str) -> Vec<Slot> {
        let owned = self.owned.get(&(namespace.to_owned(), uid.to_owned()));
        owned.map(|owned| owned.values().copied().collect()).unwrap_or_default()
    }

    /// Whether the response of a write is newer than the watch. While a list is received, every response is accepted.
    pub(super) fn accepts_write(&self, meta: &ObjectMeta) -> bool {
        let version = version(meta);
        version != 0 && (self.written.is_some() || self.progress < version)
    }

    /// Records that the response of a write was stored.
    pub(super) fn record_write(&mut self, meta: &ObjectMeta) {
        if let Some(written) = &mut self.written {
            written.insert(Key::of(meta));
        }
    }

    /// Records that this process has deleted an object.
    pub(super) fn record_deletion(&mut self, uid: &str) {
        self.tombstones.insert(uid.to_owned());
    }

    /// Records the version of an object that the watch or a list delivers. Returns `false` if this process has deleted
    /// the object.
    pub(super) fn accepts_event(&mut self, meta: &ObjectMeta) -> bool {
        self.progress = self.progress.max(version(meta));
        !self.tombstones.contains(uid(meta))
    }

    /// Records the version of an object whose deletion the watch delivers.
    pub(super) fn record_deletion_event(&mut self, meta: &ObjectMeta) {
        self.progress = self.progress.max(version(meta));
        self.tombstones.remove(uid(meta));
    }

    /// A list request begins.
    pub(super) fn begin_list(&mut self) {
        self.written = Some(BTreeSet::new());
    }

    /// A list request has found these objects. `None` if no list request began.
    pub(super) fn finish_list(&mut self, found: Vec<&ObjectMeta>) -> Option<Missing> {
        let written = self.written.take()?;
        let uids: HashSet<&str> = found.iter().map(|meta| uid(meta)).collect();
        self.tombstones.retain(|uid| uids.contains(uid.as_str()));
        let found: HashSet<Key> = found.into_iter().map(Key::of).collect();
        let mut missing = Missing::default();
        for key in self.objects.keys().filter(|key| !found.contains(*key)) {
            let list = if written.contains(key) { &mut missing.written } else { &mut missing.deleted };
            list.push(key.clone());
        }
        Some(missing)
    }

    /// Stores the slot of an object. `old` is the state of the object in the cache. Returns the slot: the slot of
    /// `old`, a free slot, or the first slot after all used slots. `None` if the cache has the same or a newer version.
    pub(super) fn insert(&mut self, key: Key, old: Option<&ObjectMeta>, new: &ObjectMeta) -> Option<Slot> {
        let newer = version(new);
        if newer != 0 && old.is_some_and(|old| version(old) >= newer) {
            return None;
        }
        let next = self.objects.len();
        let slot = self.slot(&key).or_else(|| self.free.pop()).unwrap_or(next);
        if let Some(old) = old {
            self.remove_owned(old, &key.name);
        }
        self.owned.entry(owner(new)).or_default().insert(key.name.clone(), slot);
        self.objects.insert(key, slot);
        Some(slot)
    }

    /// Removes an object, so that its slot is free.
    pub(super) fn remove(&mut self, key: &Key, old: &ObjectMeta) {
        self.free.extend(self.objects.remove(key));
        self.remove_owned(old, &key.name);
    }

    fn remove_owned(&mut self, old: &ObjectMeta, name: &str) {
        let place = owner(old);
        if let Some(owned) = self.owned.get_mut(&place) {
            owned.remove(name);
            if owned.is_empty() {
                self.owned.remove(&place);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta(name: &str, version: u64) -> ObjectMeta {
        let version = Some(version.to_string());
        ObjectMeta { name: Some(name.to_owned()), resource_version: version, ..ObjectMeta::default() }
    }

    #[test]
    fn the_slot_of_a_removed_object_is_used_again() {
        let mut index = Index::default();
        let insert = |index: &mut Index, name: &str, old: Option<&ObjectMeta>, version| {
            index.insert(Key::new("", name), old, &meta(name, version))
        };
        assert_eq!(insert(&mut index, "a", None, 1), Some(0));
        assert_eq!(insert(&mut index, "b", None, 2), Some(1));
        assert_eq!(insert(&mut index, "a", Some(&meta("a", 1)), 3), Some(0));
        assert_eq!(insert(&mut index, "a", Some(&meta("a", 3)), 3), None);
        index.remove(&Key::new("", "a"), &meta("a", 3));
        assert_eq!((index.slot(&Key::new("", "a")), index.all()), (None, vec![1]));
        assert_eq!(insert(&mut index, "c", None, 4), Some(0));
        assert_eq!(insert(&mut index, "d", None, 5), Some(2));
        assert_eq!((index.all(), index.owned_by("", "")), (vec![1, 0, 2], vec![1, 0, 2]));
    }
}
