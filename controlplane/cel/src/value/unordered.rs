//! Lists without order: sets, and maps by key fields. Source: `pkg/cel/common/valuesunstructured.go`.
//!
//! Upstream compares in order if the left side is a plain list. Here the order does not count if one side has none.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use super::{Key, Value};
use crate::types::UnorderedList;

/// What identifies an element: its value, or the values of its key fields.
type Identity = Vec<Option<Key>>;

impl<'a> Value<'a> {
    /// The list type of a list without order.
    pub(crate) fn unordered(&self) -> Option<&'a UnorderedList> {
        match self {
            Value::JsonList(_, _, of) => *of,
            _ => None,
        }
    }

    /// Whether two lists of the same length have the same elements. `work` is the rest of the cost limit.
    pub(super) fn equals_unordered(
        &self,
        other: &Value<'a>,
        of: &UnorderedList,
        (work, depth): (&mut u64, usize),
    ) -> Option<bool> {
        let (Some(left), Some(right)) = (self.items(), other.items()) else { return Some(false) };
        let mut known = BTreeMap::new();
        for item in &left {
            *work = work.checked_sub(item.identity_cost())?;
            known.insert(identity(item, of), item);
        }
        let mut found = BTreeSet::new();
        for item in &right {
            *work = work.checked_sub(item.identity_cost())?;
            let identity = identity(item, of);
            let Some(same) = known.get(&identity) else { return Some(false) };
            if !same.equals_at(item, work, depth + 1)? {
                return Some(false);
            }
            found.insert(identity);
        }
        Some(found.len() == known.len())
    }

    /// The cost of the identity of an element.
    pub(crate) fn identity_cost(&self) -> u64 {
        1 + self.cost_size() / 10
    }
}

/// The elements of both lists. An element that is in both stays at its place; that of a map gets the second value.
pub(crate) fn union<'a>(
    mut list: Vec<Value<'a>>,
    added: Vec<Value<'a>>,
    of: &UnorderedList,
) -> Vec<Value<'a>> {
    let mut places: BTreeMap<Identity, usize> = BTreeMap::new();
    for (place, item) in list.iter().enumerate() {
        places.entry(identity(item, of)).or_insert(place);
    }
    for item in added {
        match places.entry(identity(&item, of)) {
            Entry::Vacant(entry) => {
                entry.insert(list.len());
                list.push(item);
            }
            Entry::Occupied(entry) if !of.keys.is_empty() => {
                if let Some(old) = list.get_mut(*entry.get()) {
                    *old = item;
                }
            }
            Entry::Occupied(_) => {}
        }
    }
    list
}

fn identity(item: &Value<'_>, of: &UnorderedList) -> Identity {
    if of.keys.is_empty() {
        // An element that cannot be a key is identified by its text.
        let key = Key::of(item).unwrap_or_else(|| Key::String(format!("\0{}", item.to_json())));
        return vec![Some(key)];
    }
    of.keys.iter().map(|name| item.field(name).as_ref().and_then(Key::of)).collect()
}
