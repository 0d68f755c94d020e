//! Objects by id, found by their whole id or by a prefix that only one of them has.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::lock::locked;

/// A table of live objects. Reading it never waits for work on an object.
#[derive(Debug)]
pub(crate) struct Table<T> {
    rows: Mutex<BTreeMap<String, Arc<T>>>,
}

// === impl Table ===

impl<T> Default for Table<T> {
    fn default() -> Self {
        Self { rows: Mutex::default() }
    }
}

impl<T> Table<T> {
    /// The object with this id, or the only one whose id starts with it.
    pub(crate) fn get(&self, id: &str) -> Option<Arc<T>> {
        self.find(id).map(|(_, row)| row)
    }

    /// The whole id of what `id` names alone; `id` itself when that is nothing, as containerd completes the ids
    /// of list filters.
    pub(crate) fn whole_id(&self, id: &str) -> String {
        self.find(id).map_or_else(|| id.to_owned(), |(whole, _)| whole)
    }

    fn find(&self, id: &str) -> Option<(String, Arc<T>)> {
        let rows = locked(&self.rows);
        if let Some(row) = rows.get(id) {
            return Some((id.to_owned(), Arc::clone(row)));
        }
        if id.is_empty() {
            return None;
        }
        let mut matches = rows.range(id.to_owned()..).take_while(|(key, _)| key.starts_with(id));
        match (matches.next(), matches.next()) {
            (Some((key, row)), None) => Some((key.clone(), Arc::clone(row))),
            _ => None,
        }
    }

    pub(crate) fn insert(&self, id: &str, row: Arc<T>) {
        locked(&self.rows).insert(id.to_owned(), row);
    }

    pub(crate) fn remove(&self, id: &str) -> Option<Arc<T>> {
        locked(&self.rows).remove(id)
    }

    /// All objects, by id.
    pub(crate) fn all(&self) -> Vec<Arc<T>> {
        locked(&self.rows).values().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prefix_finds_only_what_it_names_alone() {
        let table = Table::default();
        table.insert("abc1", Arc::new(1));
        table.insert("abd2", Arc::new(2));
        assert_eq!(table.get("abc1").as_deref(), Some(&1));
        assert_eq!(table.get("abc").as_deref(), Some(&1));
        assert_eq!(table.get("ab"), None);
        assert_eq!(table.get(""), None);
        assert_eq!(table.get("x"), None);
        assert_eq!([table.whole_id("abc"), table.whole_id("ab")], ["abc1", "ab"]);
    }
}
