//! The worker of one APIService with a service. It watches the Service and its EndpointSlices. It checks the server
//! after each change, and periodically.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use coracle_backoff::Backoff;
use coracle_kinds::{
    Resource,
    kind::by_resource,
    selector::{FieldSelector, LabelSelector},
};
use futures::FutureExt as _;
use tokio::sync::watch;

use super::check::{self, Checked};
use crate::{
    aggregation::{Remote, ServiceReference},
    cache::{Cache, Events, Scope, Watcher, prefix_of},
    error::{ApiError, Result},
    state::State,
};

/// Time between two checks without a change, as upstream. Such a check detects that a server cannot be reached any
/// more.
const CHECK_INTERVAL: Duration = Duration::from_secs(30);
/// First delay after a failed check. The delay doubles with each failure, up to [`CHECK_INTERVAL`].
const FIRST_RETRY: Duration = Duration::from_millis(100);

/// The changes of a Service and of its EndpointSlices.
struct ServiceChanges {
    service: Events,
    slices: Events,
}

/// Checks a server until `remotes` is closed or the API server ends. A new value of `remotes` replaces the server and
/// ends a running check.
pub(super) async fn run(state: Weak<State>, kind: Arc<Resource>, mut remotes: watch::Receiver<Arc<Remote>>) {
    let Some(shutdown) = state.upgrade().map(|state| state.shutdown.clone()) else { return };
    loop {
        let remote = remotes.borrow_and_update().clone();
        // Cancel-safe: the next round begins with a check.
        tokio::select! {
            () = follow(&state, &kind, &remote) => return,
            changed = remotes.changed() => if changed.is_err() { return },
            () = shutdown.cancelled() => return,
        }
    }
}

/// Checks a server at once, after each change of its service, and periodically. Returns when the API server ends.
async fn follow(state: &Weak<State>, kind: &Arc<Resource>, remote: &Arc<Remote>) {
    let mut backoff = Backoff::new(FIRST_RETRY, CHECK_INTERVAL);
    loop {
        // The watch begins before the check, so that it reports each change that the check misses.
        let Some(strong) = state.upgrade().filter(|state| !state.shutdown.is_cancelled()) else { return };
        let watched = ServiceChanges::watch(&strong.cache, remote.service());
        drop(strong);
        let Ok(mut changes) = watched else {
            // The stored Services cannot be decrypted yet. Until then the cache does not show whether the Service
            // exists.
            tokio::time::sleep(CHECK_INTERVAL).await;
            continue;
        };
        let mut is_watching = true;
        while is_watching {
            changes.skip_queued();
            let Some(strong) = state.upgrade() else { return };
            let checked = check::run(&strong, kind, remote).await;
            drop(strong);
            let delay = match checked {
                Checked::Done => {
                    backoff.reset();
                    CHECK_INTERVAL
                }
                Checked::Failed => backoff.next_delay(),
            };
            is_watching = tokio::time::timeout(delay, changes.next()).await.unwrap_or(true);
        }
    }
}

// === impl ServiceChanges ===

impl ServiceChanges {
    fn watch(cache: &Cache, reference: &ServiceReference) -> Result<Self> {
        let ServiceReference { namespace, name, .. } = reference;
        let services = by_resource("", "v1", "services").ok_or_else(ApiError::no_resource)?;
        let slices =
            by_resource("discovery.k8s.io", "v1", "endpointslices").ok_or_else(ApiError::no_resource)?;
        // A selector cannot contain an invalid name. In that case, all changes in the namespace cause a check, which
        // finds no Service.
        let labels = LabelSelector::parse(&format!("kubernetes.io/service-name={name}")).unwrap_or_default();
        let fields = FieldSelector::parse(services, &format!("metadata.name={name}")).unwrap_or_default();
        let service = Scope { prefix: prefix_of(services, namespace), fields, ..Scope::default() };
        let of_service = Scope { prefix: prefix_of(slices, namespace), labels, ..Scope::default() };
        Ok(Self { service: begin(cache, services, service)?, slices: begin(cache, slices, of_service)? })
    }

    /// Drops the queued changes: the next check reads the current objects.
    fn skip_queued(&mut self) {
        for events in [&mut self.service, &mut self.slices] {
            while matches!(events.recv().now_or_never(), Some(Some(_))) {}
        }
    }

    /// Waits for a change. Returns false if a watch has ended.
    async fn next(&mut self) -> bool {
        // Cancel-safe: a dropped branch loses no event.
        tokio::select! {
            event = self.service.recv() => event.is_some(),
            event = self.slices.recv() => event.is_some(),
        }
    }
}

fn begin(cache: &Cache, kind: &Resource, scope: Scope) -> Result<Events> {
    let (watcher, events) = Watcher::new(scope, false);
    let _current = cache.of(kind)?.lock().watch_from_now(watcher, cache.revision());
    Ok(events)
}

#[cfg(test)]
mod tests {
    use coracle_store::Commit;
    use serde_json::{Value, json};

    use super::*;
    use crate::cache::{encode, key_of};

    #[tokio::test]
    async fn only_changes_of_the_service_and_its_slices_cause_a_check() {
        let cache = Arc::new(Cache::new(1));
        let reference = ServiceReference { namespace: "n".to_owned(), name: "far".to_owned(), port: 443 };
        let mut changes = ServiceChanges::watch(&cache, &reference).unwrap();
        let mut revision = 1;
        let mut change = |kind: &Resource, namespace: &str, name: &str, of: Option<&str>| {
            revision += 1;
            let object: Value = json!({"metadata": {"name": name, "namespace": namespace,
                "labels": {"kubernetes.io/service-name": of.unwrap_or_default()}}});
            let (key, value) = (key_of(kind, namespace, name).into(), Some(encode(kind, &object)));
            cache.apply(&Commit { key, revision, value, created: revision, guard_follows: false });
            let seen = changes.next().now_or_never();
            changes.skip_queued();
            seen
        };
        let services = by_resource("", "v1", "services").unwrap();
        let slices = by_resource("discovery.k8s.io", "v1", "endpointslices").unwrap();
        assert_eq!(change(services, "n", "far", None), Some(true));
        assert_eq!(change(slices, "n", "far-1", Some("far")), Some(true));
        // A slice that leaves the service.
        assert_eq!(change(slices, "n", "far-1", Some("other")), Some(true));
        for (kind, namespace, name, of) in [
            (services, "n", "far-2", None),
            (services, "m", "far", None),
            (slices, "n", "other-1", Some("other")),
            (slices, "m", "far-1", Some("far")),
        ] {
            assert_eq!(change(kind, namespace, name, of), None, "{namespace}/{name}");
        }
    }
}
