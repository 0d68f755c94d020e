//! Deletes the objects of a terminating definition, then removes its finalizer.

use std::sync::{Arc, Weak};
use std::time::Duration;

use coracle_custom_resources::Definition;
use coracle_custom_resources::conditions::{self, FINALIZER, condition};
use coracle_kinds::Resource;
use serde_json::json;

use super::stored::{check_exists, edit};
use crate::cache::{Event, Object, Scope, Watcher, prefix_of};
use crate::call::Call;
use crate::error::{ApiError, Result};
use crate::state::State;
use crate::verb::delete;
use crate::write;

/// Delay after an error. A failed store causes no watch event, so a timer starts the next attempt.
const RETRY: Duration = Duration::from_secs(5);

/// Deletes all objects and waits until no object is left, then removes the finalizer.
pub(super) async fn run(state: &Weak<State>, definition: &Definition) {
    loop {
        let Some(strong) = state.upgrade() else { return };
        let shutdown = strong.shutdown.clone();
        let outcome = tokio::select! {
            () = shutdown.cancelled() => return,
            outcome = clean(&strong, definition) => outcome,
        };
        drop(strong);
        match outcome {
            Ok(()) => return,
            Err(error) if error.reason == "NotFound" => return,
            Err(error) => {
                let name = &definition.metadata.name;
                tracing::warn!(
                    definition = name,
                    error = error.message,
                    "cannot delete the objects of a custom resource"
                );
                tokio::time::sleep(RETRY).await;
            }
        }
    }
}

async fn clean(state: &Arc<State>, definition: &Definition) -> Result<()> {
    let names = &definition.status.accepted_names;
    let resource = state.registry.load().find_stored(&definition.spec.group, &names.plural).cloned();
    if let Some(resource) = resource {
        let text = "CustomResource deletion is in progress";
        let begun = condition("Terminating", "True", "InstanceDeletionInProgress", text);
        edit(state, &definition.metadata, |object| conditions::set(object, &begun, &write::now())).await?;
        delete_all(state, definition, &resource).await?;
    }
    let done = condition("Terminating", "False", "InstanceDeletionCompleted", "removed all instances");
    edit(state, &definition.metadata, |object| {
        conditions::set(object, &done, &write::now());
        if let Some(list) = object["metadata"]["finalizers"].as_array_mut() {
            list.retain(|finalizer| finalizer != FINALIZER);
        }
    })
    .await
}

/// Deletes each object, and waits until objects with finalizers are removed.
///
/// Every API server does this concurrently. After another server has removed the finalizer of the definition, a new
/// definition can have the same name. The new definition's objects must stay: each deletion has a uid precondition, and
/// the wait ends with the definition.
async fn delete_all(state: &Arc<State>, definition: &Definition, resource: &Arc<Resource>) -> Result<()> {
    let collection = state.cache.of(resource)?;
    let scope = Scope { prefix: prefix_of(resource, ""), ..Scope::default() };
    let (watcher, mut events) = Watcher::new(scope, false);
    state.cache.check_complete(resource, "")?;
    let objects = collection.lock().watch_from_now(watcher, state.cache.revision());
    for object in &objects {
        delete_object(state, resource, object).await?;
    }
    loop {
        if is_empty(state, resource)? {
            return Ok(());
        }
        check_exists(state, &definition.metadata)?;
        match events.recv().await {
            // A request has created this object. It began before the deletion of the definition, or ran at another
            // server.
            Some(Event::Added(object)) => delete_object(state, resource, &object).await?,
            Some(_) => {}
            None => return Err(ApiError::internal("the objects cannot be watched")),
        }
    }
}

async fn delete_object(state: &Arc<State>, resource: &Arc<Resource>, object: &Object) -> Result<()> {
    let namespace = object.key.split('/').rev().nth(1).filter(|_| resource.namespaced).unwrap_or_default();
    let place = json!({"metadata": {"namespace": namespace}});
    let call = Call::internal(state, resource.clone(), &place);
    let known = object.part(&[&["metadata", "uid"]]);
    let options = delete::Options::of_uid(write::text(&known, "uid"));
    match delete::one(&call, object.name(), &options).await {
        Err(error) if error.reason != "NotFound" => Err(error),
        _ => Ok(()),
    }
}

fn is_empty(state: &State, resource: &Resource) -> Result<bool> {
    let collection = state.cache.of(resource)?;
    let prefix = prefix_of(resource, "");
    let collection = collection.lock();
    // As upstream, an object that cannot be decrypted prevents the deletion of the definition.
    collection.check_complete(&prefix)?;
    Ok(collection.under(&prefix).next().is_none())
}
