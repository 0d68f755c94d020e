//! A runtime's pod network: the one entry point of this crate for it.

mod asked;
mod collecting;
mod default;
mod derive;
mod reload;
mod resize;

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use ipnetwork::IpNetwork;
use tokio::sync::{RwLock, RwLockReadGuard, watch};
use tokio::task::AbortHandle;
use tracing::warn;

use crate::alone::Alone;
use crate::error::Error;
use crate::firewall::Firewall;
use crate::host::Host;
use crate::invoke::cache::{Cache, Entry};
use crate::invoke::{self, Executables, Invoker, Parameters};
use crate::leaving::Leaving;
use crate::link::inside;
use crate::netns::{self, Netns};
use crate::ports::PortMapping;
use crate::spec::Version;
use crate::spec::list::{Capabilities, List};
use crate::spec::result::Answer;
use collecting::{Collecting, Recording};

/// How long one plugin may take, as runtimes have it by custom.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What the network is called where names are shared with the machine, and where its plugins are.
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// CNI configuration lists (`/etc/cni/net.d`); the default network alone when absent.
    pub conf_dir: Option<PathBuf>,
    /// Plugins that are not our own (`/opt/cni/bin`), looked for in this order.
    pub bin_dirs: Vec<PathBuf>,
    /// Where records and addresses are kept, for example `/run/coracle/cni`.
    pub state_dir: PathBuf,
    /// Where records are kept of what outlasts a boot, as the addresses do that plugins of others gave; for example
    /// `/var/lib/coracle/cni`.
    pub root_dir: PathBuf,
    /// The bridge of the default network, for example `coracle0`.
    pub bridge: String,
    /// The nftables table that is ours alone, for example `coracle`.
    pub table: String,
    /// MTU of bridge and pods of the default network; the kernel's default when absent.
    pub mtu: Option<u32>,
}

/// A sandbox that wants the network.
#[derive(Debug, Clone, Default)]
pub struct Attachment {
    /// The sandbox's id: the key for [`Network::del`].
    pub id: String,
    /// Its network namespace, for example `/proc/42/ns/net`.
    pub netns: PathBuf,
    /// The interface to make inside, `eth0`.
    pub ifname: String,
    /// What plugins are told as `CNI_ARGS`, in order.
    pub args: Vec<(String, String)>,
    /// Host ports that lead to it: the capability `portMappings`.
    pub ports: Vec<PortMapping>,
    /// Other capabilities, by name (the CNI conventions): `bandwidth`, `dns` and so on. `ips` and `mac` are given as they
    /// are asked for, or refused.
    pub capabilities: Capabilities,
}

/// What a sandbox got.
#[derive(Debug, Clone)]
pub struct Attached {
    /// The addresses of its interface with the prefix of the pod network.
    pub addresses: Vec<IpNetwork>,
    /// The ways out, one for each address that has one.
    pub gateways: Vec<IpAddr>,
    /// Hardware address of its interface; empty when its plugins do not tell.
    pub mac: String,
    /// The host's interfaces that its plugins made or used.
    pub host_interfaces: Vec<String>,
}

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
    /// Held for reading by ADD and DEL, for writing by whatever may free what they make (GC). Those of lists with
    /// executables hold it only until they are on record, by which GC knows what to leave alone: nobody waits for a
    /// plugin of others that hangs.
    state: RwLock<State>,
    /// Held while an attachment of a list with executables goes on record, and while they are told which are valid: one
    /// that nobody told them of would lose what it is given.
    collecting: Collecting,
    /// Held from the look whether a hardware address is somebody's until it is on record who has it.
    claiming: tokio::sync::Mutex<()>,
    leaving: Leaving,
    /// The plugins that the network needs as executables, or why there is no network.
    ready: std::sync::RwLock<Result<Vec<String>, String>>,
    /// Told that [`Network::status`] may say something else than before.
    doubts: watch::Sender<()>,
    tasks: std::sync::Mutex<Vec<AbortHandle>>,
    _alone: Alone,
}

