//! The pod network of a runtime: the entry point of this crate.

mod attachment;
mod config;
mod default;
mod derive;
mod gc_lock;
mod namespace_process;
mod release;
mod reload;
mod requested;
mod resize;

use std::sync::Arc;
use std::time::Duration;

use coracle_nft::Monitor;
use ipnetwork::IpNetwork;
use tokio::sync::{RwLock, RwLockReadGuard, watch};
use tokio::task::AbortHandle;
use tracing::warn;

use crate::attachment_cache::{Cache, Entry};
use crate::connection_limit::ConnectionLimit;
use crate::error::Error;
use crate::firewall::Firewall;
use crate::firewall_repair;
use crate::host::Host;
use crate::invoke::{Invoker, Parameters};
use crate::link::inside;
use crate::name_lock::{NameLocks, SharedName};
use crate::netns::{self, Netns};
use crate::plugin_executables::Executables;
use crate::source_guard::SourceGuard;
use crate::spec::Version;
use crate::spec::list::List;
pub use attachment::{Attached, Attachment};
use attachment::{attached, parameters};
pub use config::NetworkConfig;
use gc_lock::{GcLock, RecordGuard};
pub use namespace_process::NamespaceProcess;
use release::ReleaseQueue;

/// Timeout of one plugin. Runtimes use this value by convention.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The node's pod network. Clones share one state.
#[derive(Clone)]
pub struct Network {
    inner: Arc<Inner>,
}

struct Inner {
    config: NetworkConfig,
    host: Arc<Host>,
    executables: Executables,
    cache: Arc<Cache>,
    /// ADD and DEL hold this lock for reading, GC for writing: GC may free resources of an ADD or DEL in progress. With
    /// executables, ADD and DEL hold the lock only until the attachment is recorded, so that a plugin that hangs blocks
    /// no other call.
    state: RwLock<State>,
    /// Held while an attachment of a list with executables is recorded, and while GC runs executables. An attachment
    /// that is missing in the list of GC would lose its resources.
    gc_lock: GcLock,
    /// Held from the check of a requested hardware address until its owner is recorded.
    claiming: tokio::sync::Mutex<()>,
    releases: ReleaseQueue,
    /// Types of the executables that the network needs, or the reason why there is no network.
    ready: std::sync::RwLock<Result<Vec<String>, String>>,
    /// Notified when the result of [`Network::status`] may have changed.
    status_changes: watch::Sender<()>,
    tasks: std::sync::Mutex<Vec<AbortHandle>>,
    /// Locks of the names of bridge and table. Held as long as the network exists.
    _names: NameLocks,
}

#[derive(Default)]
struct State {
    /// Ranges of the node, for the default network.
    cidrs: Vec<IpNetwork>,
    /// Destination ranges without masquerading.
    unmasqueraded: Vec<IpNetwork>,
    /// MTU of the default network. Overrides the configured MTU.
    mtu: Option<u32>,
    /// Whether some pods may not have this MTU yet.
    mtu_is_new: bool,
    list: Option<Arc<List>>,
    /// Whether the list comes from the configuration directory.
    configured: bool,
    /// Whether the configuration directory has an unusable list.
    unusable: bool,
    /// Running sandboxes without a record. `None` until the first reconcile. Until then, the addresses that may be
    /// freed are unknown.
    unrecorded: Option<Vec<Attachment>>,
}

/// List and locks of an ADD until its attachment is recorded.
struct CurrentList<'n> {
    list: Arc<List>,
    state: RwLockReadGuard<'n, State>,
    recording: Option<RecordGuard<'n>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let tasks = self.tasks.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        tasks.iter().for_each(AbortHandle::abort);
    }
}

// === impl Network ===

