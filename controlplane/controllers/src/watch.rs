//! Watches a kind and updates its cache.

use std::sync::Arc;
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_watch::{Config, Error};
use futures::StreamExt;
use kube::{Api, Client};

use crate::cache::{Cache, Unverified};
use crate::object::Object;

/// First and maximum delay between failed attempts of a request.
const FIRST_BACKOFF: Duration = Duration::from_millis(20);
const MAX_BACKOFF: Duration = Duration::from_secs(10);

/// The back-off of failed requests.
pub(crate) const fn request_backoff() -> Backoff {
    Backoff::new(FIRST_BACKOFF, MAX_BACKOFF).with_jitter()
}

/// Watches a kind and updates the cache, forever.
pub(crate) async fn feed<K: Object>(client: Client, cache: Arc<Cache<K>>, config: Config) {
    follow(client, cache, config, |_, _| {}).await;
}

/// Does the same as [`feed`], for a kind that the API server possibly does not serve. The cache then counts as listed
/// and empty.
pub(crate) async fn feed_if_served<K: Object>(client: Client, cache: Arc<Cache<K>>, config: Config) {
    let on_error = |cache: &Cache<K>, error: &Error| {
        if error.is_unserved() {
            cache.set_unserved();
        }
    };
    follow(client, cache, config, on_error).await;
}

/// Does the same as [`feed_if_served`], for a kind that other controllers do not need. An API server may also forbid
/// it.
pub(crate) async fn feed_if_permitted<K: Object>(client: Client, cache: Arc<Cache<K>>, config: Config) {
    let on_error = |cache: &Cache<K>, error: &Error| {
        if error.is_unserved() || error.is_forbidden() {
            cache.set_unserved();
        }
    };
    follow(client, cache, config.optional(), on_error).await;
}

/// Does the same as [`feed`], for a built-in kind that is disabled by default. The API server is asked once whether it
/// serves the kind: that is fixed at the start of the server.
pub(crate) async fn feed_if_enabled<K: Object>(client: Client, cache: Arc<Cache<K>>, config: Config) {
    let mut backoff = request_backoff();
    loop {
        match client.list_api_group_resources(&K::api_version(&())).await {
            Ok(list) if list.resources.iter().any(|resource| resource.name == K::plural(&())) => break,
            Ok(_) => return std::future::pending().await,
            Err(error) if crate::error::is_not_found(&error) => return std::future::pending().await,
            Err(_) => tokio::time::sleep(backoff.next_delay()).await,
        }
    }
    feed(client, cache, config).await;
}

async fn follow<K: Object>(
    client: Client,
    cache: Arc<Cache<K>>,
    config: Config,
    on_error: fn(&Cache<K>, &Error),
) {
    let api: Api<K> = Api::all(client.clone());
    let mut events = coracle_watch::watch(api, config);
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                for unverified in cache.apply(event) {
                    verify(&client, &cache, unverified).await;
                }
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                tracing::debug!(kind = %K::kind(&()), %error, cause, "cannot watch a kind");
                on_error(&cache, &error);
            }
        }
    }
}

/// Checks with the API server whether an object exists that was missing from a list.
async fn verify<K: Object>(client: &Client, cache: &Cache<K>, unverified: Unverified) {
    let namespace = &unverified.key.namespace;
    let url = K::url_path(&(), (!namespace.is_empty()).then_some(namespace));
    let mut backoff = request_backoff();
    loop {
        let request = kube::api::Request::new(url.clone()).get(&unverified.key.name, &Default::default());
        let Ok(request) = request else { return cache.remove_missing(&unverified) };
        match client.request::<K>(request).await {
            Ok(found) if found.uid() == unverified.uid => return,
            Ok(_) => return cache.remove_missing(&unverified),
            Err(error) if crate::error::is_not_found(&error) => return cache.remove_missing(&unverified),
            Err(_) => tokio::time::sleep(backoff.next_delay()).await,
        }
    }
}
