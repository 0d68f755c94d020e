//! A table of objects by id. Look-ups by id, by unique id prefix, by sandbox and by pod.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Bound;
use std::sync::{Arc, Mutex};

use crate::lock::locked;

/// Index keys of an object, in addition to its id. They do not change during its life.
pub(crate) trait Row {
    /// Id of the container's sandbox. For a sandbox, its own id.
    fn sandbox_id(&self) -> &str;
    /// The kubelet's label with the pod's uid, if there is one.
    fn pod_uid(&self) -> Option<&str>;
}

/// A table of live objects. A look-up never waits for work on an object.
#[derive(Debug)]
pub(crate) struct Table<T> {
    rows: Mutex<Rows<T>>,
}

#[derive(Debug)]
struct Rows<T> {
    by_id: BTreeMap<Arc<str>, Arc<T>>,
    by_sandbox: Index,
    by_pod: Index,
}

/// Pairs of an index key and an id. Most keys have one id, so a tree of ids for each key would take ten times the memory.
type Index = BTreeSet<(Box<str>, Arc<str>)>;

// === impl Table ===

impl<T> Default for Table<T> {
    fn default() -> Self {
        let rows = Rows { by_id: BTreeMap::new(), by_sandbox: Index::new(), by_pod: Index::new() };
        Self { rows: Mutex::new(rows) }
    }
}

impl<T: Row> Table<T> {
    /// The object with this id or unique id prefix.
    pub(crate) fn get(&self, id: &str) -> Option<Arc<T>> {
        self.find(id).map(|(_, row)| row)
    }

    /// The full id for a unique id prefix. Without a match, `id` itself. containerd completes ids in list filters the same
    /// way.
    pub(crate) fn whole_id(&self, id: &str) -> String {
        self.find(id).map_or_else(|| id.to_owned(), |(whole, _)| whole)
    }

    fn find(&self, id: &str) -> Option<(String, Arc<T>)> {
        let rows = &locked(&self.rows).by_id;
        if let Some(row) = rows.get(id) {
            return Some((id.to_owned(), Arc::clone(row)));
        }
        if id.is_empty() {
            return None;
        }
        let from = (Bound::Included(id), Bound::Unbounded);
        let mut matches = rows.range::<str, _>(from).take_while(|(key, _)| key.starts_with(id));
        match (matches.next(), matches.next()) {
            (Some((key, row)), None) => Some((key.to_string(), Arc::clone(row))),
            _ => None,
        }
    }

    pub(crate) fn insert(&self, id: &str, row: Arc<T>) {
        let mut rows = locked(&self.rows);
        rows.remove(id);
        let id: Arc<str> = id.into();
        rows.by_sandbox.insert((row.sandbox_id().into(), Arc::clone(&id)));
        if let Some(uid) = row.pod_uid() {
            rows.by_pod.insert((uid.into(), Arc::clone(&id)));
        }
        rows.by_id.insert(id, row);
    }

    pub(crate) fn remove(&self, id: &str) -> Option<Arc<T>> {
        locked(&self.rows).remove(id)
    }

    /// All objects, ordered by id.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        locked(&self.rows).by_id.values().cloned().collect()
    }

    /// The objects of a sandbox, ordered by id. The cost grows with the number of results.
    pub(crate) fn of_sandbox(&self, id: &str) -> Vec<Arc<T>> {
        let rows = locked(&self.rows);
        rows.named_by(&rows.by_sandbox, id)
    }

    /// The objects with this pod uid, ordered by id. The cost grows with the number of results.
    pub(crate) fn of_pod(&self, uid: &str) -> Vec<Arc<T>> {
        let rows = locked(&self.rows);
        rows.named_by(&rows.by_pod, uid)
    }
}

// === impl Rows ===

impl<T: Row> Rows<T> {
    fn remove(&mut self, id: &str) -> Option<Arc<T>> {
        let (id, row) = self.by_id.remove_entry(id)?;
        self.by_sandbox.remove(&(row.sandbox_id().into(), Arc::clone(&id)));
        if let Some(uid) = row.pod_uid() {
            self.by_pod.remove(&(uid.into(), id));
        }
        Some(row)
    }

    fn named_by(&self, index: &Index, key: &str) -> Vec<Arc<T>> {
        let from = (Box::from(key), Arc::from(""));
        let pairs = index.range(from..).take_while(|(known, _)| **known == *key);
        pairs.filter_map(|(_, id)| self.by_id.get(id).cloned()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, PartialEq)]
    struct Named(&'static str, Option<&'static str>);

    impl Row for Named {
        fn sandbox_id(&self) -> &str {
            self.0
        }

        fn pod_uid(&self) -> Option<&str> {
            self.1
        }
    }

    #[test]
    fn only_a_unique_prefix_finds_an_object() {
        let table = Table::default();
        table.insert("abc1", Arc::new(Named("1", None)));
        table.insert("abd2", Arc::new(Named("2", None)));
        let found = |id: &str| table.get(id).map(|row| row.0);
        assert_eq!(found("abc1"), Some("1"));
        assert_eq!(found("abc"), Some("1"));
        assert_eq!([found("ab"), found(""), found("x")], [None, None, None]);
        assert_eq!([table.whole_id("abc"), table.whole_id("ab")], ["abc1", "ab"]);
    }

    #[test]
    fn objects_are_found_by_sandbox_and_pod_until_removed() {
        let table = Table::default();
        table.insert("c1", Arc::new(Named("s1", Some("u1"))));
        table.insert("c2", Arc::new(Named("s1", Some("u2"))));
        table.insert("c2", Arc::new(Named("s1", Some("u1"))));
        table.insert("c3", Arc::new(Named("s2", None)));
        // This row has keys that begin with keys of other rows, and an id that is a sandbox key of other rows.
        table.insert("s1", Arc::new(Named("s10", Some("u10"))));
        assert_eq!([table.of_sandbox("s1").len(), table.of_sandbox("s10").len()], [2, 1]);
        assert_eq!([table.of_pod("u1").len(), table.of_pod("u2").len(), table.of_pod("").len()], [2, 0, 0]);
        for id in ["c1", "c2", "c3", "s1", "absent"] {
            table.remove(id);
        }
        let rows = locked(&table.rows);
        assert!(rows.by_id.is_empty() && rows.by_sandbox.is_empty() && rows.by_pod.is_empty());
    }
}