#[derive(Default)]
struct State {
    /// The node's own ranges, for the default network.
    cidrs: Vec<IpNetwork>,
    /// Ranges that pods' packets keep their address to.
    unmasqueraded: Vec<IpNetwork>,
    /// MTU of the default network, in place of the configured one, and whether not all have it yet.
    mtu: Option<u32>,
    mtu_is_new: bool,
    list: Option<Arc<List>>,
    /// Whether the list is of the configuration directory.
    configured: bool,
    /// Whether what the configuration directory has cannot be used.
    unusable: bool,
    /// Sandboxes that live and that nothing is on record of; none before it was said which live, when nobody knows what is
    /// to be freed.
    unowned: Option<Vec<Attachment>>,
}

/// What an ADD goes by until it is on record.
struct Today<'n> {
    list: Arc<List>,
    state: RwLockReadGuard<'n, State>,
    recording: Option<Recording<'n>>,
}

impl Drop for Inner {
    fn drop(&mut self) {
        let tasks = self.tasks.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        tasks.iter().for_each(AbortHandle::abort);
    }
}

// === impl Network ===

impl Network {
    /// Opens the network's records and reads the configuration directory, which is watched from then on. The
    /// default network is made by [`set_pod_cidrs`](Self::set_pod_cidrs).
    ///
    /// # Errors
    /// When another network of this network namespace has the same bridge or table, the state directory cannot be made
    /// or a netlink socket cannot be opened. One that is just ending is waited for. A configuration that
    /// cannot be used is no error here: [`ready`](Self::ready) says so until it is repaired.
    pub async fn open(config: NetworkConfig) -> Result<Self, Error> {
        let names =
            [("bridge", &*config.bridge, "--bridge"), ("nftables table", &config.table, "--nft-table")];
        let alone = Alone::take(&names).await?;
        let events = Firewall::listen();
        let events = events.map_err(|source| Error::Socket { action: "listen to nftables", source })?;
        let firewall = Firewall::open(&config.table, &config.state_dir, false)?;
        let cache = Arc::new(Cache::open(&config.state_dir, &config.root_dir)?);
        let host = Arc::new(Host::here(firewall, Some(Arc::clone(&cache)))?);
        let executables = Executables { path: config.bin_dirs.clone(), timeout: TIMEOUT, lead: true };
        // Packets to pods of other nodes keep their source, also before it is known again which they are.
        let state = State { unmasqueraded: default::unmasqueraded(&host.firewall), ..State::default() };
        let keeper = tokio::spawn(Firewall::keep(Arc::downgrade(&host), events)).abort_handle();
        let network = Self {
            inner: Arc::new(Inner {
                cache,
                host,
                executables,
                state: RwLock::new(state),
                collecting: Collecting::default(),
                claiming: tokio::sync::Mutex::default(),
                leaving: Leaving::default(),
                ready: std::sync::RwLock::new(Err(default::NO_RANGE.to_owned())),
                doubts: watch::channel(()).0,
                tasks: std::sync::Mutex::new(vec![keeper]),
                _alone: alone,
                config,
            }),
        };
        network.reload().await;
        network.watch();
        Ok(network)
    }

    /// Whether pods can be attached, without asking plugins. Those of others are looked for each time: they may be
    /// installed after the list that names them, and nobody tells.
    ///
    /// # Errors
    /// The reason why not yet.
    pub fn ready(&self) -> Result<(), String> {
        let ready = self.inner.ready.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        let missing = |kind: &String| self.inner.executables.find(kind).err();
        match ready.as_ref().map_err(String::clone)?.iter().find_map(missing) {
            Some(error) => Err(error.chain()),
            None => Ok(()),
        }
    }

    /// Whether pods can be attached, by the word of every plugin (CNI STATUS).
    ///
    /// # Errors
    /// The reason why not.
    pub async fn status(&self) -> Result<(), String> {
        self.ready()?;
        let list = self.inner.state.read().await.list.clone();
        let Some(list) = list else { return Err(default::NO_RANGE.to_owned()) };
        self.invoker().status(&list).await.map_err(|error| error.chain())
    }

    /// Whether a plugin of the network is somebody else's: what becomes of it is not told unless it is asked for its
    /// [`status`](Self::status).
    pub async fn has_others(&self) -> bool {
        self.inner.state.read().await.list.as_deref().is_some_and(|list| !invoke::is_own(list))
    }

