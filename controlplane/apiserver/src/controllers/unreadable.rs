//! Loads the resources whose stored objects could not be decrypted at the start, when their key management service
//! responds. Retries single objects that cannot be decrypted.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use coracle_backoff::Backoff;

use crate::{
    cache::{Cache, Shared},
    controllers::initialization::remove_rejected_of,
    state::State,
};

/// First and maximum delay between attempts. If the service does not respond, an attempt calls the service only once.
const FIRST_BACKOFF: Duration = Duration::from_millis(500);
const MAX_BACKOFF: Duration = Duration::from_secs(30);

/// Starts a task for each unreadable resource. The task ends when the objects are loaded.
pub(crate) fn load_later(state: &Arc<State>) {
    for resource in state.cache.unreadable() {
        tokio::spawn(load(Arc::downgrade(state), resource));
    }
}

/// Retries single objects that cannot be decrypted, until the server stops. Without such objects the task waits.
pub(crate) async fn read_again(state: Weak<State>) {
    let parts = state.upgrade().map(|state| (state.shutdown.clone(), state.cache.unreadable_found()));
    let Some((shutdown, mut found)) = parts else { return };
    let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF).with_jitter();
    let mut reported = 0;
    loop {
        let Some(is_needed) = state.upgrade().map(|state| state.cache.has_unreadable_objects()) else {
            return;
        };
        tokio::select! {
            // Cancel-safe: the futures only wait.
            () = tokio::time::sleep(backoff.next_delay()), if is_needed => {}
            changed = found.changed(), if !is_needed => {
                // An error means that the cache was dropped.
                if changed.is_err() {
                    return;
                }
                backoff.reset();
                continue;
            }
            () = shutdown.cancelled() => return,
        }
        let Some(state) = state.upgrade() else { return };
        let outcome = tokio::select! {
            // Cancel-safe: a cancelled pass leaves only decrypted objects that wait for a commit. The server stops
            // anyway.
            outcome = state.cache.read_again(&*state.store) => outcome,
            () = shutdown.cancelled() => return,
        };
        match outcome {
            Ok(true) => {
                backoff.reset();
                reported = 0;
            }
            Ok(false) => report(&state.cache, &mut reported),
            Err(error) => tracing::warn!(%error, "cannot retry objects that could not be decrypted"),
        }
    }
}

/// Logs the number of objects that cannot be decrypted, if it differs from the reported number.
fn report(cache: &Cache, reported: &mut usize) {
    let (objects, first) = cache.unreadable_objects();
    if objects != *reported {
        *reported = objects;
        tracing::warn!(
            objects,
            first = first.as_deref(),
            "single objects cannot be decrypted, trying again later"
        );
    }
}

async fn load(state: Weak<State>, resource: Arc<Shared>) {
    let Some(shutdown) = state.upgrade().map(|state| state.shutdown.clone()) else { return };
    let name = resource.lock().kind().qualified_resource();
    let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF).with_jitter();
    loop {
        tokio::select! {
            () = tokio::time::sleep(backoff.next_delay()) => {}
            () = shutdown.cancelled() => return,
        }
        let Some(state) = state.upgrade() else { return };
        match state.cache.load_unreadable(&*state.store, &resource).await {
            Ok(()) => {
                tracing::info!(resource = name, "the objects of a resource are decrypted and loaded");
                if state.admission.initialization.is_some() {
                    remove_rejected_of(&state, &resource).await;
                }
                return;
            }
            // The check of the service logs its failures.
            Err(error) if error.is_of_service() => {
                tracing::debug!(resource = name, %error, "cannot decrypt the objects of a resource yet");
            }
            Err(error) => tracing::error!(resource = name, %error, "cannot load the objects of a resource"),
        }
    }
}
