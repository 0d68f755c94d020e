//! The hooks: what the runtime tells plugins, when, and what their answers mean for its call. Which
//! errors fail the call and which are only told in the log is the caller's to decide, as in containerd.

mod chain;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use coracle_proto::nri::{
    Container, ContainerAdjustment, ContainerEviction, ContainerState, ContainerUpdate, Empty, Event,
    LinuxResources, PodSandbox,
};
use futures::future::join_all;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::chain::Chain;
use crate::launch::launch_all;
use crate::plugin::{Candidate, JoinError, Plugin, update_all};
use crate::settings::Settings;
use crate::states::Told;
use crate::{Error, Host, listen};

/// What there is when a plugin joins.
#[derive(Debug, Clone, Default)]
pub struct Known {
    /// Every pod, and whether it runs.
    pub pods: Vec<(PodSandbox, Runs)>,
    /// Every container. Plugins are not told of those that ended.
    pub containers: Vec<Container>,
}

/// Whether a pod runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Runs {
    /// It does.
    Yes,
    /// It was stopped.
    No,
}

/// Held while a pod or container comes into being or changes its state: no plugin joins meanwhile, so
/// each learns of it either by the event or by its synchronization.
pub type Pass<'a> = RwLockReadGuard<'a, ()>;

/// A container and its pod, as plugins see them.
pub type About = (PodSandbox, Container);

/// The plugins. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Nri {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
pub(crate) struct Inner {
    settings: Settings,
    host: OnceLock<HostRef>,
    /// The events that any plugin wants.
    wanted: AtomicU32,
    gate: RwLock<()>,
    chain: Mutex<Chain>,
    end: CancellationToken,
}

struct HostRef(Weak<dyn Host>);

// === impl HostRef ===

impl std::fmt::Debug for HostRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("HostRef")
    }
}

// === impl Nri ===

impl Nri {
    /// Without plugins until [`Nri::start`].
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let mut inner = Inner::default();
        inner.settings = settings;
        Self { inner: Arc::new(inner) }
    }

    /// Starts the pre-installed plugins, waits until they have joined or failed to, and listens for
    /// others.
    ///
    /// # Errors
    /// When the socket cannot be made.
    pub async fn start(&self, host: Weak<dyn Host>) -> io::Result<()> {
        let inner = &self.inner;
        if inner.host.set(HostRef(host)).is_err() {
            return Ok(());
        }
        join_all(launch_all(&inner.settings).into_iter().map(|candidate| self.take(candidate))).await;
        if let Some(path) = &inner.settings.socket {
            let listener = listen::bind(path).await?;
            // The listening task must not keep the plugins alive.
            tokio::spawn(listen::serve(Arc::downgrade(inner), listener, inner.end.clone()));
        }
        Ok(())
    }

    /// Tells all plugins that the runtime ends, and disconnects them.
    pub async fn close(&self) {
        self.inner.end.cancel();
        let plugins = self.inner.chain.lock().await.take();
        self.inner.wanted.store(0, Ordering::Release);
        join_all(plugins.iter().map(|plugin| async {
            // One that does not listen any more is disconnected all the same.
            let _told = plugin.call::<Empty>("Shutdown", &Empty {}).await;
            plugin.connection.close();
        }))
        .await;
        if let Some(path) = &self.inner.settings.socket {
            // Nobody listens at it any more.
            let _absent = std::fs::remove_file(path);
        }
    }

    /// The socket where plugins connect, if they may.
    #[must_use]
    pub fn socket(&self) -> Option<&PathBuf> {
        self.inner.settings.socket.as_ref()
    }

    /// Keeps plugins from joining for as long as it is held.
    pub async fn pass(&self) -> Pass<'_> {
        self.inner.gate.read().await
    }

    /// Whether there is any plugin. What may have changed by the time that one looks.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.inner.wanted.load(Ordering::Acquire) != 0
    }

    /// For the listening task, which keeps no plugin alive.
    pub(crate) fn of(inner: &Weak<Inner>) -> Option<Self> {
        inner.upgrade().map(|inner| Self { inner })
    }

    /// Makes a plugin of a candidate, or says in the log why not.
    pub(crate) async fn take<S>(&self, candidate: Candidate<S>)
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        if let Err(error) = self.join(candidate).await {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            warn!(%error, cause, "an NRI plugin could not join");
        }
    }

    async fn join<S>(&self, candidate: Candidate<S>) -> Result<(), JoinError>
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        let inner = &self.inner;
        let Some(HostRef(host)) = inner.host.get() else { return Err(JoinError::Gone) };
        let plugin = Plugin::join(candidate, &inner.settings, Weak::clone(host)).await?;
        let Some(host) = host.upgrade() else { return Err(JoinError::Gone) };
        let updates = {
            let _alone = inner.gate.write().await;
            let mut chain = inner.chain.lock().await;
            let known = known(&host).await;
            let (plugin, updates) = chain.join(plugin, known).await?;
            inner.wanted.store(chain.wanted(), Ordering::Release);
            self.watch(plugin);
            updates
        };
        update_all(&host, updates).await;
        Ok(())
    }

    /// Takes a plugin off the list when its connection ends.
    fn watch(&self, plugin: Arc<Plugin>) {
        let (inner, end) = (Arc::downgrade(&self.inner), self.inner.end.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = plugin.connection.closed() => {}
                () = end.cancelled() => return,
            }
            info!(plugin = plugin.identity.full(), "an NRI plugin is gone");
            drop(plugin);
            if let Some(inner) = inner.upgrade() {
                let mut chain = inner.chain.lock().await;
                chain.prune();
                inner.wanted.store(chain.wanted(), Ordering::Release);
            }
        });
    }

    /// The plugins, when there are any.
    async fn chain(&self) -> Option<MutexGuard<'_, Chain>> {
        if !self.is_active() {
            return None;
        }
        let mut chain = self.inner.chain.lock().await;
        chain.prune();
        (chain.wanted() != 0).then_some(chain)
    }

    /// Updates and stops other containers, as plugins asked. A failure is the plugins' problem, not
    /// that of the call which they answered.
    async fn carry_out(&self, updates: Vec<ContainerUpdate>, evictions: Vec<ContainerEviction>) {
        let Some(host) = self.inner.host.get().and_then(|HostRef(host)| host.upgrade()) else { return };
        for eviction in evictions {
            let (id, why) = (eviction.container_id.clone(), eviction.reason.clone());
            info!(container = id, why, "an NRI plugin evicts a container");
            if let Err(error) = Arc::clone(&host).evict(eviction).await {
                warn!(container = id, error, "could not evict a container for an NRI plugin");
            }
        }
        update_all(&host, updates).await;
    }
}

