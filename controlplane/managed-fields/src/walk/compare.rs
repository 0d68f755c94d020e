//! The differences between two states of an object.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::{Elements, Pair};
use crate::{
    field_set::FieldSet,
    path::{PathElement, equal},
    schema::{Schema, TypeId},
};

/// Fields that differ between two states.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Comparison {
    /// Fields that only the new state has.
    pub(crate) added: FieldSet,
    /// Fields whose values differ.
    pub(crate) modified: FieldSet,
    /// Fields that only the old state has.
    pub(crate) removed: FieldSet,
}

/// The change of a value as a whole.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Change {
    None,
    Added,
    Modified,
    Removed,
}

impl Comparison {
    /// Compares two states of an object.
    pub(crate) fn new(schema: &Schema, of: TypeId, old: &Value, new: &Value) -> Comparison {
        values(schema, of, Some(old), Some(new)).1
    }

    /// Adds the differences of a part, and the differences below it.
    fn add(&mut self, element: &PathElement, change: Change, below: Comparison) {
        self.added.insert_part(element, change == Change::Added, below.added);
        self.modified.insert_part(element, change == Change::Modified, below.modified);
        self.removed.insert_part(element, change == Change::Removed, below.removed);
    }

    /// The comparison without some fields and everything below them.
    pub(crate) fn without(mut self, ignored: &FieldSet) -> Comparison {
        for fields in [&mut self.added, &mut self.modified, &mut self.removed] {
            fields.remove_trees(ignored);
        }
        self
    }

    /// Whether the states are equal.
    pub(crate) fn is_empty(&self) -> bool {
        self.added.is_empty() && self.modified.is_empty() && self.removed.is_empty()
    }
}

/// The difference of two states of a value, and the differences of its parts. The sets are built bottom-up, because the
/// path from the root to each part can be long.
fn values(schema: &Schema, of: TypeId, old: Option<&Value>, new: Option<&Value>) -> (Change, Comparison) {
    let pair = Pair::new(schema, of, old, new);
    let change = match (old, new, &pair) {
        (None, ..) => Change::Added,
        (_, None, _) => Change::Removed,
        (Some(old), Some(new), Pair::Leaf) if !equal(old, new) => Change::Modified,
        _ => Change::None,
    };
    let below = match pair {
        Pair::Leaf => Comparison::default(),
        Pair::Maps(old, new) => maps(schema, of, old, new),
        Pair::Lists(old, new) => lists(schema, of, old, new),
    };
    (change, below)
}

fn maps(
    schema: &Schema,
    of: TypeId,
    old: Option<&Map<String, Value>>,
    new: Option<&Map<String, Value>>,
) -> Comparison {
    let mut found = Comparison::default();
    let empty = Value::Object(Map::new());
    let is_old = |name: &&String| old.is_some_and(|map| map.contains_key(*name));
    let only_new = new.into_iter().flat_map(Map::keys).filter(|name| !is_old(name));
    for name in old.into_iter().flat_map(Map::keys).chain(only_new) {
        let empty_if_absent = || schema.absent_is_empty(of, name).then_some(&empty);
        let old = old.and_then(|map| map.get(name)).or_else(empty_if_absent);
        let new = new.and_then(|map| map.get(name)).or_else(empty_if_absent);
        let (change, below) = values(schema, schema.field(of, name), old, new);
        // Most fields are equal. They need no path.
        if change != Change::None || !below.is_empty() {
            found.add(&PathElement::field(name), change, below);
        }
    }
    found
}

fn lists(schema: &Schema, of: TypeId, old: &[Value], new: &[Value]) -> Comparison {
    let mut found = Comparison::default();
    if old == new {
        return found;
    }
    let (old, new) = (Elements::new(schema, of, old), Elements::new(schema, of, new));
    let identities: BTreeSet<&PathElement> = old.by_identity.keys().chain(new.by_identity.keys()).collect();
    for element in identities {
        let (before, after) = (old.all(element), new.all(element));
        let (change, below) = if before.len() <= 1 && after.len() <= 1 {
            let type_below = schema.below(of, element);
            values(schema, type_below, before.first().copied(), after.first().copied())
        } else {
            (duplicates(before, after), Comparison::default())
        };
        found.add(element, change, below);
    }
    found
}

/// Elements with the same identity are compared together, as one value.
fn duplicates(before: &[&Value], after: &[&Value]) -> Change {
    let same = before.len() == after.len() && before.iter().zip(after).all(|(old, new)| equal(old, new));
    match (before.is_empty(), after.is_empty()) {
        _ if same => Change::None,
        (true, _) => Change::Added,
        (_, true) => Change::Removed,
        _ => Change::Modified,
    }
}
