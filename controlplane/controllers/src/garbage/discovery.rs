//! Discovers the kinds whose objects the collector watches.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Notify;

use crate::api_kind::ApiKind;
use crate::context::Context;
use crate::watch::request_backoff;

/// Delay between a change of a definition and the discovery.
const DELAY: Duration = Duration::from_millis(200);
/// Time until the next discovery while a server does not respond, as upstream.
const RESYNC: Duration = Duration::from_secs(30);

/// The kinds that are served, except events.
pub(super) struct Found {
    pub(super) kinds: Vec<Arc<ApiKind>>,
    /// Whether all servers responded.
    pub(super) is_complete: bool,
}

/// Waits until the next discovery is due: after a notification, or after [`RESYNC`] if a server did not respond. The
/// resync is needed, because the kinds of an APIService can become known without a change of its condition. This
/// happens after a start of the API server.
pub(super) async fn until_due(changed: &Notify, is_complete: bool) {
    match is_complete {
        true => changed.notified().await,
        false => {
            // The timeout is not an error: the next discovery is due in both cases.
            let _late = tokio::time::timeout(RESYNC, changed.notified()).await;
        }
    }
    // The delay lets one discovery serve all events that arrive within a short time.
    tokio::time::sleep(DELAY).await;
}

/// Discovers the served kinds. Known kinds whose server does not respond stay in the list, because their objects still
/// exist.
pub(super) async fn discover(context: &Context, known: &[Arc<ApiKind>]) -> Found {
    let mut backoff = request_backoff();
    loop {
        match context.kinds().await {
            Ok(found) => {
                let kept = known.iter().filter(|kind| found.is_unavailable(kind)).cloned();
                let kept: Vec<Arc<ApiKind>> = kept.collect();
                let is_complete = found.unavailable.is_empty();
                let new = found.kinds.into_iter().filter(|kind| !kind.is_event()).map(Arc::new);
                return Found { kinds: new.chain(kept).collect(), is_complete };
            }
            Err(error) => error.log("garbage", &"discovery", Duration::ZERO),
        }
        tokio::time::sleep(backoff.next_delay()).await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::test_api::TestApi;

    async fn found(version: Value) -> Found {
        let group = json!({"metadata": {"name": "far.io"}, "versions": [version]});
        let api = TestApi::new(&[("/apis", json!({"items": [group]})), ("/api", json!({"items": []}))]);
        discover(&api.context, &[]).await
    }

    #[tokio::test]
    async fn a_discovery_without_the_kinds_of_a_server_is_not_complete() {
        let thing = json!({"resource": "things", "scope": "Namespaced", "verbs": ["list"],
            "responseKind": {"group": "far.io", "version": "v1", "kind": "Thing"}});
        let current = found(json!({"version": "v1", "freshness": "Current", "resources": [thing]})).await;
        assert!(current.is_complete && current.kinds.len() == 1);
        let stale = found(json!({"version": "v1", "freshness": "Stale"})).await;
        assert!(!stale.is_complete && stale.kinds.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn kinds_are_discovered_again_while_a_server_does_not_respond() {
        let changed = Notify::new();
        let due = async |is_complete: bool| {
            tokio::time::timeout(RESYNC * 2, until_due(&changed, is_complete)).await.is_ok()
        };
        assert!(due(false).await && !due(true).await);
        changed.notify_one();
        assert!(due(true).await);
    }
}