    /// Changes when [`status`](Self::status) may say something else than before, as far as it shows by itself: the
    /// network is another, or a sandbox could not be attached.
    #[must_use]
    pub fn doubts(&self) -> watch::Receiver<()> {
        self.inner.doubts.subscribe()
    }

    /// Gives a sandbox its interface, addresses, routes and what else the network's plugins make (CNI ADD).
    ///
    /// # Errors
    /// When the network is not ready or a plugin refuses; nothing half-made remains.
    pub async fn add(&self, at: &Attachment) -> Result<Attached, Error> {
        self.ready().map_err(|reason| Error::NotReady { reason })?;
        let added = match self.try_add(at).await {
            // What was released may not have been freed yet.
            Err(error) if error.is_taken() && self.inner.leaving.sweep(self).await => self.try_add(at).await,
            added => added,
        };
        // That all is taken says nothing of the network.
        if added.as_ref().is_err_and(|error| !error.is_taken()) {
            self.inner.doubts.send_replace(());
        }
        added
    }

    async fn try_add(&self, at: &Attachment) -> Result<Attached, Error> {
        let inner = &self.inner;
        inner.leaving.forget(&at.id);
        if let Some(earlier) = inner.cache.get(&at.id) {
            self.take_back(&earlier).await?;
        }
        let Today { list, state, recording } = self.today().await?;
        let mut entry = Entry::new(Arc::clone(&list), parameters(at), netns::id(&at.netns));
        let claiming = if asked::claims(&entry.at) { Some(inner.claiming.lock().await) } else { None };
        self.may_ask(&entry.list, &entry.at)?;
        // On record before the first plugin acts: a crash at any later instruction leaves what `del` and
        // `reconcile` work from.
        inner.cache.keep(entry.clone()).await?;
        coracle_fault::point("network.recorded");
        drop(claiming);
        drop(recording);
        let _shared = invoke::is_own(&entry.list).then_some(state);
        let invoker = self.invoker();
        let (loopback, added) = tokio::join!(self.loopback(&entry.at), invoker.add(&entry.list, &entry.at));
        let given = loopback.and(added).and_then(|answer| {
            asked::must_be_given(&entry.list, &entry.at, &answer)?;
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
                if let Err(undo) = self.give_back(&entry).await {
                    warn!(sandbox = %at.id, error = undo.chain(), "cannot undo a half-made attachment");
                }
                Err(error)
            }
        }
    }

