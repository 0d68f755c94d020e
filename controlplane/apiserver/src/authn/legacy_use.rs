//! Records the last use of the token in a Secret. A label of the Secret contains the day, so it changes at most once a
//! day.
//!
//! Source: `legacyValidator` of `k8s.io/kubernetes/pkg/serviceaccount`. Administrators find unused tokens by the label.

use std::sync::Weak;

use bytes::Bytes;
use coracle_kinds::kind::by_resource;
use futures::future::BoxFuture;
use http::{Request, StatusCode, header};
use http_body_util::Full;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::cache::Cache;

/// Label with the day (UTC) of the last use.
const LAST_USED: &str = "kubernetes.io/legacy-token-last-used";
/// Label with the day (UTC) since which the token is invalid.
const INVALID_SINCE: &str = "kubernetes.io/legacy-token-invalid-since";
/// Capacity of the queue. A use that does not fit is recorded at the next request.
const QUEUE_CAPACITY: usize = 64;

/// A Secret whose token was used.
#[derive(Debug)]
pub(crate) struct TokenUse {
    namespace: String,
    name: String,
    uid: Value,
}

/// The sending half of the queue of uses.
#[derive(Clone, Debug)]
pub(crate) struct TokenUseQueue(mpsc::Sender<TokenUse>);

/// Creates a queue of uses for [`record`].
pub(crate) fn queue() -> (TokenUseQueue, mpsc::Receiver<TokenUse>) {
    let (sender, receiver) = mpsc::channel(QUEUE_CAPACITY);
    (TokenUseQueue(sender), receiver)
}

/// Whether an administrator or the cleaner of unused tokens has marked the token of a Secret as invalid.
pub(super) fn is_invalid(secret: &Value) -> bool {
    secret["metadata"]["labels"][INVALID_SINCE].as_str().is_some_and(|since| !since.is_empty())
}

// === impl TokenUseQueue ===

impl TokenUseQueue {
    /// Queues the use of a Secret's token, unless the label has the current day.
    pub(super) fn note(&self, secret: &Value) {
        if is_recorded(secret, jiff::Timestamp::now()) {
            return;
        }
        let metadata = &secret["metadata"];
        let text = |field: &str| metadata[field].as_str().unwrap_or_default().to_owned();
        // If the queue is full, the next request queues the use again.
        let _ = self.0.try_send(TokenUse {
            namespace: text("namespace"),
            name: text("name"),
            uid: metadata["uid"].clone(),
        });
    }
}

/// Whether the label has the day of `now` or the following day: another server's clock may be ahead.
fn is_recorded(secret: &Value, now: jiff::Timestamp) -> bool {
    let label = secret["metadata"]["labels"][LAST_USED].as_str().unwrap_or_default();
    let tomorrow = now + jiff::SignedDuration::from_hours(24);
    label == day(now) || label == day(tomorrow)
}

fn day(at: jiff::Timestamp) -> String {
    at.to_string().chars().take(10).collect()
}

/// A request that sets the label of a Secret.
pub(crate) type LabelRequest = Request<Full<Bytes>>;

/// Writes the labels until the server is dropped. `send` sends a request; it returns `None` after the server has ended.
pub(crate) async fn record<S>(cache: Weak<Cache>, mut uses: mpsc::Receiver<TokenUse>, send: S)
where
    S: Fn(LabelRequest) -> BoxFuture<'static, Option<StatusCode>> + Send,
{
    while let Some(TokenUse { namespace, name, uid }) = uses.recv().await {
        let Some(cache) = cache.upgrade() else { return };
        let Some(kind) = by_resource("", "v1", "secrets") else { return };
        let now = jiff::Timestamp::now();
        // Concurrent requests may queue the same use several times.
        let secret = cache.get(kind, &namespace, &name);
        if secret.is_none_or(|secret| is_recorded(&secret.value(), now)) {
            continue;
        }
        let patch = json!({"metadata": {"uid": uid, "labels": {LAST_USED: day(now)}}});
        let request = Request::patch(format!("/api/v1/namespaces/{namespace}/secrets/{name}"))
            .header(header::CONTENT_TYPE, "application/merge-patch+json")
            .body(Full::<Bytes>::from(patch.to_string()));
        let Ok(request) = request else { continue };
        let Some(status) = send(request).await else { return };
        if !status.is_success() {
            let code = status.as_u16();
            tracing::warn!(namespace, name, code, "cannot record the use of a token");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_use_is_recorded_once_a_day() {
        let now: jiff::Timestamp = "2026-11-23T23:59:59Z".parse().unwrap();
        let secret = |day: &str| json!({"metadata": {"labels": {LAST_USED: day}}});
        let recorded = |day: &str| is_recorded(&secret(day), now);
        assert!(recorded("2026-11-23") && recorded("2026-11-24"));
        assert!(!recorded("2026-11-22") && !recorded("") && !is_recorded(&json!({}), now));
    }

    #[test]
    fn uses_beyond_the_queue_wait_for_a_later_request() {
        let (queue, mut receiver) = queue();
        let note = |number: usize| {
            queue.note(&json!({"metadata": {"namespace": "n", "name": format!("s{number}"), "uid": "u"}}));
        };
        (0..QUEUE_CAPACITY + 10).for_each(note);
        assert_eq!(std::iter::from_fn(|| receiver.try_recv().ok()).count(), 64);
        note(0);
        assert_eq!(receiver.try_recv().unwrap().name, "s0");
    }
}
