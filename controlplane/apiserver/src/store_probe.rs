//! Probes of the store's server, for the checks `etcd` and `etcd-readiness`. Each probe is a read from etcd. Because
//! clients without credentials may call the checks, a check uses the result of the last probe for half of its timeout.
//! Source: `newETCD3Check` of `apiserver/pkg/storage/storagebackend/factory/etcd3.go`.

use std::{sync::Arc, time::Duration};

use coracle_store::Store;
use tokio::{sync::Mutex, time::Instant};

use crate::config::StoreOptions;

/// The observation of the store by health checks and metrics.
pub(crate) struct StoreMonitor {
    /// The probe of the check `etcd`.
    pub(crate) health: StoreProbe,
    /// The probe of the check `etcd-readiness`.
    pub(crate) readiness: StoreProbe,
    /// Whether the metrics have the number of objects of each resource.
    pub(crate) has_object_counts: bool,
}

/// A probe with its timeout and its last result.
pub(crate) struct StoreProbe {
    timeout: Duration,
    last: Arc<Mutex<Option<Probed>>>,
}

/// The result of a probe, and the time of its end.
struct Probed {
    at: Instant,
    result: Result<(), String>,
}

// === impl StoreMonitor ===

impl StoreMonitor {
    pub(crate) fn new(options: StoreOptions) -> Self {
        Self {
            health: StoreProbe::new(options.health_timeout),
            readiness: StoreProbe::new(options.ready_timeout),
            has_object_counts: options.has_object_counts,
        }
    }
}

// === impl StoreProbe ===

impl StoreProbe {
    fn new(timeout: Duration) -> Self {
        Self { timeout, last: Arc::default() }
    }

    /// Whether the store's server responds. Parallel checks wait for one probe, and share its result. The probe
    /// continues if the client of its check disconnects. Otherwise a client could start any number of probes.
    pub(crate) async fn check(&self, store: &Arc<dyn Store>) -> Result<(), String> {
        let mut last = self.last.clone().lock_owned().await;
        if let Some(probed) = last.as_ref().filter(|probed| probed.at.elapsed() < self.timeout / 2) {
            return probed.result.clone();
        }
        let (store, timeout) = (store.clone(), self.timeout);
        let probe = tokio::spawn(async move {
            let result = store.probe(timeout).await.map_err(|error| error.to_string());
            *last = Some(Probed { at: Instant::now(), result: result.clone() });
            result
        });
        probe.await.unwrap_or_else(|error| Err(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use coracle_store::{Backup, Entry, Error, Health, Page, Range, Watch, Write};
    use futures::future::BoxFuture;

    use super::*;

    type Stored<'a, T> = BoxFuture<'a, Result<T, Error>>;

    /// A store that counts probes, and does not respond within the timeout of a probe.
    #[derive(Default)]
    struct Hanging(AtomicUsize);

    fn closed<'a, T: Send + 'a>() -> Stored<'a, T> {
        Box::pin(std::future::ready(Err(Error::Closed)))
    }

    impl Store for Hanging {
        fn get<'a>(&'a self, _: &'a str) -> Stored<'a, Option<Entry>> {
            closed()
        }

        fn list(&self, _: Range) -> Stored<'_, Page> {
            closed()
        }

        fn write(&self, _: Write) -> Stored<'_, u64> {
            closed()
        }

        fn watch<'a>(&'a self, _: &'a str, _: u64) -> Stored<'a, Watch> {
            closed()
        }

        fn compact(&self, _: u64) -> Stored<'_, ()> {
            closed()
        }

        fn revision(&self) -> Stored<'_, u64> {
            closed()
        }

        fn health(&self) -> Health {
            Health::Good
        }

        fn is_shared(&self) -> bool {
            true
        }

        fn is_current<'a>(&'a self, _: &'a str) -> Stored<'a, bool> {
            closed()
        }

        fn backup(&self) -> Result<Backup, Error> {
            Err(Error::Closed)
        }

        fn probe(&self, timeout: Duration) -> Stored<'_, ()> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Box::pin(async move {
                tokio::time::sleep(timeout).await;
                Err(Error::Closed)
            })
        }
    }

    #[tokio::test(start_paused = true)]
    async fn parallel_and_later_checks_share_a_probe_for_half_of_its_timeout() {
        let (hanging, probe) = (Arc::new(Hanging::default()), StoreProbe::new(Duration::from_secs(2)));
        let store: Arc<dyn Store> = hanging.clone();
        let probes = || hanging.0.load(Ordering::Relaxed);
        let all = futures::future::join_all((0..9).map(|_| probe.check(&store))).await;
        assert!(all.iter().all(Result::is_err));
        assert_eq!(probes(), 1);
        tokio::time::advance(Duration::from_millis(900)).await;
        probe.check(&store).await.unwrap_err();
        assert_eq!(probes(), 1);
        tokio::time::advance(Duration::from_millis(200)).await;
        probe.check(&store).await.unwrap_err();
        assert_eq!(probes(), 2);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_disconnects_does_not_end_the_probe() {
        let (hanging, probe) = (Arc::new(Hanging::default()), StoreProbe::new(Duration::from_secs(2)));
        let store: Arc<dyn Store> = hanging.clone();
        for _ in 0..3 {
            let check = tokio::time::timeout(Duration::from_millis(1), probe.check(&store));
            assert!(check.await.is_err(), "the probe ended early");
        }
        probe.check(&store).await.unwrap_err();
        assert_eq!(hanging.0.load(Ordering::Relaxed), 1);
    }
}