impl Network {
    /// Opens the network's records and reads the configuration directory, which is watched from then on.
    /// [`set_pod_cidrs`](Self::set_pod_cidrs) makes the default network.
    ///
    /// # Errors
    /// When another network of this network namespace has the same bridge or table. Also when the state directory or a
    /// netlink socket cannot be opened. The call waits for a network that is about to end. An unusable configuration is
    /// not an error: [`ready`](Self::ready) reports it until it is repaired.
    pub async fn open(config: NetworkConfig) -> Result<Self, Error> {
        let names = [
            SharedName { kind: "bridge", name: &config.bridge, setting: "--bridge" },
            SharedName { kind: "nftables table", name: &config.table, setting: "--nft-table" },
        ];
        let names = NameLocks::take(&names).await?;
        let events = Monitor::open();
        let events = events.map_err(|source| Error::Socket { action: "listen to nftables", source })?;
        let firewall = Firewall::open(&config.table, &config.state_dir, false)?.serving(&config.served);
        let cache = Arc::new(Cache::open(&config.state_dir, &config.root_dir)?);
        let guard = config.check_sources.then(|| SourceGuard::new(&config.table));
        let host = Host::in_own_namespace(firewall, guard, Some(Arc::clone(&cache)))?;
        let host = Arc::new(host.limiting(ConnectionLimit::beside(&config.table)));
        let executables = Executables { path: config.bin_dirs.clone(), timeout: TIMEOUT, leads_group: true };
        // Packets to pods of other nodes are not masqueraded, even before this process knows the other nodes.
        let state = State { unmasqueraded: default::unmasqueraded(&host.firewall), ..State::default() };
        let keeper = tokio::spawn(firewall_repair::keep(Arc::downgrade(&host), events)).abort_handle();
        let network = Self {
            inner: Arc::new(Inner {
                cache,
                host,
                executables,
                state: RwLock::new(state),
                gc_lock: GcLock::default(),
                claiming: tokio::sync::Mutex::default(),
                releases: ReleaseQueue::default(),
                ready: std::sync::RwLock::new(Err(default::NO_RANGE.to_owned())),
                status_changes: watch::channel(()).0,
                tasks: std::sync::Mutex::new(vec![keeper]),
                _names: names,
                config,
            }),
        };
        network.reload().await;
        network.watch();
        Ok(network)
    }

    /// Limits the connections of each pod of the default network. 0 means no limit, which is also the default. `None`
    /// means a quarter of the connections that the kernel tracks. Must be called before
    /// [`set_pod_cidrs`](Self::set_pod_cidrs).
    pub fn set_max_connections(&self, max: Option<u32>) {
        if let Some(connections) = &self.inner.host.connections {
            connections.set(max);
        }
    }

    /// The number of packets that the limit on the connections of pods has dropped since its rules were made. `None`
    /// without a limit. Blocks for the time of a call of the kernel.
    #[must_use]
    pub fn dropped_by_connection_limit(&self) -> Option<u64> {
        self.inner.host.connections.as_ref()?.dropped()
    }

    /// Whether pods can be attached, without running plugins. Executables are looked up each time: they may be
    /// installed after the list that names them, and there is no notification.
    ///
    /// # Errors
    /// The reason why pods cannot be attached.
    pub fn ready(&self) -> Result<(), String> {
        let ready = self.inner.ready.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let missing = |kind: &String| self.inner.executables.find(kind).err();
        match ready.as_ref().map_err(String::clone)?.iter().find_map(missing) {
            Some(error) => Err(error.chain()),
            None => Ok(()),
        }
    }

    /// Whether pods can be attached, by the STATUS command of each plugin.
    ///
    /// # Errors
    /// The reason why pods cannot be attached.
    pub async fn status(&self) -> Result<(), String> {
        self.ready()?;
        let list = self.inner.state.read().await.list.clone();
        let Some(list) = list else { return Err(default::NO_RANGE.to_owned()) };
        self.invoker().status(&list).await.map_err(|error| error.chain())
    }

    /// Whether a plugin of the network is an executable: changes of its state are only visible by
    /// [`status`](Self::status).
    pub async fn has_executable_plugins(&self) -> bool {
        self.inner.state.read().await.list.as_deref().is_some_and(|list| !list.is_in_process())
    }

