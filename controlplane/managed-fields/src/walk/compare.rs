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
    /// Fields of the new state alone.
    pub(crate) added: FieldSet,
    /// Fields with another value.
    pub(crate) modified: FieldSet,
    /// Fields of the old state alone.
    pub(crate) removed: FieldSet,
}

impl Comparison {
    /// Compares two states of an object.
    pub(crate) fn new(schema: &Schema, of: TypeId, old: &Value, new: &Value) -> Comparison {
        let mut walk = Walk { schema, path: Vec::new(), found: Comparison::default() };
        walk.values(of, Some(old), Some(new));
        walk.found
    }

    /// The comparison without some fields and everything below them.
    pub(crate) fn without(self, ignored: &FieldSet) -> Comparison {
        if ignored.is_empty() {
            return self;
        }
        Comparison {
            added: self.added.without_trees(ignored),
            modified: self.modified.without_trees(ignored),
            removed: self.removed.without_trees(ignored),
        }
    }
}

struct Walk<'a> {
    schema: &'a Schema,
    path: Vec<PathElement>,
    found: Comparison,
}

impl Walk<'_> {
    fn values(&mut self, of: TypeId, old: Option<&Value>, new: Option<&Value>) {
        match Pair::new(self.schema, of, old, new) {
            Pair::Leaf => {
                if let (Some(old), Some(new)) = (old, new) {
                    if !equal(old, new) {
                        self.found.modified.insert(&self.path);
                    }
                    return;
                }
            }
            Pair::Maps(old, new) => self.maps(of, old, new),
            Pair::Lists(old, new) => self.lists(of, old, new),
        }
        if old.is_none() {
            self.found.added.insert(&self.path);
        } else if new.is_none() {
            self.found.removed.insert(&self.path);
        }
    }

    fn maps(&mut self, of: TypeId, old: Option<&Map<String, Value>>, new: Option<&Map<String, Value>>) {
        let names: BTreeSet<&String> = old.into_iter().chain(new).flat_map(Map::keys).collect();
        let empty = Value::Object(Map::new());
        for name in names {
            let always = self.schema.is_always(of, name).then_some(&empty);
            let old = old.and_then(|map| map.get(name)).or(always);
            let new = new.and_then(|map| map.get(name)).or(always);
            self.below(of, PathElement::field(name), old, new);
        }
    }

    fn lists(&mut self, of: TypeId, old: &[Value], new: &[Value]) {
        let (old, new) = (Elements::new(self.schema, of, old), Elements::new(self.schema, of, new));
        let identities: BTreeSet<&PathElement> =
            old.by_identity.keys().chain(new.by_identity.keys()).collect();
        for element in identities {
            let (before, after) = (old.all(element), new.all(element));
            if before.len() <= 1 && after.len() <= 1 {
                self.below(of, element.clone(), before.first().copied(), after.first().copied());
            } else {
                self.duplicates(element, before, after);
            }
        }
    }

    /// Elements with the same identity are compared together, as one value.
    fn duplicates(&mut self, element: &PathElement, before: &[&Value], after: &[&Value]) {
        let same = before.len() == after.len() && before.iter().zip(after).all(|(old, new)| equal(old, new));
        if same {
            return;
        }
        let set = match (before.is_empty(), after.is_empty()) {
            (true, _) => &mut self.found.added,
            (_, true) => &mut self.found.removed,
            _ => &mut self.found.modified,
        };
        self.path.push(element.clone());
        set.insert(&self.path);
        self.path.pop();
    }

    fn below(&mut self, of: TypeId, element: PathElement, old: Option<&Value>, new: Option<&Value>) {
        let below = self.schema.below(of, &element);
        self.path.push(element);
        self.values(below, old, new);
        self.path.pop();
    }
}
