//! Watches a kind and updates its cache.

use std::sync::Arc;
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_watch::{Config, Error};
use futures::StreamExt;
use futures::future::BoxFuture;
use kube::Client;
use kube::api::Request;

use crate::cache::{Cache, Unverified};
use crate::object::{Meta, Object};

/// First and maximum delay between failed attempts of a request.
const FIRST_BACKOFF: Duration = Duration::from_millis(20);
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// The back-off of failed requests.
pub(crate) const fn request_backoff() -> Backoff {
    Backoff::new(FIRST_BACKOFF, MAX_BACKOFF).with_jitter()
}

/// Watches a kind and updates the cache, forever.
pub(crate) async fn feed<K: Object>(client: Client, cache: Arc<Cache<K>>, config: Config) {
    follow(client, cache, config, |_| false).await;
}

/// Does the same as [`feed`], for a kind that some API servers do not serve. The cache then counts as listed and empty.
pub(crate) async fn feed_if_served<K: Object>(client: Client, cache: Arc<Cache<K>>, config: Config) {
    follow(client, cache, config, Error::is_unserved).await;
}

/// Does the same as [`feed_if_served`], for a kind that other controllers do not need. An API server may also forbid
/// access to the kind.
pub(crate) async fn feed_if_permitted<K: Object>(client: Client, cache: Arc<Cache<K>>, config: Config) {
    let is_absent = |error: &Error| error.is_unserved() || error.is_forbidden();
    follow(client, cache, config.optional(), is_absent).await;
}

/// Does the same as [`feed`], for a built-in kind that is disabled by default. The API server is asked only once,
/// because its built-in kinds do not change while it runs.
pub(crate) async fn feed_if_enabled<K: Object>(client: Client, cache: Arc<Cache<K>>, config: Config) {
    if !is_enabled(&client, &K::api_version(&()), &K::plural(&())).await {
        return std::future::pending().await;
    }
    feed(client, cache, config).await;
}

/// Whether the API server serves a resource of a group version.
async fn is_enabled(client: &Client, api_version: &str, plural: &str) -> bool {
    let mut backoff = request_backoff();
    loop {
        match client.list_api_group_resources(api_version).await {
            Ok(list) => return list.resources.iter().any(|resource| resource.name == plural),
            Err(error) if crate::error::is_not_found(&error) => return false,
            Err(_) => tokio::time::sleep(backoff.next_delay()).await,
        }
    }
}

/// Applies the events of a watch to the cache. An error for which `is_absent` holds means that there are no objects.
async fn follow<K: Object>(
    client: Client,
    cache: Arc<Cache<K>>,
    config: Config,
    is_absent: fn(&Error) -> bool,
) {
    let mut events = coracle_watch::watch_all::<K>(client.clone(), config);
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                for unverified in cache.apply(event) {
                    let namespace = &unverified.key.namespace;
                    let url = K::url_path(&(), (!namespace.is_empty()).then_some(namespace));
                    if is_missing(&client, url, &unverified).await {
                        cache.remove_missing(&unverified);
                    }
                }
            }
            Err(error) => {
                log(&K::kind(&()), &error);
                if is_absent(&error) {
                    cache.set_unserved();
                }
            }
        }
    }
}

fn log(kind: &str, error: &Error) {
    let cause = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
    tracing::debug!(%kind, %error, cause, "cannot watch a kind");
}

/// Whether an object does not exist any more. `url` is the URL of the objects of its kind and namespace. The future is
/// boxed, so that its code is compiled once for all kinds.
fn is_missing<'a>(client: &'a Client, url: String, unverified: &'a Unverified) -> BoxFuture<'a, bool> {
    let requests = Request::new(url);
    Box::pin(async move {
        let mut backoff = request_backoff();
        loop {
            let request = requests.get(&unverified.key.name, &Default::default());
            let Ok(request) = request else { return true };
            match client.request::<Meta>(request).await.map(|found| found.metadata.uid) {
                Ok(Some(uid)) => return uid != unverified.uid,
                Err(error) if crate::error::is_not_found(&error) => return true,
                // A response without a uid is not an object of the API server.
                Ok(None) | Err(_) => tokio::time::sleep(backoff.next_delay()).await,
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http::Response;
    use serde_json::json;

    use super::*;
    use crate::object::Key;

    #[tokio::test(start_paused = true)]
    async fn an_object_is_missing_if_its_name_has_another_uid_and_not_if_a_response_has_none() {
        for (uid, expect) in [("u", false), ("v", true)] {
            let requests = Arc::new(AtomicUsize::new(0));
            let count = requests.clone();
            let service = tower::service_fn(move |_request: http::Request<kube::client::Body>| {
                let is_first = count.fetch_add(1, Ordering::SeqCst) == 0;
                let object = if is_first { json!({}) } else { json!({"metadata": {"uid": uid}}) };
                std::future::ready(Ok::<_, Infallible>(Response::new(object.to_string())))
            });
            let client = Client::new(service, "default");
            let unverified = Unverified { key: Key::new("n", "a"), uid: "u".to_owned() };
            let url = "/api/v1/namespaces/n/pods".to_owned();
            assert_eq!(is_missing(&client, url, &unverified).await, expect, "{uid}");
            assert_eq!(requests.load(Ordering::SeqCst), 2);
        }
    }
}