    /// The list by which attachments are made, which stays that for as long as its locks are held.
    async fn today(&self) -> Result<Today<'_>, Error> {
        let inner = &self.inner;
        let mut recording = None;
        loop {
            let state = inner.state.read().await;
            // It may have been replaced by one that cannot be used since this began.
            self.ready().map_err(|reason| Error::NotReady { reason })?;
            let no_range = || Error::NotReady { reason: default::NO_RANGE.to_owned() };
            let list = state.list.clone().ok_or_else(no_range)?;
            if invoke::is_own(&list) || recording.is_some() {
                return Ok(Today { list, state, recording });
            }
            // GC may take its time, and needs the state to end. Another list may come meanwhile.
            drop(state);
            recording = Some(inner.collecting.recording().await);
        }
    }

    /// What the plugins answered when a sandbox was given the network, as the newest version of CNI tells it. None of one
    /// that has none.
    pub fn answer(&self, id: &str) -> Option<serde_json::Value> {
        Some(self.inner.cache.get(id)?.result?.to_value(Version::NEWEST))
    }

    /// Asks every plugin whether all is as it was made (CNI CHECK). A sandbox never added is no error.
    ///
    /// # Errors
    /// What is not.
    pub async fn check(&self, id: &str) -> Result<(), Error> {
        let shared = self.inner.state.read().await;
        match self.inner.cache.get(id) {
            Some(Entry { list, at, result: Some(result), .. }) => {
                let _shared = invoke::is_own(&list).then_some(shared);
                self.invoker().check(&list, &at, &result).await
            }
            _ => Ok(()),
        }
    }

    /// Takes all back that [`add`](Self::add) gave (CNI DEL). A sandbox never added is no error, and the
    /// namespace may be gone.
    ///
    /// # Errors
    /// When a plugin refuses; calling again resumes.
    pub async fn del(&self, id: &str) -> Result<(), Error> {
        match self.inner.cache.get(id) {
            Some(entry) => self.take_back(&entry).await,
            None => Ok(()),
        }
    }

    /// Takes all back as [`del`](Self::del) does, but, when all plugins are our own, returns once nothing leads
    /// to the sandbox any more: its host ports are free. Its interface goes with its namespace, which the
    /// kernel takes down in its own time and many at once, or a moment later in any case; its addresses then.
    /// To be called when the namespace ends.
    ///
    /// # Errors
    /// When a record cannot be written, the kernel or a plugin refuses; calling again resumes.
    pub async fn release(&self, id: &str) -> Result<(), Error> {
        let inner = &self.inner;
        let Some(entry) = inner.cache.get(id) else { return Ok(()) };
        if !invoke::is_own(&entry.list) {
            return self.del(id).await;
        }
        // From here on nobody makes its host ports again.
        inner.cache.leave(id);
        inner.host.firewall.retain(|claim| claim.id != id)?;
        coracle_fault::point("network.released");
        inner.leaving.add(id, self);
        Ok(())
    }

    /// Takes all back as [`del`](Self::del) does, in a while, and tries again until it can: for who has nobody to
    /// tell of a failure.
    pub fn del_later(&self, id: &str) {
        self.inner.leaving.refused(id, self);
    }

    /// Takes down what was released.
    pub(crate) async fn sweep(&self) {
        self.inner.leaving.sweep(self).await;
    }

    /// Tries again to take down what was refused; true when nothing is left of it.
    pub(crate) async fn retry(&self) -> bool {
        self.inner.leaving.retry(self).await
    }

    /// The network, for as long as it is somebody else's, too.
    pub(crate) fn weak(&self) -> impl Fn() -> Option<Self> + Send + use<> {
        let weak = Arc::downgrade(&self.inner);
        move || weak.upgrade().map(|inner| Self { inner })
    }

    async fn take_back(&self, entry: &Entry) -> Result<(), Error> {
        let shared = self.inner.state.read().await;
        // From here on GC makes nothing of it again.
        self.inner.cache.leave(&entry.at.container_id);
        let _shared = invoke::is_own(&entry.list).then_some(shared);
        self.give_back(entry).await
    }

    async fn give_back(&self, entry: &Entry) -> Result<(), Error> {
        let mut at = entry.at.clone();
        self.inner.cache.leave(&at.container_id);
        // The path may lead to somebody else's namespace by now.
        at.netns = at.netns.filter(|path| entry.netns_id.is_some() && netns::id(path) == entry.netns_id);
        self.invoker().del(&entry.list, &at, entry.result.as_ref()).await?;
        coracle_fault::point("network.deleted");
        self.inner.cache.remove(&at.container_id)?;
        coracle_fault::point("network.forgotten");
        Ok(())
    }

    /// Every sandbox's loopback is up, whatever its list says.
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
        self.inner.doubts.send_replace(());
    }
}

fn parameters(at: &Attachment) -> Parameters {
    let mut capabilities = at.capabilities.clone();
    if !at.ports.is_empty() {
        capabilities.insert("portMappings".to_owned(), serde_json::json!(at.ports));
    }
    let args: Vec<String> = at.args.iter().map(|(key, value)| format!("{key}={value}")).collect();
    Parameters {
        container_id: at.id.clone(),
        netns: Some(at.netns.clone()),
        ifname: at.ifname.clone(),
        args: args.join(";"),
        capabilities,
    }
}

fn attached(answer: &Answer, ifname: &str) -> Attached {
    let of_host = answer.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
    Attached {
        addresses: answer.addresses_of(ifname).map(|ip| ip.address).collect(),
        gateways: answer.addresses_of(ifname).filter_map(|ip| ip.gateway).collect(),
        mac: answer.inside(ifname).map(|interface| interface.mac.clone()).unwrap_or_default(),
        host_interfaces: of_host.map(|interface| interface.name.clone()).collect(),
    }
}
