//! Writes the config map `cluster-info`.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::Timestamp;
use serde_json::json;

use super::plan;
use crate::caches::CLUSTER_INFO_NAME;
use crate::context::Context;
use crate::error::{Error, is_already_exists};
use crate::object::{Key, ObjectExt};
use crate::queue::{Next, Queue};
use crate::write::Part;

const NAMESPACE: &str = "kube-public";

/// The key of the config map.
fn config_map_key() -> Key {
    Key::new(NAMESPACE, CLUSTER_INFO_NAME)
}

/// Queues the config map when a token or the config map changes.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    let own = queue.clone();
    context.caches.tokens.on_change(move |_| own.add(config_map_key()));
    let own = queue.clone();
    context.caches.cluster_infos.on_change(move |change| {
        if change.latest().is_some_and(|found| found.key() == config_map_key()) {
            own.add(config_map_key());
        }
    });
    let own = queue.clone();
    context.caches.namespaces.on_change(move |change| {
        if change.old.is_none() && change.new.is_some_and(|namespace| namespace.name() == NAMESPACE) {
            own.add(config_map_key());
        }
    });
}

/// Reconciles the config map. Expiring tokens need no timer: their deletion is a change of the Secret.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    context.caches.tokens.synced().await;
    context.caches.cluster_infos.synced().await;
    let config = &context.config;
    let found = context.caches.cluster_infos.get(&key);
    let data = found.as_ref().and_then(|found| found.data.as_ref());
    // The content for another API server is written by its installer, such as kubeadm.
    let content = match (&config.server, &config.root_ca_pem) {
        (Some(server), Some(authority)) => Some(plan::kubeconfig(server, authority)),
        _ => data.and_then(|data| data.get(plan::KUBECONFIG).cloned()),
    };
    let Some(content) = content else { return Ok(Next::Wait) };
    let desired = plan::desired(content, &context.caches.tokens.all(), Timestamp::now());
    let writer = context.writer(&context.caches.cluster_infos);
    let Some(found) = &found else {
        let object = json!({"metadata": {"name": key.name, "namespace": key.namespace}, "data": desired});
        return match writer.create(&key.namespace, object).await {
            Err(error) if !is_already_exists(&error) => {
                let object = format!("ConfigMap {key}");
                Err(Error::Request { verb: "create", object, source: error })
            }
            Ok(_) | Err(_) => Ok(Next::Wait),
        };
    };
    let data = plan::change(found.data.as_ref().unwrap_or(&BTreeMap::new()), &desired);
    if data.is_empty() {
        return Ok(Next::Wait);
    }
    writer.merge(&key, Part::Main, json!({"data": data})).await?;
    Ok(Next::Wait)
}
