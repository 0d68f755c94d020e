//! Writes the rules of aggregated roles.

use std::sync::Arc;

use serde_json::json;

use super::plan;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, ObjectExt};
use crate::queue::{Next, Queue};
use crate::write::Part;

/// Queues one key for all roles, because any role may select any other role.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.cluster_roles.on_change(move |_| own.add(Key::new("", "")));
}

/// Reconciles all roles.
pub(crate) async fn reconcile(context: &Context, _key: Key) -> Result<Next, Error> {
    let all = context.caches.cluster_roles.all();
    let writer = context.writer(&context.caches.cluster_roles);
    for role in all.iter().filter(|role| !role.is_being_deleted()) {
        let known = role.rules.as_deref().unwrap_or_default();
        let Some(rules) = plan::rules(role, &all).filter(|rules| rules != known) else { continue };
        let patch = json!({
            "metadata": {"uid": role.uid(), "resourceVersion": role.metadata.resource_version},
            "rules": rules,
        });
        writer.merge(&role.key(), Part::Main, patch).await?;
    }
    Ok(Next::Wait)
}
