//! The order of a merged list. The elements of the patch keep the order of the patch. The other elements keep their
//! order in the old list, and are placed between the elements of the patch by their old positions.
//!
//! Elements are found by an index. Both lists can be as long as a request allows, and a linear search for each element
//! would take minutes.

use std::collections::{HashMap, VecDeque};

use serde_json::Value;

/// Index of the elements of a list, by merge key, or by value if there is no merge key.
pub(super) struct Places<'a> {
    key: Option<&'a str>,
    at: HashMap<String, usize>,
    length: usize,
}

impl<'a> Places<'a> {
    pub(super) fn of(list: &[Value], key: Option<&'a str>) -> Self {
        let mut places = Self { key, at: HashMap::with_capacity(list.len()), length: 0 };
        for item in list {
            places.push(item);
        }
        places
    }

    /// Adds an element that was appended to the list.
    pub(super) fn push(&mut self, item: &Value) {
        if let Some(id) = self.id(item) {
            self.at.entry(id).or_insert(self.length);
        }
        self.length += 1;
    }

    /// The first element with the same key or value.
    pub(super) fn position(&self, item: &Value) -> Option<usize> {
        self.at.get(&self.id(item)?).copied()
    }

    fn id(&self, item: &Value) -> Option<String> {
        match self.key {
            Some(key) => item.get(key).map(Value::to_string),
            None => Some(item.to_string()),
        }
    }
}

/// Orders merged elements: the elements of `wanted` keep its order, and the other elements keep the order of `before`.
/// Both sequences are interleaved by the old positions of their elements.
pub(super) fn in_order(
    merged: Vec<Value>,
    wanted: &[Value],
    before: &[Value],
    key: Option<&str>,
) -> Vec<Value> {
    let (wanted, before) = (Places::of(wanted, key), Places::of(before, key));
    let (mut patched, mut others) = (Vec::new(), Vec::new());
    for item in merged {
        let old = before.position(&item);
        match wanted.position(&item) {
            Some(at) => patched.push((at, old, item)),
            None => others.push((old, item)),
        }
    }
    patched.sort_by_key(|(at, _, _)| *at);
    others.sort_by_key(|(old, _)| *old);
    let (mut patched, mut others) = (VecDeque::from(patched), VecDeque::from(others));
    let mut ordered = Vec::with_capacity(patched.len() + others.len());
    loop {
        let other_first = match (others.front(), patched.front()) {
            (None, None) => return ordered,
            (Some(_), None) => true,
            (None, Some(_)) => false,
            (Some((other, _)), Some((_, patch, _))) => matches!((other, patch), (Some(a), Some(b)) if a < b),
        };
        ordered.extend(if other_first {
            others.pop_front().map(|(_, item)| item)
        } else {
            patched.pop_front().map(|(_, _, item)| item)
        });
    }
}
