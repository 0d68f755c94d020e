//! Writes the rules.

use std::sync::Arc;

use serde_json::json;

use super::plan;
use crate::context::Context;
use crate::error::Error;
use crate::object::{Key, Object};
use crate::queue::{Next, Queue};
use crate::write::Part;

/// There is one look for all of them: any role may be a part of any.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.cluster_roles.on_change(move |_| own.add(Key::new("", "")));
}

/// One look at all roles.
pub(crate) async fn reconcile(context: &Context, _key: Key) -> Result<Next, Error> {
    let all = context.caches.cluster_roles.all();
    let writer = context.writer(&context.caches.cluster_roles);
    for role in all.iter().filter(|role| !role.deleting()) {
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
