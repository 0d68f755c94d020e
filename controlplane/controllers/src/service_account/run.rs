//! Creates missing service accounts.

use std::sync::Arc;

use serde_json::json;

use super::plan;
use crate::context::Context;
use crate::error::{Error, is_already_exists, is_namespace_terminating};
use crate::object::{Key, Object, ObjectExt};
use crate::queue::{Next, Queue};

/// Queues changed namespaces, and the namespaces of deleted accounts.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.namespaces.on_change(move |change| own.add(Key::new("", name(change.latest()))));
    let own = queue.clone();
    context.caches.service_accounts.on_change(move |change| {
        if let (Some(old), None) = (change.old, change.new)
            && old.name() == plan::NAME
        {
            own.add(Key::new("", old.namespace()));
        }
    });
}

fn name<K: Object>(object: Option<&Arc<K>>) -> &str {
    object.map(|object| object.name()).unwrap_or_default()
}

/// Creates the account of one namespace if it is missing.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let caches = &context.caches;
    let namespace = caches.namespaces.get(&key);
    let account = caches.service_accounts.get(&Key::new(&key.name, plan::NAME));
    if !plan::is_missing(namespace.as_deref(), account.as_deref()) {
        return Ok(Next::Wait);
    }
    let account = json!({"metadata": {"name": plan::NAME, "namespace": key.name}});
    match context.writer(&caches.service_accounts).create(&key.name, account).await {
        Err(error) if !is_already_exists(&error) && !is_namespace_terminating(&error) => {
            Err(Error::Request {
                verb: "create",
                object: format!("ServiceAccount {}/default", key.name),
                source: error,
            })
        }
        Ok(_) | Err(_) => Ok(Next::Wait),
    }
}
