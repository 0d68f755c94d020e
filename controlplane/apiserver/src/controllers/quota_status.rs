//! Writes the status of quotas: the limits of the spec, and the use in the ledger.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use coracle_kinds::kind::by_resource;
use coracle_store::Expect;
use jiff::Timestamp;
use tokio_util::sync::CancellationToken;

use crate::{
    cache::Shared,
    error::ApiError,
    state::State,
    write::{self, Failed},
};

/// Delay after the store refused a write.
const RETRY: Duration = Duration::from_secs(1);

/// Writes the status of each changed quota, until the server ends.
pub(crate) async fn write_statuses(weak: Weak<State>) {
    let Some((notify, shutdown)) =
        weak.upgrade().map(|state| (state.cache.quotas.notify(), state.shutdown.clone()))
    else {
        return;
    };
    let mut next_change = None;
    loop {
        // A notification without a waiting task is kept, so no change is missed.
        tokio::select! {
            () = notify.notified() => {}
            () = pass(next_change) => {}
            () = shutdown.cancelled() => return,
        }
        let changed = {
            let Some(state) = weak.upgrade() else { return };
            let mut accounts = state.cache.quotas.lock();
            accounts.advance(&state.cache, Timestamp::now());
            next_change = accounts.next_change();
            accounts.take_changed()
        };
        for (namespace, name) in changed {
            let Some(state) = weak.upgrade() else { return };
            let Err(error) = write_status(&state, &namespace, &name).await else { continue };
            tracing::warn!(namespace, name, error = %error, "cannot write the status of a quota");
            drop(state);
            if !wait_for_retry(&shutdown).await {
                return;
            }
            let Some(state) = weak.upgrade() else { return };
            state.cache.quotas.lock().mark(&namespace, &name);
        }
    }
}

/// Waits for the time of a retry. Returns false at once if the server ends.
async fn wait_for_retry(shutdown: &CancellationToken) -> bool {
    tokio::select! {
        biased;
        () = shutdown.cancelled() => false,
        () = tokio::time::sleep(RETRY) => true,
    }
}

/// Waits until the time has passed. Without a time, waits forever.
async fn pass(time: Option<Timestamp>) {
    let Some(time) = time else { return std::future::pending().await };
    let left = Duration::try_from(time.duration_since(Timestamp::now())).unwrap_or_default();
    // The usage changes only after this time, so wait a millisecond longer.
    tokio::time::sleep(left + Duration::from_millis(1)).await;
}

async fn write_status(state: &Arc<State>, namespace: &str, name: &str) -> Result<(), ApiError> {
    let Some(kind) = by_resource("", "v1", "resourcequotas") else { return Ok(()) };
    loop {
        let Some(current) = state.cache.get(kind, namespace, name) else { return Ok(()) };
        let status = {
            let accounts = state.cache.quotas.lock();
            let Some(account) = accounts.account(namespace, name) else { return Ok(()) };
            // The use lacks the objects that cannot be decrypted. When they are loaded, the quota is marked again.
            let lacks = |unread: &Arc<Shared>| account.quota.tracks(unread.lock().kind());
            if state.cache.incomplete().iter().any(lacks) {
                return Ok(());
            }
            account.quota.status(&account.used)
        };
        let mut object = current.value();
        if object.get("status") == Some(&status) {
            return Ok(());
        }
        let Some(map) = object.as_object_mut() else { return Ok(()) };
        map.insert("status".to_owned(), status);
        let expect = Expect::Revision(current.revision);
        match write::commit(state, kind, &current.key, expect, Some(&object)).await {
            Ok(_) => return Ok(()),
            Err(Failed::Conflict | Failed::Allocated) => {}
            Err(Failed::Other(error)) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn a_retry_does_not_delay_the_end_of_the_server() {
        let shutdown = CancellationToken::new();
        let mut waiting = Box::pin(wait_for_retry(&shutdown));
        assert_eq!(waiting.as_mut().now_or_never(), None);
        shutdown.cancel();
        assert_eq!(waiting.now_or_never(), Some(false));
    }
}
