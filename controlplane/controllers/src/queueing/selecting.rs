//! Queues the objects whose selectors may select a changed object of their namespace.
//!
//! All controllers wait while a handler of a cache runs. A user can create very many budgets or replica sets, and
//! selectors with very many values. A user can also change a pod many times in a second. So a handler compares a change
//! only if the namespace has few objects and no large selector. Otherwise a task makes the comparisons, and yields to
//! other tasks.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cache::Cache;
use crate::object::{Key, Object};
use crate::queue::Queue;

/// Maximum number of objects of a namespace for comparisons in the handler.
const FEW: usize = 20;
/// Maximum number of changes of a namespace that wait for a comparison. If there are more, all objects of the namespace
/// are queued.
const MAX_WAITING: usize = 16;
/// Number of objects that the task compares before it yields.
const STEP: usize = 8;

/// Queues objects of the kind `K` when objects of the kind `C` change.
pub(crate) struct Selecting<K, C> {
    queue: Arc<Queue<Key>>,
    objects: Arc<Cache<K>>,
    selects: fn(&K, &C) -> bool,
    is_large: fn(&K) -> bool,
    waiting: Mutex<Waiting<C>>,
}

struct Waiting<C> {
    /// The changed objects by namespace. A list with more than [`MAX_WAITING`] objects is incomplete.
    changed: BTreeMap<String, Vec<Arc<C>>>,
    /// Whether the task for the comparisons runs.
    is_running: bool,
}

impl<K: Object, C: Object> Selecting<K, C> {
    /// Queues the objects of a cache for which `selects` is true. `is_large` is true for objects whose comparison takes
    /// long.
    pub(crate) fn new(
        queue: &Arc<Queue<Key>>,
        objects: &Arc<Cache<K>>,
        selects: fn(&K, &C) -> bool,
        is_large: fn(&K) -> bool,
    ) -> Arc<Self> {
        let waiting = Mutex::new(Waiting { changed: BTreeMap::new(), is_running: false });
        Arc::new(Self { queue: queue.clone(), objects: objects.clone(), selects, is_large, waiting })
    }

    fn lock(&self) -> MutexGuard<'_, Waiting<C>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Queues the objects of a namespace that select the changed object. The function returns quickly, so handlers may
    /// call it: a task makes long comparisons later.
    pub(crate) fn changed(self: &Arc<Self>, namespace: &str, changed: &Arc<C>) {
        let objects = self.objects.first_in_namespace(namespace, FEW + 1);
        if objects.len() <= FEW && !objects.iter().any(|object| (self.is_large)(object)) {
            for object in objects.iter().filter(|object| (self.selects)(object, changed)) {
                self.queue.add(object.key());
            }
            return;
        }
        let mut waiting = self.lock();
        let of_namespace = waiting.changed.entry(namespace.to_owned()).or_default();
        if of_namespace.len() <= MAX_WAITING {
            of_namespace.push(changed.clone());
        }
        if !waiting.is_running {
            waiting.is_running = true;
            tokio::spawn(self.clone().compare_waiting());
        }
    }

    /// Compares the waiting changes of all namespaces, until none waits.
    async fn compare_waiting(self: Arc<Self>) {
        while let Some(changed) = self.take() {
            for (namespace, changed) in changed {
                self.compare(&namespace, &changed).await;
            }
        }
    }

    /// Takes the waiting changes. `None` if no change waits; then the task ends.
    fn take(&self) -> Option<BTreeMap<String, Vec<Arc<C>>>> {
        let mut waiting = self.lock();
        let changed = std::mem::take(&mut waiting.changed);
        waiting.is_running = !changed.is_empty();
        waiting.is_running.then_some(changed)
    }

    async fn compare(&self, namespace: &str, changed: &[Arc<C>]) {
        let is_all = changed.len() > MAX_WAITING;
        let objects = self.objects.in_namespace(namespace);
        for (place, object) in objects.iter().enumerate() {
            if is_all || changed.iter().any(|changed| (self.selects)(object, changed)) {
                self.queue.add(object.key());
            }
            if place % STEP == STEP - 1 || (self.is_large)(object) {
                tokio::task::yield_now().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use coracle_watch::Event;
    use serde_json::json;

    use super::*;
    use crate::object::{ObjectExt, Pod};
    use crate::queue::Next;

    std::thread_local! {
        static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    fn pod(name: &str, label: usize) -> Pod {
        let labels = json!({"label": label.to_string()});
        let metadata =
            json!({"namespace": "d", "name": name, "uid": name, "resourceVersion": "1", "labels": labels});
        serde_json::from_value(json!({"metadata": metadata})).unwrap()
    }

    fn selects(object: &Pod, changed: &Pod) -> bool {
        COMPARED.set(COMPARED.get() + 1);
        object.metadata.labels == changed.metadata.labels
    }

    #[tokio::test]
    async fn a_change_is_compared_with_many_selectors_after_the_handler() {
        let (objects, queue) = (Arc::new(Cache::<Pod>::new()), Arc::new(Queue::new()));
        let is_large = |object: &Pod| object.name() == "z-large";
        let selecting = Selecting::new(&queue, &objects, selects, is_large);
        let (sender, mut queued) = tokio::sync::mpsc::unbounded_channel();
        let worker = queue.clone();
        tokio::spawn(async move {
            worker
                .work("test", |key: Key| {
                    sender.send(key.name).unwrap();
                    async { Ok(Next::Wait) }
                })
                .await;
        });
        for number in 0..FEW {
            objects.apply(Event::Apply(pod(&format!("o{number}"), number)));
        }
        selecting.changed("d", &Arc::new(pod("changed", 3)));
        assert_eq!(COMPARED.take(), FEW, "few objects are compared at once");
        assert_eq!(queued.recv().await.unwrap(), "o3");

        objects.apply(Event::Delete(pod("o0", 0)));
        objects.apply(Event::Apply(pod("z-large", FEW)));
        selecting.changed("d", &Arc::new(pod("changed", FEW)));
        assert_eq!(COMPARED.get(), 0, "no large selector is compared in a handler");
        assert_eq!(queued.recv().await.unwrap(), "z-large");
        objects.apply(Event::Delete(pod("z-large", FEW)));
        objects.apply(Event::Apply(pod("o0", 0)));
        COMPARED.set(0);

        objects.apply(Event::Apply(pod("last", FEW)));
        for label in [FEW, FEW + 1] {
            selecting.changed("d", &Arc::new(pod("changed", label)));
        }
        assert_eq!(COMPARED.get(), 0, "no object is compared in a handler");
        assert_eq!(queued.recv().await.unwrap(), "last");

        // With very many changes no selector is compared, and all objects are queued.
        for _ in 0..=MAX_WAITING {
            selecting.changed("d", &Arc::new(pod("changed", FEW + 1)));
        }
        let mut names = std::collections::BTreeSet::new();
        while names.len() <= FEW {
            names.insert(queued.recv().await.unwrap());
        }
        assert!(COMPARED.get() <= 2 * (FEW + 1), "{}", COMPARED.get());
    }
}