/// Reads the descriptions where it may take its time.
async fn known(host: &Arc<dyn Host>) -> Known {
    let host = Arc::clone(host);
    tokio::task::spawn_blocking(move || host.known()).await.unwrap_or_default()
}

// === pods ===

impl Nri {
    /// A pod is complete and about to be shown. After an error it must be taken back.
    ///
    /// # Errors
    /// When a plugin refuses it.
    pub async fn run_pod(&self, id: &str, pod: impl FnOnce() -> PodSandbox) -> Result<(), Error> {
        let Some(mut chain) = self.chain().await else { return Ok(()) };
        chain.states.set(id, Told::Alive);
        if !chain.wants_any(&[Event::RunPodSandbox, Event::StopPodSandbox, Event::RemovePodSandbox]) {
            return Ok(());
        }
        let pod = pod();
        let result = chain.tell(Event::RunPodSandbox, &pod, None).await;
        if result.is_err() {
            chain.states.remove(id);
            for event in [Event::StopPodSandbox, Event::RemovePodSandbox] {
                log(event, chain.tell(event, &pod, None).await);
            }
        }
        result
    }

    /// The limits of a pod are about to change.
    ///
    /// # Errors
    /// When a plugin refuses it.
    pub async fn update_pod(
        &self,
        pod: impl FnOnce() -> PodSandbox,
        overhead: Option<LinuxResources>,
        resources: Option<LinuxResources>,
    ) -> Result<(), Error> {
        match self.chain().await {
            Some(chain) if chain.wants_any(&[Event::UpdatePodSandbox]) => {
                chain.update_pod(pod(), overhead, resources).await
            }
            _ => Ok(()),
        }
    }

    /// They have changed.
    pub async fn post_update_pod(&self, pod: impl FnOnce() -> PodSandbox) {
        self.tell_pod(Event::PostUpdatePodSandbox, pod).await;
    }

    /// A pod's containers are stopped; its network is still there.
    pub async fn stop_pod(&self, id: &str, pod: impl FnOnce() -> PodSandbox) {
        let Some(mut chain) = self.chain().await else { return };
        if chain.states.stop(id) && chain.wants_any(&[Event::StopPodSandbox]) {
            log(Event::StopPodSandbox, chain.tell(Event::StopPodSandbox, &pod(), None).await);
        }
    }

    /// A pod is gone.
    pub async fn remove_pod(&self, id: &str, pod: impl FnOnce() -> PodSandbox) {
        let Some(mut chain) = self.chain().await else { return };
        if chain.states.remove(id) && chain.wants_any(&[Event::RemovePodSandbox]) {
            log(Event::RemovePodSandbox, chain.tell(Event::RemovePodSandbox, &pod(), None).await);
        }
    }

    async fn tell_pod(&self, event: Event, pod: impl FnOnce() -> PodSandbox) {
        if let Some(chain) = self.chain().await
            && chain.wants_any(&[event])
        {
            log(event, chain.tell(event, &pod(), None).await);
        }
    }
}

