//! Lists without order: sets, and maps by key fields. Source: `pkg/cel/common/valuesunstructured.go`.
//!
//! Upstream compares in order if the left side is a plain list. Here the order does not count if either side is a list
//! without order.

use std::collections::{BTreeMap, BTreeSet, btree_map::Entry};

use super::{Key, Value};
use crate::types::UnorderedList;

/// The identity of an element: its value, or the values of its key fields.
type Identity = Vec<Option<Key>>;

impl<'a> Value<'a> {
    /// The type of a list without order. `None` for other values.
    pub(crate) fn unordered(&self) -> Option<&'a UnorderedList> {
        match self {
            Value::JsonList(_, _, of) => *of,
            _ => None,
        }
    }

    /// Whether two lists of the same length have the same elements. The inner value is `None` if an element cannot be
    /// identified. The outer one is `None` if the cost exceeds `work`, the rest of the cost limit.
    pub(super) fn equals_unordered(
        &self,
        other: &Value<'a>,
        of: &UnorderedList,
        work: &mut u64,
        depth: usize,
    ) -> Option<Option<bool>> {
        *work = work.checked_sub(self.elements_cost().saturating_add(other.elements_cost()))?;
        let (Some(left), Some(right)) = (self.items(), other.items()) else { return Some(None) };
        let mut known = BTreeMap::new();
        for item in &left {
            *work = work.checked_sub(item.identity_cost(of))?;
            let Some(identity) = identity(item, of) else { return Some(None) };
            known.insert(identity, item);
        }
        let mut found = BTreeSet::new();
        for item in &right {
            *work = work.checked_sub(item.identity_cost(of))?;
            let Some(identity) = identity(item, of) else { return Some(None) };
            let Some(same) = known.get(&identity) else { return Some(Some(false)) };
            if !same.equals_at(item, work, depth + 1)? {
                return Some(Some(false));
            }
            found.insert(identity);
        }
        Some(Some(found.len() == known.len()))
    }

    /// The cost of copying the elements of a list that an expression made. 0 for other lists.
    fn elements_cost(&self) -> u64 {
        match self {
            Value::List(items) => items.iter().map(Value::copy_cost).fold(0, u64::saturating_add),
            _ => 0,
        }
    }

    /// The cost of computing the identity of an element, which copies the texts of the key fields.
    pub(crate) fn identity_cost(&self, of: &UnorderedList) -> u64 {
        let keys = of.keys.iter().filter_map(|name| self.field(name));
        let keys = keys.fold(0, |sum: u64, key| sum.saturating_add(key.cost_size()));
        1 + self.cost_size().saturating_add(keys) / 10
    }
}

/// The union of both lists. An element that is in both lists keeps its place in `list`. If the elements have keys, it
/// gets the value in `added`. If an element cannot be identified, the lists are concatenated.
pub(crate) fn union<'a>(
    mut list: Vec<Value<'a>>,
    added: Vec<Value<'a>>,
    of: &UnorderedList,
) -> Vec<Value<'a>> {
    let mut places: BTreeMap<Identity, usize> = BTreeMap::new();
    let identities: Option<Vec<Identity>> = list.iter().map(|item| identity(item, of)).collect();
    let new: Option<Vec<Identity>> = added.iter().map(|item| identity(item, of)).collect();
    let (Some(identities), Some(new)) = (identities, new) else {
        list.extend(added);
        return list;
    };
    for (identity, place) in identities.into_iter().zip(0..) {
        places.entry(identity).or_insert(place);
    }
    for (identity, item) in new.into_iter().zip(added) {
        match places.entry(identity) {
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

/// The identity of an element. `None` for an element of a set that is not a scalar.
fn identity(item: &Value<'_>, of: &UnorderedList) -> Option<Identity> {
    if of.keys.is_empty() {
        return Some(vec![Some(scalar(item)?)]);
    }
    Some(of.keys.iter().map(|name| item.field(name).as_ref().and_then(scalar)).collect())
}

fn scalar(value: &Value<'_>) -> Option<Key> {
    Key::of(value).or_else(|| match value {
        Value::Duration(nanoseconds) => Some(Key::Int(*nanoseconds)),
        Value::Double(number) => Some(Key::String(number.to_string())),
        Value::Timestamp(time) => Some(Key::String(time.at().to_string())),
        _ => None,
    })
}
