//! Queues the services with endpoints on nodes whose zone has changed.
//!
//! A node may change the label with its zone. A pass over the endpoints of all slices takes long in a large cluster.
//! All controllers wait while a handler of a cache runs, so a separate task makes the passes. The task yields to other
//! tasks, and waits between two passes.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use super::topology;
use crate::cache::Cache;
use crate::object::{EndpointSlice, Key, Node};
use crate::queue::Queue;

/// Minimum time between the starts of two passes.
const PAUSE: Duration = Duration::from_secs(5);
/// Number of slices that the task reads before it yields.
const STEP: usize = 8;

/// Collects the nodes whose zone has changed, and queues the services with endpoints on them.
pub(super) struct ZoneChanges {
    queue: Arc<Queue<Key>>,
    slices: Arc<Cache<EndpointSlice>>,
    /// The cache of nodes. The reference is weak, because a handler of this cache owns this value.
    nodes: Weak<Cache<Node>>,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    /// Names of the nodes.
    nodes: BTreeSet<String>,
    /// Whether a task runs.
    is_running: bool,
}

impl ZoneChanges {
    /// A collector that reads the endpoints of these slices.
    pub(super) fn new(
        queue: &Arc<Queue<Key>>,
        slices: &Arc<Cache<EndpointSlice>>,
        nodes: &Arc<Cache<Node>>,
    ) -> Arc<Self> {
        let (queue, slices, nodes) = (queue.clone(), slices.clone(), Arc::downgrade(nodes));
        Arc::new(Self { queue, slices, nodes, waiting: Mutex::default() })
    }

    /// Whether the first list of the nodes is complete.
    pub(super) fn has_nodes(&self) -> bool {
        self.nodes.upgrade().is_some_and(|nodes| nodes.is_synced())
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the task that queues the services with endpoints on the node. The function returns quickly, so handlers
    /// may call it.
    pub(super) fn changed(self: &Arc<Self>, node: &str) {
        let mut waiting = self.lock();
        waiting.nodes.insert(node.to_owned());
        if !waiting.is_running {
            waiting.is_running = true;
            tokio::spawn(self.clone().make_passes());
        }
    }

    /// Makes passes until no node waits.
    async fn make_passes(self: Arc<Self>) {
        while let Some(nodes) = self.take() {
            self.make_pass(&nodes).await;
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// Takes the waiting nodes. `None` if no node waits; then the task ends.
    fn take(&self) -> Option<BTreeSet<String>> {
        let mut waiting = self.lock();
        let nodes = std::mem::take(&mut waiting.nodes);
        waiting.is_running = !nodes.is_empty();
        waiting.is_running.then_some(nodes)
    }

    async fn make_pass(&self, names: &BTreeSet<String>) {
        let Some(cache) = self.nodes.upgrade() else { return };
        let nodes: Vec<Arc<Node>> = names.iter().filter_map(|name| cache.get(&Key::new("", name))).collect();
        let zones = topology::zones_by_node(&nodes);
        for (place, slice) in self.slices.all().iter().enumerate() {
            if let Some(service) = topology::outdated(slice, &zones) {
                self.queue.add(service);
            }
            if place % STEP == STEP - 1 {
                tokio::task::yield_now().await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use tokio::time::Instant;

    use super::*;
    use crate::queue::Next;

    #[tokio::test(start_paused = true)]
    async fn nodes_that_change_during_the_pause_share_one_pass() {
        let (queue, slices, nodes) =
            (Arc::new(Queue::new()), Arc::new(Cache::<EndpointSlice>::new()), Arc::new(Cache::<Node>::new()));
        for name in ["a", "b", "c"] {
            let owner =
                json!({"apiVersion": "v1", "kind": "Service", "name": name, "uid": name, "controller": true});
            let slice = json!({
                "metadata": {"namespace": "d", "name": name, "uid": name, "resourceVersion": "1",
                    "ownerReferences": [owner]},
                "endpoints": [{"addresses": ["10.0.0.1"], "nodeName": name, "zone": "old"}]});
            slices.written(serde_json::from_value(slice).unwrap());
            let labels = json!({"topology.kubernetes.io/zone": "new"});
            let node =
                json!({"metadata": {"name": name, "uid": name, "resourceVersion": "1", "labels": labels}});
            nodes.written(serde_json::from_value(node).unwrap());
        }
        let changes = ZoneChanges::new(&queue, &slices, &nodes);
        let (queued, start) = (Mutex::new(Vec::new()), Instant::now());
        let work = queue.work("test", |key: Key| {
            queued.lock().unwrap().push((key.name, start.elapsed().as_secs()));
            async { Ok(Next::Wait) }
        });
        let change = async {
            changes.changed("a");
            tokio::time::sleep(Duration::from_secs(1)).await;
            changes.changed("c");
            changes.changed("b");
            tokio::time::sleep(PAUSE * 3).await;
        };
        tokio::select! {
            () = work => unreachable!("work has no end"),
            () = change => {}
        }
        let pause = PAUSE.as_secs();
        let expected = [("a", 0), ("b", pause), ("c", pause)].map(|(name, second)| (name.to_owned(), second));
        assert_eq!(queued.into_inner().unwrap(), expected);
        assert!(!changes.lock().is_running, "the task has ended");
    }
}
