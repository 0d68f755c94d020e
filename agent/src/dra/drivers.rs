//! The table of registered drivers, and the drivers whose ResourceSlices must be deleted.
//!
//! A driver that is gone is given 30 seconds to come back. Then its slices on this node are deleted, so that no pod is
//! scheduled to its devices. A starting agent deletes the slices of all drivers: the drivers publish their slices again
//! after they have registered.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_backoff::Backoff;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::driver::Caller;

/// Time in which a driver must come back, as in the kubelet (`defaultWipingDelay`).
const WIPE_DELAY: Duration = Duration::from_secs(30);
/// First back-off after a failed deletion. It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(300);

/// The registered drivers.
#[derive(Debug)]
pub(super) struct Drivers {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// By the driver's name, in the order of their registration. During an upgrade a driver has two plugins.
    plugins: BTreeMap<String, Vec<Plugin>>,
    /// Drivers whose slices must be deleted.
    wipes: BTreeMap<Scope, Due>,
    /// Number of the last registration.
    last: u64,
}

#[derive(Debug)]
struct Plugin {
    number: u64,
    endpoint: PathBuf,
    caller: Caller,
}

/// Slices to delete.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Scope {
    /// Slices of all drivers of this node.
    All,
    /// Slices of one driver of this node.
    Driver(String),
}

#[derive(Clone, Copy, Debug)]
struct Due {
    at: Instant,
    backoff: Backoff,
}

/// A deletion that is due now.
#[derive(Clone, Debug)]
pub(super) struct Wipe {
    pub(super) scope: Scope,
    backoff: Backoff,
}

/// Registers a driver until it is dropped.
#[derive(Debug)]
pub(super) struct Registered {
    drivers: Arc<Drivers>,
    name: String,
    number: u64,
}

// === impl Drivers ===

impl Drivers {
    /// An empty table of a starting agent.
    pub(super) fn new() -> Arc<Self> {
        let due = Due::new(Instant::now());
        let state = State { wipes: BTreeMap::from([(Scope::All, due)]), ..State::default() };
        Arc::new(Self { state: Mutex::new(state), changed: Notify::new() })
    }

    /// The plugin of a driver that registered last.
    pub(super) fn get(&self, driver: &str) -> Option<Caller> {
        self.state().plugins.get(driver)?.last().map(|plugin| plugin.caller.clone())
    }

    /// Registers a connected plugin. None if another plugin of the driver has the endpoint.
    pub(super) fn add(self: &Arc<Self>, name: &str, endpoint: &Path, caller: Caller) -> Option<Registered> {
        let mut state = self.state();
        let number = state.last + 1;
        let plugins = state.plugins.entry(name.to_owned()).or_default();
        if plugins.iter().any(|plugin| plugin.endpoint == endpoint) {
            return None;
        }
        plugins.push(Plugin { number, endpoint: endpoint.to_owned(), caller });
        state.last = number;
        state.wipes.remove(&Scope::Driver(name.to_owned()));
        Some(Registered { drivers: Arc::clone(self), name: name.to_owned(), number })
    }

    fn remove(&self, name: &str, number: u64) {
        let mut state = self.state();
        let Some(plugins) = state.plugins.get_mut(name) else { return };
        plugins.retain(|plugin| plugin.number != number);
        if plugins.is_empty() {
            state.plugins.remove(name);
            let due = Due::new(Instant::now() + WIPE_DELAY);
            state.wipes.insert(Scope::Driver(name.to_owned()), due);
            drop(state);
            self.changed.notify_one();
        }
    }

    /// Waits for the next deletion that is due.
    pub(super) async fn next_wipe(&self) -> Wipe {
        loop {
            let next = self
                .state()
                .wipes
                .iter()
                .min_by_key(|(_, due)| due.at)
                .map(|(scope, due)| (scope.clone(), *due));
            let Some((scope, due)) = next else {
                self.changed.notified().await;
                continue;
            };
            // Cancel-safe: a notification is kept until it is awaited.
            tokio::select! {
                () = tokio::time::sleep_until(due.at) => {
                    // The driver may have come back in the meantime.
                    let mut state = self.state();
                    if state.wipes.get(&scope).is_some_and(|now| now.at == due.at) {
                        state.wipes.remove(&scope);
                        return Wipe { scope, backoff: due.backoff };
                    }
                }
                () = self.changed.notified() => {}
            }
        }
    }

    /// Repeats a deletion that failed, unless the driver has come back.
    pub(super) fn repeat(&self, mut wipe: Wipe) {
        let mut state = self.state();
        let is_back = matches!(&wipe.scope, Scope::Driver(name) if state.plugins.contains_key(name));
        if !is_back {
            let at = Instant::now() + wipe.backoff.next_delay();
            let due = Due { at, backoff: wipe.backoff };
            state.wipes.entry(wipe.scope).or_insert(due);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Due ===

impl Due {
    /// The first attempt of a deletion.
    fn new(at: Instant) -> Self {
        Self { at, backoff: Backoff::new(FIRST_BACKOFF, MAX_BACKOFF) }
    }
}

// === impl Registered ===

impl Registered {
    /// The driver's name.
    pub(super) fn driver(&self) -> &str {
        &self.name
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.drivers.remove(&self.name, self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::super::driver::{Link, Version};
    use super::*;

    /// A connection whose peer does not answer.
    async fn link() -> (Link, tokio::net::UnixListener, tempfile::TempDir) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = tokio::net::UnixListener::bind(&path).unwrap();
        let socket = rustix::fs::open(&path, rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).unwrap();
        (Link::open(&socket).await.unwrap(), listener, dir)
    }

    #[tokio::test]
    async fn the_last_plugin_of_a_driver_is_used_and_an_endpoint_has_one() {
        let (link, _listener, _dir) = link().await;
        let drivers = Drivers::new();
        let add = |endpoint: &str| drivers.add("d", Path::new(endpoint), link.caller(Version::V1));
        let first = add("/a").unwrap();
        assert!(add("/a").is_none(), "the endpoint of another plugin");
        let second = add("/b").unwrap();
        drop(first);
        assert!(drivers.get("d").is_some() && drivers.get("other").is_none());
        drop(second);
        assert!(drivers.get("d").is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn slices_are_deleted_at_the_start_and_when_a_driver_does_not_come_back() {
        let (link, _listener, _dir) = link().await;
        let drivers = Drivers::new();
        let add = || drivers.add("d", Path::new("/a"), link.caller(Version::V1)).unwrap();
        let began = Instant::now();
        let first = drivers.next_wipe().await;
        assert_eq!((first.scope.clone(), began.elapsed()), (Scope::All, Duration::ZERO));
        drivers.repeat(first);
        assert_eq!(drivers.next_wipe().await.scope, Scope::All);
        assert_eq!(began.elapsed(), FIRST_BACKOFF, "a failed deletion is repeated");
        drop(add());
        let back = add();
        let none = tokio::time::timeout(WIPE_DELAY * 2, drivers.next_wipe()).await;
        assert!(none.is_err(), "the driver came back: {none:?}");
        let gone = Instant::now();
        drop(back);
        let wipe = drivers.next_wipe().await;
        assert_eq!((wipe.scope.clone(), gone.elapsed()), (Scope::Driver("d".to_owned()), WIPE_DELAY));
        let _back = add();
        drivers.repeat(wipe);
        assert!(tokio::time::timeout(WIPE_DELAY * 2, drivers.next_wipe()).await.is_err());
    }
}
