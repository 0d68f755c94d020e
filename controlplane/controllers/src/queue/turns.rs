//! Keys in the order of their namespaces' turns.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;

use crate::object::Key;

/// First character of the namespace in the key of an object whose creators take turns, in place of namespaces. No
/// namespace has this character.
const OF_CREATOR: char = '/';

/// A key of a work queue.
pub(crate) trait QueueKey: Clone + Eq + Hash {
    /// The namespace of the object. Empty for objects of the cluster.
    fn namespace(&self) -> &str;

    /// The object in messages of the log.
    fn object(&self) -> String;
}

/// The key of an object of the cluster whose creators take turns.
pub(crate) fn key_of_creator(creator: &str, name: &str) -> Key {
    Key::new(&format!("{OF_CREATOR}{creator}"), name)
}

impl QueueKey for Key {
    fn namespace(&self) -> &str {
        &self.namespace
    }

    fn object(&self) -> String {
        if self.namespace.starts_with(OF_CREATOR) { self.name.clone() } else { self.to_string() }
    }
}

#[cfg(test)]
impl QueueKey for &'static str {
    fn namespace(&self) -> &str {
        ""
    }

    fn object(&self) -> String {
        (*self).to_owned()
    }
}

/// Keys by namespace. Each namespace has one turn in a round, so a namespace with very many keys delays another
/// namespace only by one key in each round. The keys of one namespace keep their order.
#[derive(Debug)]
pub(super) struct Turns<T> {
    /// The namespaces with keys.
    order: VecDeque<String>,
    keys: HashMap<String, VecDeque<T>>,
}

// === impl Turns ===

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { order: VecDeque::new(), keys: HashMap::new() }
    }
}

impl<T: QueueKey> Turns<T> {
    /// Adds a key after the other keys of its namespace.
    pub(super) fn push(&mut self, key: T) {
        if let Some(keys) = self.keys.get_mut(key.namespace()) {
            keys.push_back(key);
            return;
        }
        let namespace = key.namespace().to_owned();
        self.order.push_back(namespace.clone());
        self.keys.insert(namespace, VecDeque::from([key]));
    }

    /// Takes a key of the first namespace for which `may` returns true.
    pub(super) fn pop(&mut self, may: impl Fn(&str) -> bool) -> Option<T> {
        let place = self.order.iter().position(|namespace| may(namespace))?;
        let namespace = self.order.remove(place)?;
        let keys = self.keys.get_mut(&namespace)?;
        let key = keys.pop_front();
        if keys.is_empty() {
            self.keys.remove(&namespace);
        } else {
            self.order.push_back(namespace);
        }
        key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_take_turns_and_keep_the_order_of_their_keys() {
        let mut turns = Turns::default();
        for (namespace, name) in [("a", "1"), ("a", "2"), ("a", "3"), ("b", "1"), ("", "node"), ("b", "2")] {
            turns.push(Key::new(namespace, name));
        }
        let mut next = |excluded: &str| {
            turns.pop(|namespace| namespace != excluded).map(|key| format!("{}{}", key.namespace, key.name))
        };
        let keys = [next(""), next("b"), next("a"), next("a"), next("a")].map(Option::unwrap_or_default);
        assert_eq!(keys, ["a1", "node", "b1", "b2", ""]);
        assert_eq!([next(""), next(""), next("")].map(Option::unwrap_or_default), ["a2", "a3", ""]);
        assert!(turns.order.is_empty() && turns.keys.is_empty());
    }
}
