//! Writes the config map `cluster-info`.

use std::sync::Arc;

use jiff::Timestamp;
use serde_json::{Value, json};

use super::plan;
use crate::caches::CLUSTER_INFO_NAME;
use crate::context::Context;
use crate::error::{Error, is_already_exists};
use crate::object::{Key, ObjectExt};
use crate::queue::{Next, Queue};
use crate::write::Part;

const NAMESPACE: &str = "kube-public";

/// The key of the config map.
fn place() -> Key {
    Key::new(NAMESPACE, CLUSTER_INFO_NAME)
}

/// Queues the config map when a token or the config map changes.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.tokens.on_change(move |_| own.add(place()));
    let own = queue.clone();
    context.caches.cluster_infos.on_change(move |change| {
        if change.latest().is_some_and(|found| found.key() == place()) {
            own.add(place());
        }
    });
    let own = queue.clone();
    context.caches.namespaces.on_change(move |change| {
        if change.old.is_none() && change.new.is_some_and(|namespace| namespace.name() == NAMESPACE) {
            own.add(place());
        }
    });
}

/// Reconciles the config map. No timer for expiring tokens: their deletion is a change of the Secret.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let config = &context.config;
    let (Some(server), Some(authority)) = (&config.server, &config.root_ca_pem) else {
        return Ok(Next::Wait);
    };
    let desired = plan::desired(server, authority, &context.caches.tokens.all(), Timestamp::now());
    let writer = context.writer(&context.caches.cluster_infos);
    let Some(found) = context.caches.cluster_infos.get(&key) else {
        let object = json!({"metadata": {"name": key.name, "namespace": key.namespace}, "data": desired});
        return match writer.create(&key.namespace, object).await {
            Err(error) if !is_already_exists(&error) => {
                let object = format!("ConfigMap {key}");
                Err(Error::Request { verb: "create", object, source: error })
            }
            Ok(_) | Err(_) => Ok(Next::Wait),
        };
    };
    let old = found.data.clone().unwrap_or_default();
    if old == desired {
        return Ok(Next::Wait);
    }
    // A merge patch deletes a key only if it names it with null.
    let mut data: serde_json::Map<String, Value> = old.into_keys().map(|name| (name, Value::Null)).collect();
    data.extend(desired.into_iter().map(|(name, text)| (name, text.into())));
    writer.merge(&key, Part::Main, json!({"data": data})).await?;
    Ok(Next::Wait)
}
