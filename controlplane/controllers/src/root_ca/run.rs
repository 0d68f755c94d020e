//! Creates and corrects the config maps.

use std::sync::Arc;

use coracle_values::CollectMap;
use serde_json::{Value, json};

use super::plan::{Action, DATA_KEY, plan};
use crate::caches::ROOT_CA_NAME;
use crate::context::Context;
use crate::error::{Error, is_already_exists, is_namespace_terminating};
use crate::object::{Key, ObjectExt};
use crate::queue::{Next, Queue};
use crate::queueing::queue_stored;
use crate::write::Part;

/// Queues new namespaces, and the namespaces of changed config maps.
pub(crate) fn listen(context: &Context, queue: &Arc<Queue<Key>>) {
    queue_stored(&context.caches.namespaces, queue);
    let own = queue.clone();
    context.caches.root_cas.on_change(move |change| {
        if let Some(copy) = change.latest() {
            own.add(Key::new("", copy.namespace()));
        }
    });
}

/// Reconciles one namespace.
pub(crate) async fn reconcile(context: &Context, key: Key) -> Result<Next, Error> {
    let Some(pem) = &context.config.root_ca_pem else { return Ok(Next::Wait) };
    let place = Key::new(&key.name, ROOT_CA_NAME);
    let copy = context.caches.root_cas.get(&place);
    let namespace = context.caches.namespaces.get(&key);
    let writer = context.writer(&context.caches.root_cas);
    match plan(namespace.as_deref(), copy.as_deref(), pem) {
        Action::Nothing => {}
        Action::Create => {
            let note = "Contains a CA bundle that can be used to verify the kube-apiserver when using internal \
                        endpoints such as the internal service IP or kubernetes.default.svc. No other usage is \
                        guaranteed across distributions of Kubernetes clusters.";
            let copy = json!({
                "metadata": {"name": ROOT_CA_NAME, "namespace": key.name,
                             "annotations": {"kubernetes.io/description": note}},
                "data": {DATA_KEY: pem},
            });
            match writer.create(&key.name, copy).await {
                Err(error) if !is_already_exists(&error) && !is_namespace_terminating(&error) => {
                    return Err(Error::Request {
                        verb: "create",
                        object: format!("ConfigMap {place}"),
                        source: error,
                    });
                }
                Ok(_) | Err(_) => {}
            }
        }
        Action::Correct => {
            let old = copy.iter().filter_map(|copy| copy.data.as_ref()).flatten();
            // A merge patch removes a key only if it sets the key to null.
            let mut data: serde_json::Map<String, Value> =
                old.map(|(name, _)| (name.clone(), Value::Null)).collect_map();
            data.insert(DATA_KEY.to_owned(), pem.clone().into());
            writer.merge(&place, Part::Main, json!({"data": data})).await?;
        }
    }
    Ok(Next::Wait)
}
