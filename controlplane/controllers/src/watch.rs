//! Watches a kind and updates its cache.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt;
use kube::runtime::watcher;
use kube::{Api, Client};

use crate::cache::{Cache, Unverified};
use crate::object::Object;

/// Timeout of a watch request in seconds. It is long, so that an idle machine rarely wakes up.
const WATCH_TIMEOUT_SECONDS: u32 = 1500;
const FIRST_DELAY: Duration = Duration::from_millis(20);
const MAX_DELAY: Duration = Duration::from_secs(10);
/// Maximum delay between the attempts to list a kind that the API server does not serve.
const MAX_UNSERVED_DELAY: Duration = Duration::from_secs(300);

/// The configuration of every watch.
pub(crate) fn config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_TIMEOUT_SECONDS)
}

/// Delay between failed attempts.
pub(crate) struct Retry(Duration);

impl Retry {
    /// Starts without failures.
    pub(crate) fn new() -> Self {
        Self(FIRST_DELAY)
    }

    /// Resets the delay after a success.
    pub(crate) fn reset(&mut self) {
        self.0 = FIRST_DELAY;
    }

    /// Waits after a failure. The delay doubles each time.
    pub(crate) async fn wait(&mut self) {
        tokio::time::sleep(self.next(MAX_DELAY)).await;
    }

    fn next(&mut self, longest: Duration) -> Duration {
        let delay = self.0.min(longest);
        self.0 = delay * 2;
        delay
    }
}

/// Watches a kind and updates the cache, forever.
pub(crate) async fn feed<K: Object>(client: Client, cache: Arc<Cache<K>>, config: watcher::Config) {
    follow(client, cache, config, |_| {}).await;
}

/// As [`feed`], for a kind that the API server may not serve. The cache then counts as listed and empty.
pub(crate) async fn feed_if_served<K: Object>(client: Client, cache: Arc<Cache<K>>, config: watcher::Config) {
    follow(client, cache, config, Cache::set_unserved).await;
}

/// As [`feed`], for a built-in kind that is disabled by default. The API server is asked once whether it serves the
/// kind: that is fixed at the start of the server.
pub(crate) async fn feed_if_enabled<K: Object>(
    client: Client,
    cache: Arc<Cache<K>>,
    config: watcher::Config,
) {
    let mut retry = Retry::new();
    loop {
        match client.list_api_group_resources(&K::api_version(&())).await {
            Ok(list) if list.resources.iter().any(|resource| resource.name == K::plural(&())) => break,
            Ok(_) => return std::future::pending().await,
            Err(error) if crate::error::is_not_found(&error) => return std::future::pending().await,
            Err(_) => retry.wait().await,
        }
    }
    feed(client, cache, config).await;
}

async fn follow<K: Object>(
    client: Client,
    cache: Arc<Cache<K>>,
    config: watcher::Config,
    on_unserved: fn(&Cache<K>),
) {
    let api: Api<K> = Api::all(client.clone());
    let mut events = std::pin::pin!(watcher(api, config));
    let mut retry = Retry::new();
    while let Some(event) = events.next().await {
        match event {
            Ok(event) => {
                // `Init` precedes the request.
                if !matches!(event, watcher::Event::Init) {
                    retry.reset();
                }
                for unverified in cache.apply(event) {
                    verify(&client, &cache, unverified).await;
                }
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
                tracing::debug!(kind = %K::kind(&()), %error, cause, "cannot watch a kind");
                let is_unserved = is_unserved(&error);
                if is_unserved {
                    on_unserved(&cache);
                }
                let longest = if is_unserved { MAX_UNSERVED_DELAY } else { MAX_DELAY };
                tokio::time::sleep(retry.next(longest)).await;
            }
        }
    }
}

/// Whether the API server does not serve the kind.
fn is_unserved(error: &watcher::Error) -> bool {
    matches!(error, watcher::Error::InitialListFailed(kube::Error::Api(status)) if status.code == 404)
}

/// Checks with the API server whether an object exists that was missing from a list.
async fn verify<K: Object>(client: &Client, cache: &Cache<K>, unverified: Unverified) {
    let namespace = &unverified.key.namespace;
    let url = K::url_path(&(), (!namespace.is_empty()).then_some(namespace));
    let mut retry = Retry::new();
    loop {
        let request = kube::api::Request::new(url.clone()).get(&unverified.key.name, &Default::default());
        let Ok(request) = request else { return cache.remove_missing(&unverified) };
        match client.request::<K>(request).await {
            Ok(found) if found.uid() == unverified.uid => return,
            Ok(_) => return cache.remove_missing(&unverified),
            Err(error) if crate::error::is_not_found(&error) => return cache.remove_missing(&unverified),
            Err(_) => retry.wait().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_doubles_and_is_longer_for_a_kind_that_is_not_served() {
        let mut retry = Retry::new();
        assert_eq!([retry.next(MAX_DELAY), retry.next(MAX_DELAY)], [FIRST_DELAY, FIRST_DELAY * 2]);
        let last = |retry: &mut Retry, longest| (0..20).map(|_| retry.next(longest)).last();
        assert_eq!(last(&mut retry, MAX_UNSERVED_DELAY), Some(MAX_UNSERVED_DELAY));
        assert_eq!(retry.next(MAX_DELAY), MAX_DELAY, "another failure");
    }

    #[test]
    fn only_a_kind_that_is_not_served_counts_as_unserved() {
        let failed = |code| {
            let status = kube::core::Status { code, ..Default::default() };
            watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status)))
        };
        assert!(is_unserved(&failed(404)));
        assert!(!is_unserved(&failed(403)) && !is_unserved(&failed(503)));
    }
}