    /// Notifies when the result of [`status`](Self::status) may have changed: after a change of the configuration, or
    /// a failed ADD.
    #[must_use]
    pub fn status_changes(&self) -> watch::Receiver<()> {
        self.inner.status_changes.subscribe()
    }

    /// Attaches a sandbox: interface, addresses, routes and all other objects of the network's plugins (CNI ADD).
    ///
    /// # Errors
    /// When the network is not ready or a plugin fails. A failed ADD is undone.
    pub async fn add(&self, at: &Attachment) -> Result<Attached, Error> {
        self.ready().map_err(|reason| Error::NotReady { reason })?;
        let added = match self.try_add(at).await {
            // Resources of released sandboxes are possibly not freed yet.
            Err(error) if error.is_taken() && self.remove_released().await => self.try_add(at).await,
            added => added,
        };
        // A full range does not change the status of the network.
        if added.as_ref().is_err_and(|error| !error.is_taken()) {
            self.inner.status_changes.send_replace(());
        }
        added
    }

    async fn try_add(&self, at: &Attachment) -> Result<Attached, Error> {
        let inner = &self.inner;
        inner.releases.cancel(&at.id);
        if let Some(earlier) = inner.cache.get(&at.id) {
            self.release_attachment(&earlier).await?;
        }
        let CurrentList { list, state, recording } = self.current_list().await?;
        let mut entry = Entry::new(Arc::clone(&list), parameters(at), netns::id(&at.netns));
        let claiming =
            if requested::needs_unique_mac(&entry.at) { Some(inner.claiming.lock().await) } else { None };
        self.check_capabilities(&entry.list, &entry.at)?;
        // The attachment is recorded before the first plugin runs. After a crash, `del` and `reconcile` read the
        // record.
        inner.cache.keep(entry.clone()).await?;
        coracle_fault::point("network.recorded");
        drop(claiming);
        drop(recording);
        let _shared = entry.list.is_in_process().then_some(state);
        let invoker = self.invoker();
        let (loopback, added) = tokio::join!(self.loopback(&entry.at), invoker.add(&entry.list, &entry.at));
        let given = loopback.and(added).and_then(|answer| {
            requested::check_assigned(&entry.list, &entry.at, &answer)?;
            Ok(answer)
        });
        match given {
            Ok(answer) => {
                coracle_fault::point("network.added");
                let attached = attached(&answer, &at.ifname);
                entry.result = Some(answer);
                inner.cache.keep(entry).await?;
                coracle_fault::point("network.answer-recorded");
                Ok(attached)
            }
            Err(error) => {
                if let Err(undo) = self.delete_attachment(&entry).await {
                    warn!(sandbox = %at.id, error = undo.chain(), "cannot undo a failed attachment");
                }
                Err(error)
            }
        }
    }

