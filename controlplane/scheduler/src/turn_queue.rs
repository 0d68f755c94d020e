//! Waiting pods: pods of the highest priority first. Among pods of equal priority the namespaces take turns.
//!
//! Upstream's queue has no turns: a namespace with very many pods delays all other namespaces.
//! `docs/decisions/scheduling-order.md` has the reasons. Each operation takes logarithmic time.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use crate::config::QueueSort;

/// Maximum number of pods in one turn of a namespace. The pods of a namespace are often equal, and equal pods in
/// succession share the results of filters and scores ([`crate::memo`]).
const PODS_PER_TURN: u32 = 8;

/// Order of the pods of one namespace: higher priority first, then the lower position.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct QueueOrder(pub(crate) Reverse<i32>, pub(crate) u64);

/// The uids of waiting pods. No two pods have the same order.
#[derive(Debug)]
pub(crate) struct TurnQueue {
    sort: QueueSort,
    levels: BTreeMap<Reverse<i32>, Level>,
    len: usize,
}

/// The pods of one priority.
#[derive(Debug, Default)]
struct Level {
    /// The namespaces with waiting pods, by their turns.
    order: BTreeMap<u64, Arc<str>>,
    namespaces: HashMap<Arc<str>, NamespacePods>,
    /// The last turn that a namespace received.
    last_turn: u64,
}

/// The pods of one priority and namespace.
#[derive(Debug)]
struct NamespacePods {
    turn: u64,
    /// Number of pods that were taken in this turn.
    taken: u32,
    /// The uids by position.
    pods: BTreeMap<u64, String>,
}

// === impl TurnQueue ===

impl TurnQueue {
    pub(crate) fn new(sort: QueueSort) -> Self {
        Self { sort, levels: BTreeMap::new(), len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds a pod of a namespace.
    pub(crate) fn insert(&mut self, namespace: &str, order: QueueOrder, uid: String) {
        let namespace = self.turn_holder(namespace);
        let is_new = self.levels.entry(order.0).or_default().insert(namespace, order.1, uid);
        self.len += usize::from(is_new);
    }

    /// Removes a pod of a namespace.
    pub(crate) fn remove(&mut self, namespace: &str, order: QueueOrder) {
        let namespace = self.turn_holder(namespace);
        let Some(level) = self.levels.get_mut(&order.0) else { return };
        let is_removed = level.remove(namespace, order.1);
        if level.namespaces.is_empty() {
            self.levels.remove(&order.0);
        }
        self.len -= usize::from(is_removed);
    }

    /// Takes the first pod.
    pub(crate) fn pop_first(&mut self) -> Option<String> {
        let mut level = self.levels.first_entry()?;
        let uid = level.get_mut().pop_first();
        if level.get().namespaces.is_empty() {
            level.remove();
        }
        self.len -= usize::from(uid.is_some());
        uid
    }

    /// The namespace whose turn a pod uses. Without turns, all pods use the turn of one namespace.
    fn turn_holder<'n>(&self, namespace: &'n str) -> &'n str {
        match self.sort {
            QueueSort::Turns => namespace,
            QueueSort::Time => "",
        }
    }
}

// === impl Level ===

impl Level {
    /// Adds a pod. Returns whether the pod is new. A namespace without waiting pods gets the last turn.
    fn insert(&mut self, namespace: &str, position: u64, uid: String) -> bool {
        if let Some(waiting) = self.namespaces.get_mut(namespace) {
            return waiting.pods.insert(position, uid).is_none();
        }
        let name: Arc<str> = namespace.into();
        self.last_turn += 1;
        self.order.insert(self.last_turn, name.clone());
        let pods = BTreeMap::from([(position, uid)]);
        self.namespaces.insert(name, NamespacePods { turn: self.last_turn, taken: 0, pods });
        true
    }

