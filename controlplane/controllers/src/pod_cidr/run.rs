//! Writes the ranges on the nodes.

use std::sync::Arc;

use serde_json::json;

use super::plan::{self, Action};
use coracle_events::Kind;

use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, Object};
use crate::queue::{Next, Queue};
use crate::write::Part;

/// All nodes are decided on together.
fn all() -> Key {
    Key::new("", "nodes")
}

/// Has the queue told of nodes without a range, and of ranges that are free again.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.nodes.on_change(move |change| {
        let needy = change.new.is_none_or(|node| plan::ranges(node).is_empty());
        if needy {
            own.add(all());
        }
    });
}

/// One look at all nodes. There is one worker, so that no two looks overlap.
pub(crate) async fn reconcile(context: &Context, _: Key) -> Result<Next, Error> {
    let cache = &context.caches.nodes;
    for action in plan::plan(&cache.all(), &context.config) {
        match action {
            Action::Assign(node, ranges) => {
                let ranges: Vec<String> = ranges.iter().map(ToString::to_string).collect();
                let patch = json!({
                    "metadata": {"uid": node.uid(), "resourceVersion": node.metadata.resource_version},
                    "spec": {"podCIDR": ranges[0], "podCIDRs": ranges},
                });
                context.writer(cache).merge(&node.key(), Part::Main, patch).await?;
            }
            Action::Exhausted(node) => {
                let message = format!("Node {} status is now: CIDRNotAvailable", node.name());
                context.record(&*node, "cidrAllocator", (Kind::Normal, "CIDRNotAvailable"), message);
            }
        }
    }
    Ok(Next::Wait)
}
