//! Writes pod CIDRs into nodes.

use std::sync::{Arc, PoisonError};

use serde_json::json;

use super::plan::{self, Action};
use coracle_events::Event;

use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt};
use crate::queue::{Next, Queue};
use crate::write::Part;

/// The only key of the queue: all nodes are planned together.
fn all() -> Key {
    Key::new("", "nodes")
}

/// Queues a plan if a node lacks a pod CIDR or was deleted.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.nodes.on_change(move |change| {
        let needy = change.new.is_none_or(|node| plan::ranges(node).is_empty());
        if needy {
            own.add(all());
        }
    });
}

/// Reconciles all nodes. There is only one worker, so two reconciles never overlap.
pub(crate) async fn reconcile(context: &Context, _: Key) -> Result<Next, Error> {
    let cache = &context.caches.nodes;
    let last = context.last_ranges.lock().unwrap_or_else(PoisonError::into_inner).clone();
    for action in plan::plan(&cache.all(), &context.config, &last) {
        match action {
            Action::Assign(node, ranges) => {
                let patch = json!({
                    "metadata": {"uid": node.uid(), "resourceVersion": node.metadata.resource_version},
                    "spec": {"podCIDR": ranges.first(), "podCIDRs": ranges},
                });
                context.writer(cache).merge(&node.key(), Part::Main, patch).await?;
                *context.last_ranges.lock().unwrap_or_else(PoisonError::into_inner) = ranges;
            }
            Action::Exhausted(node) => {
                let message = format!("Node {} status is now: CIDRNotAvailable", node.name());
                context.record(&*node, "cidrAllocator", Event::normal("CIDRNotAvailable", message));
            }
        }
    }
    Ok(Next::Wait)
}