    /// Removes a pod. Returns whether the pod was waiting.
    fn remove(&mut self, namespace: &str, position: u64) -> bool {
        let Some(waiting) = self.namespaces.get_mut(namespace) else { return false };
        let is_removed = waiting.pods.remove(&position).is_some();
        if waiting.pods.is_empty() {
            self.order.remove(&waiting.turn);
            self.namespaces.remove(namespace);
        }
        is_removed
    }

    fn pop_first(&mut self) -> Option<String> {
        let first = self.order.first_entry()?;
        let waiting = self.namespaces.get_mut(first.get())?;
        let (_, uid) = waiting.pods.pop_first()?;
        waiting.taken += 1;
        if waiting.pods.is_empty() {
            let namespace = first.remove();
            self.namespaces.remove(&namespace);
        } else if waiting.taken == PODS_PER_TURN {
            self.last_turn += 1;
            (waiting.turn, waiting.taken) = (self.last_turn, 0);
            let namespace = first.remove();
            self.order.insert(self.last_turn, namespace);
        }
        Some(uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A queue of pods with the priority 0, in the order of their positions. The uid of a pod is its namespace and its
    /// number there.
    fn queue(sort: QueueSort, namespaces: &[(&str, u64)]) -> TurnQueue {
        let (mut queue, mut position) = (TurnQueue::new(sort), 0);
        for (namespace, count) in namespaces {
            for number in 0..*count {
                position += 1;
                queue.insert(namespace, QueueOrder(Reverse(0), position), format!("{namespace}{number}"));
            }
        }
        queue
    }

    fn rest(queue: &mut TurnQueue) -> Vec<String> {
        std::iter::from_fn(|| queue.pop_first()).collect()
    }

    #[test]
    fn a_namespace_with_very_many_pods_delays_another_one_by_one_turn() {
        let mut queue = queue(QueueSort::Turns, &[("a", 10_000), ("b", 2), ("c", 1)]);
        let first: Vec<String> = (0..12).filter_map(|_| queue.pop_first()).collect();
        let expected = ["a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7", "b0", "b1", "c0", "a8"];
        assert_eq!(first, expected);
        queue.insert("d", QueueOrder(Reverse(0), 20_000), "d0".to_owned());
        let place = rest(&mut queue).iter().position(|uid| uid == "d0");
        assert_eq!(place, Some(7), "the turn of the first namespace has 7 pods left");
    }

    #[test]
    fn the_pods_of_a_namespace_keep_their_order() {
        let mut queue = queue(QueueSort::Turns, &[("a", 3), ("b", 1)]);
        queue.insert("a", QueueOrder(Reverse(0), 0), "woken".to_owned());
        queue.insert("b", QueueOrder(Reverse(5), 99), "important".to_owned());
        assert_eq!(rest(&mut queue), ["important", "woken", "a0", "a1", "a2", "b0"]);
    }

    #[test]
    fn without_turns_the_older_pod_is_first() {
        let mut queue = queue(QueueSort::Time, &[("a", 10), ("b", 1)]);
        queue.insert("c", QueueOrder(Reverse(0), 0), "oldest".to_owned());
        queue.remove("a", QueueOrder(Reverse(0), 1));
        let order = rest(&mut queue);
        assert_eq!((order[0].as_str(), order[1].as_str(), order[10].as_str()), ("oldest", "a1", "b0"));
        assert_eq!(order.len(), 11);
    }

    #[test]
    fn an_empty_queue_keeps_no_memory_of_namespaces() {
        let mut queue = queue(QueueSort::Turns, &[("a", 1), ("b", 2)]);
        queue.remove("a", QueueOrder(Reverse(0), 1));
        queue.remove("a", QueueOrder(Reverse(0), 1));
        queue.remove("c", QueueOrder(Reverse(1), 1));
        assert_eq!((queue.len(), queue.is_empty()), (2, false));
        assert_eq!(rest(&mut queue), ["b0", "b1"]);
        assert!(queue.is_empty() && queue.levels.is_empty());
    }
}