    /// The current list, which stays current as long as the returned locks are held.
    async fn current_list(&self) -> Result<CurrentList<'_>, Error> {
        let inner = &self.inner;
        let mut recording = None;
        loop {
            let state = inner.state.read().await;
            // The network may have got an unusable configuration since the first check.
            self.ready().map_err(|reason| Error::NotReady { reason })?;
            let no_range = || Error::NotReady { reason: default::NO_RANGE.to_owned() };
            let list = state.list.clone().ok_or_else(no_range)?;
            if list.is_in_process() || recording.is_some() {
                return Ok(CurrentList { list, state, recording });
            }
            // GC may take long, and it needs the lock of the state before it can end. The list may change in the
            // meantime.
            drop(state);
            recording = Some(inner.gc_lock.record().await);
        }
    }

    /// The result of the sandbox's ADD in the newest version of CNI. `None` without a result.
    pub fn answer(&self, id: &str) -> Option<serde_json::Value> {
        Some(self.inner.cache.get(id)?.result?.to_value(Version::NEWEST))
    }

    /// Runs CHECK of each plugin. A sandbox that was never added is not an error.
    ///
    /// # Errors
    /// The first difference from the result of ADD, or the first failure of a plugin.
    pub async fn check(&self, id: &str) -> Result<(), Error> {
        let shared = self.inner.state.read().await;
        match self.inner.cache.get(id) {
            Some(Entry { list, at, result: Some(result), .. }) => {
                let _shared = list.is_in_process().then_some(shared);
                self.invoker().check(&list, &at, &result).await
            }
            _ => Ok(()),
        }
    }

    /// Removes all objects that [`add`](Self::add) made (CNI DEL). A sandbox that was never added is not an error, and
    /// its namespace may be gone.
    ///
    /// # Errors
    /// When a plugin fails, or the record cannot be removed. The call can be repeated.
    pub async fn del(&self, id: &str) -> Result<(), Error> {
        match self.inner.cache.get(id) {
            Some(entry) => self.release_attachment(&entry).await,
            None => Ok(()),
        }
    }

    /// Removes the sandbox's network like [`del`](Self::del). If all plugins are our own, it returns when the host
    /// ports are free. The kernel removes the interface with the namespace. A sweep a moment later removes interfaces
    /// that still exist, and frees the addresses. Must be called when the namespace ends.
    ///
    /// # Errors
    /// When a record cannot be written, or the kernel or a plugin fails. The call can be repeated.
    pub async fn release(&self, id: &str) -> Result<(), Error> {
        let inner = &self.inner;
        let Some(entry) = inner.cache.get(id) else { return Ok(()) };
        if !entry.list.is_in_process() {
            return self.del(id).await;
        }
        // From here on, GC does not restore the host ports of the sandbox.
        inner.cache.mark_releasing(id);
        inner.host.firewall.remove_sandbox(id)?;
        coracle_fault::point("network.released");
        self.schedule_removal(id);
        Ok(())
    }

    /// Removes the sandbox's network later and retries until that succeeds, for callers that cannot report a failure.
    pub fn del_later(&self, id: &str) {
        self.retry_later(id);
    }

    /// A weak reference to the network.
    fn weak(&self) -> impl Fn() -> Option<Self> + Send + use<> {
        let weak = Arc::downgrade(&self.inner);
        move || weak.upgrade().map(|inner| Self { inner })
    }

    async fn release_attachment(&self, entry: &Entry) -> Result<(), Error> {
        let shared = self.inner.state.read().await;
        // From here on, GC restores no resource of the sandbox.
        self.inner.cache.mark_releasing(&entry.at.container_id);
        let _shared = entry.list.is_in_process().then_some(shared);
        self.delete_attachment(entry).await
    }

    async fn delete_attachment(&self, entry: &Entry) -> Result<(), Error> {
        let mut at = entry.at.clone();
        self.inner.cache.mark_releasing(&at.container_id);
        // The path may lead to another namespace by now.
        at.netns = at.netns.filter(|path| entry.netns_id.is_some() && netns::id(path) == entry.netns_id);
        self.invoker().del(&entry.list, &at, entry.result.as_ref()).await?;
        coracle_fault::point("network.deleted");
        self.inner.cache.remove(&at.container_id)?;
        coracle_fault::point("network.forgotten");
        Ok(())
    }

    /// Sets the sandbox's loopback interface up. Configuration lists need no loopback plugin.
    async fn loopback(&self, at: &Parameters) -> Result<(), Error> {
        match &at.netns {
            Some(path) => inside::loopback_up(&Netns::open(path)?).await,
            None => Ok(()),
        }
    }

    fn invoker(&self) -> Invoker<'_> {
        Invoker { host: &self.inner.host, executables: &self.inner.executables }
    }

    fn set_ready(&self, ready: Result<Vec<String>, String>) {
        *self.inner.ready.write().unwrap_or_else(std::sync::PoisonError::into_inner) = ready;
        self.inner.status_changes.send_replace(());
    }
}
