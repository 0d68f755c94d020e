//! Restores default objects that a user deletes or changes: a cluster does not work without them.
//!
//! Upstream's controllers compare these objects every ten seconds or every minute (`pkg/controlplane/controller`). This
//! controller runs when one of the objects changes.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use coracle_kinds::{kind::by_resource, selector::FieldSelector};
use futures::future::select_all;

use super::{
    DEFAULT_RANGE, addresses, default_range, extension_authentication, missing_extension_authentication,
    namespaces, own_service,
};
use crate::{
    cache::{Events, Scope, Watcher, prefix_of},
    error::{ApiError, Result},
    state::State,
};

/// Minimum time between two passes, so that a client that deletes the objects again and again does not cause a loop.
const PAUSE: Duration = Duration::from_secs(1);
/// Delay after an error. A failed write changes no object, so a timer starts the next attempt.
const RETRY: Duration = Duration::from_secs(5);
/// The objects: group, resource, namespace and name. Admission refuses to delete the other default
/// namespaces.
const OBJECTS: [(&str, &str, &str, &str); 6] = [
    ("", "namespaces", "", "kube-node-lease"),
    ("networking.k8s.io", "servicecidrs", "", DEFAULT_RANGE),
    ("", "services", "default", "kubernetes"),
    ("", "endpoints", "default", "kubernetes"),
    ("discovery.k8s.io", "endpointslices", "default", "kubernetes"),
    ("", "configmaps", "kube-system", "extension-apiserver-authentication"),
];

/// Restores the objects after each change, until the server stops. `is_complete` says whether all of them exist now.
pub(super) fn start(state: &Arc<State>, is_complete: bool) -> Result<()> {
    let first = watches(state)?;
    tokio::spawn(run(Arc::downgrade(state), first, is_complete));
    Ok(())
}

async fn run(state: Weak<State>, mut watches: Vec<Events>, mut is_complete: bool) {
    let Some(shutdown) = state.upgrade().map(|state| state.shutdown.clone()) else { return };
    loop {
        // Cancel-safe: dropping the receive loses no event.
        let has_ended = tokio::select! {
            has_ended = next(&mut watches), if is_complete => has_ended,
            () = tokio::time::sleep(RETRY), if !is_complete => false,
            () = shutdown.cancelled() => return,
        };
        let Some(strong) = state.upgrade() else { return };
        let outcome = if has_ended { self::watches(&strong).map(|new| watches = new) } else { Ok(()) };
        let outcome = match outcome {
            Ok(()) => restore(&strong).await,
            Err(error) => Err(error),
        };
        drop(strong);
        is_complete = outcome.is_ok();
        if let Err(error) = outcome {
            tracing::warn!(%error, "cannot restore the default objects");
        }
        tokio::select! {
            () = tokio::time::sleep(PAUSE) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Restores all objects. Returns the first error; it does not prevent the restoration of the other objects.
async fn restore(state: &Arc<State>) -> Result<()> {
    let mut outcome = namespaces(state).await;
    outcome = outcome.and(default_range(state).await);
    outcome = outcome.and(own_service(state).await);
    // Servers that share a store write their addresses periodically, and a server that stops must not register again.
    // The authorities of the servers may differ, for example while the servers replace an authority one after another.
    // If each server restored its own addresses and authorities, the servers would overwrite each other forever.
    if state.store.is_shared() {
        return outcome.and(missing_extension_authentication(state).await);
    }
    outcome = outcome.and(addresses::publish(state).await);
    outcome.and(extension_authentication(state).await)
}

/// Watches of the objects, from now on.
fn watches(state: &State) -> Result<Vec<Events>> {
    let watch = |(group, resource, namespace, name): &(&str, &str, &str, &str)| -> Result<Events> {
        let kind = by_resource(group, "v1", resource).ok_or_else(ApiError::no_resource)?;
        let fields = FieldSelector::parse(kind, &format!("metadata.name={name}"));
        let fields = fields.map_err(|error| ApiError::bad_request(error.to_string()))?;
        let scope = Scope { prefix: prefix_of(kind, namespace), fields, ..Scope::default() };
        let (watcher, events) = Watcher::new(scope, false);
        let _initial = state.cache.of(kind)?.lock().watch_from_now(watcher, state.cache.revision());
        Ok(events)
    };
    OBJECTS.iter().map(watch).collect()
}

/// Waits for the next event. Returns whether a watch has ended.
async fn next(watches: &mut [Events]) -> bool {
    let (event, ..) = select_all(watches.iter_mut().map(|events| Box::pin(events.recv()))).await;
    event.is_none()
}