// === containers ===

impl Nri {
    /// A container is about to be made: what plugins want changed. After an error, or when it could
    /// not be made, [`Nri::undo_create`] must follow.
    ///
    /// # Errors
    /// When a plugin refuses it, or plugins contradict each other.
    pub async fn create_container(
        &self,
        id: &str,
        about: impl FnOnce() -> About,
    ) -> Result<Option<ContainerAdjustment>, Error> {
        let Some(mut chain) = self.chain().await else { return Ok(None) };
        chain.states.set(id, Told::Alive);
        if !chain.wants_any(&[Event::CreateContainer, Event::ValidateContainerAdjustment]) {
            return Ok(None);
        }
        let (pod, container) = about();
        // Large, and without plugins never there: whoever makes a container need not hold room for it.
        let creation = Box::pin(chain.create(&pod, container)).await?;
        // Not with the chain held: a container that is stopped is told of.
        drop(chain);
        self.carry_out(creation.updates.list, creation.evictions).await;
        Ok(Some(creation.adjustment))
    }

    /// A container that plugins were told of was not made.
    pub async fn undo_create(&self, id: &str, about: impl FnOnce() -> About) {
        self.remove_container(id, about).await;
    }

    /// A container is made.
    pub async fn post_create_container(&self, about: impl FnOnce() -> About) {
        log(Event::PostCreateContainer, self.tell(Event::PostCreateContainer, about).await);
    }

    /// A container is about to be started.
    ///
    /// # Errors
    /// When a plugin refuses it.
    pub async fn start_container(&self, about: impl FnOnce() -> About) -> Result<(), Error> {
        self.tell(Event::StartContainer, about).await
    }

    /// A container was started.
    pub async fn post_start_container(&self, about: impl FnOnce() -> About) {
        log(Event::PostStartContainer, self.tell(Event::PostStartContainer, about).await);
    }

    /// A container's limits are about to change: what plugins make of them, if anything else.
    ///
    /// # Errors
    /// When a plugin refuses it, or plugins contradict each other.
    pub async fn update_container(
        &self,
        about: impl FnOnce() -> About,
        resources: impl FnOnce() -> LinuxResources,
    ) -> Result<Option<LinuxResources>, Error> {
        let Some(chain) = self.chain().await else { return Ok(None) };
        if !chain.wants_any(&[Event::UpdateContainer]) {
            return Ok(None);
        }
        let (pod, container) = about();
        let change = chain.update(&pod, &container, resources()).await?;
        drop(chain);
        self.carry_out(change.updates.list, change.evictions).await;
        Ok(change.changed.then_some(change.resources))
    }

    /// They have changed.
    pub async fn post_update_container(&self, about: impl FnOnce() -> About) {
        log(Event::PostUpdateContainer, self.tell(Event::PostUpdateContainer, about).await);
    }

    /// A container has ended, by a call or by itself. Told once.
    pub async fn stop_container(&self, id: &str, about: impl FnOnce() -> About) {
        let Some(mut chain) = self.chain().await else { return };
        if !chain.states.stop(id) || !chain.wants_any(&[Event::StopContainer]) {
            return;
        }
        let (pod, container) = about();
        let updates = chain.stop(&pod, &container).await;
        drop(chain);
        self.carry_out(updates, Vec::new()).await;
    }

    /// A container is gone. Its stop is told before, if it was not.
    pub async fn remove_container(&self, id: &str, about: impl FnOnce() -> About) {
        let Some(mut chain) = self.chain().await else { return };
        let stopped = chain.states.stop(id);
        if !chain.states.remove(id) || !chain.wants_any(&[Event::StopContainer, Event::RemoveContainer]) {
            return;
        }
        let (pod, container) = about();
        let updates = if stopped { chain.stop(&pod, &container).await } else { Vec::new() };
        log(Event::RemoveContainer, chain.tell(Event::RemoveContainer, &pod, Some(&container)).await);
        drop(chain);
        self.carry_out(updates, Vec::new()).await;
    }

    async fn tell(&self, event: Event, about: impl FnOnce() -> About) -> Result<(), Error> {
        let Some(chain) = self.chain().await else { return Ok(()) };
        if !chain.wants_any(&[event]) {
            return Ok(());
        }
        let (pod, container) = about();
        chain.tell(event, &pod, Some(&container)).await
    }
}

/// What happened has happened, whatever a plugin says to it.
fn log(event: Event, result: Result<(), Error>) {
    if let Err(error) = result {
        let cause = std::error::Error::source(&error).map(ToString::to_string);
        warn!(event = crate::events::name(event), %error, cause, "an NRI plugin failed an event");
    }
}

fn told(container: &Container) -> Told {
    if container.state == i32::from(ContainerState::ContainerStopped) { Told::Stopped } else { Told::Alive }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.end.cancel();
    }
}
