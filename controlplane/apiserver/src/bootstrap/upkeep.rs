//! Restores default objects that a client deletes or changes. A cluster does not work without them.
//!
//! Upstream's controllers check these objects every ten seconds or every minute (`pkg/controlplane/controller`). This
//! controller runs when one of the objects changes.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use coracle_kinds::{kind::by_resource, selector::FieldSelector};
use futures::future::select_all;

use super::{
    DEFAULT_RANGE, addresses, default_range, extension_authentication, has_config_maps,
    missing_extension_authentication, namespaces, own_service, token_tracking,
};
use crate::{
    cache::{Events, Scope, Watcher, prefix_of},
    error::{ApiError, Result},
    state::State,
};

/// Minimum time between two passes, so that a client that deletes the objects again and again does not cause a loop.
const MIN_PASS_INTERVAL: Duration = Duration::from_secs(1);
/// Delay after an error. A failed write changes no object, so a timer starts the next attempt.
const RETRY: Duration = Duration::from_secs(5);
/// The watched objects. The other default namespaces are not watched, because admission refuses to delete them.
const OBJECTS: [DefaultObject; 6] = [
    DefaultObject { group: "", resource: "namespaces", namespace: "", name: "kube-node-lease" },
    DefaultObject {
        group: "networking.k8s.io",
        resource: "servicecidrs",
        namespace: "",
        name: DEFAULT_RANGE,
    },
    DefaultObject { group: "", resource: "services", namespace: "default", name: "kubernetes" },
    DefaultObject { group: "", resource: "endpoints", namespace: "default", name: "kubernetes" },
    DefaultObject {
        group: "discovery.k8s.io",
        resource: "endpointslices",
        namespace: "default",
        name: "kubernetes",
    },
    DefaultObject {
        group: "",
        resource: "configmaps",
        namespace: "kube-system",
        name: "extension-apiserver-authentication",
    },
];

/// A default object of the version `v1` of its group.
struct DefaultObject {
    /// API group. Empty for the core group.
    group: &'static str,
    resource: &'static str,
    /// Namespace of the object. Empty for a cluster-scoped object.
    namespace: &'static str,
    name: &'static str,
}

/// Restores the objects after each change, until the server stops. If not `is_complete`, some objects are missing now,
/// and the first attempt follows after [`RETRY`].
pub(super) fn start(state: &Arc<State>, is_complete: bool) -> Result<()> {
    let first = watches(state)?;
    let remaining = RemainingWork { objects: !is_complete, authorities: !has_config_maps(state) };
    coracle_threads::spawn(run(Arc::downgrade(state), first, remaining));
    Ok(())
}

/// The work that remains for the next passes.
struct RemainingWork {
    /// Whether some objects are missing.
    objects: bool,
    /// Whether the start could not write the authorities of this server, because config maps cannot be decrypted.
    authorities: bool,
}

async fn run(state: Weak<State>, mut watches: Vec<Events>, mut remaining: RemainingWork) {
    let Some(shutdown) = state.upgrade().map(|state| state.shutdown.clone()) else { return };
    loop {
        // Cancel-safe: dropping the receive loses no event.
        let has_ended = tokio::select! {
            has_ended = next(&mut watches), if !remaining.objects => has_ended,
            () = tokio::time::sleep(RETRY), if remaining.objects => false,
            () = shutdown.cancelled() => return,
        };
        let Some(strong) = state.upgrade() else { return };
        let outcome = if has_ended { self::watches(&strong).map(|new| watches = new) } else { Ok(()) };
        let outcome = match outcome {
            Ok(()) => restore(&strong, &mut remaining).await,
            Err(error) => Err(error),
        };
        drop(strong);
        remaining.objects = outcome.is_err();
        if let Err(error) = outcome {
            tracing::warn!(%error, "cannot restore the default objects");
        }
        tokio::select! {
            () = tokio::time::sleep(MIN_PASS_INTERVAL) => {}
            () = shutdown.cancelled() => return,
        }
    }
}

/// Restores each object, even if another object could not be restored. Returns the first error.
async fn restore(state: &Arc<State>, remaining: &mut RemainingWork) -> Result<()> {
    let mut outcome = namespaces(state).await;
    outcome = outcome.and(default_range(state).await);
    outcome = outcome.and(own_service(state).await);
    outcome = outcome.and(token_tracking(state).await);
    // Servers that share a store write their addresses periodically themselves. A write here could register a stopping
    // server again. The authorities of the servers may differ, for example while the servers replace an authority one
    // after another. If each server restored its own authorities, the servers would overwrite each other forever. But a
    // server that could not write its authorities at its start writes them once.
    let is_shared = state.store.is_shared();
    let is_late = remaining.authorities && has_config_maps(state);
    if is_shared && !is_late {
        return outcome.and(missing_extension_authentication(state).await);
    }
    if !is_shared {
        outcome = outcome.and(addresses::publish(state).await);
    }
    let written = extension_authentication(state).await;
    remaining.authorities &= !is_late || written.is_err();
    outcome.and(written)
}

/// Starts a watch of each object. If objects of the watched resource cannot be decrypted, the watch ends when these
/// objects are loaded. Then the default object is restored.
fn watches(state: &State) -> Result<Vec<Events>> {
    let watch = |object: &DefaultObject| -> Result<Events> {
        let DefaultObject { group, resource, namespace, name } = object;
        let kind = by_resource(group, "v1", resource).ok_or_else(ApiError::no_resource)?;
        let fields = FieldSelector::parse(kind, &format!("metadata.name={name}"));
        let fields = fields.map_err(|error| ApiError::bad_request(error.to_string()))?;
        let scope = Scope { prefix: prefix_of(kind, namespace), fields, ..Scope::default() };
        let (watcher, events) = Watcher::new(scope, false);
        let _initial = state.cache.collection(kind)?.lock().watch_from_now(watcher, state.cache.revision());
        Ok(events)
    };
    OBJECTS.iter().map(watch).collect()
}

/// Waits for the next event. Returns whether a watch has ended.
async fn next(watches: &mut [Events]) -> bool {
    let (event, ..) = select_all(watches.iter_mut().map(|events| Box::pin(events.recv()))).await;
    event.is_none()
}
