//! The hooks: the events that the runtime sends to plugins, and the effect of their responses. As in containerd, the
//! caller decides which errors let its call fail, and which errors are only logged.

mod chain;
mod failure;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use coracle_proto::nri::{
    Container, ContainerAdjustment, ContainerEviction, ContainerUpdate, Empty, Event, LinuxResources,
    PodSandbox,
};
use futures::future::join_all;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use self::chain::Chain;
use self::failure::log;
use crate::launch::launch_all;
use crate::plugin::{Candidate, JoinError, Plugin, update_all};
use crate::settings::Settings;
use crate::snapshot::Snapshot;
use crate::states::SentState;
use crate::{Error, Host, listen};

/// A guard that prevents plugins from joining. It is held while a pod or container is created or changes its state. So
/// a joining plugin gets the pod or container either in an event or in its synchronization.
pub type JoinGuard<'a> = RwLockReadGuard<'a, ()>;

/// A pod and one of its containers, as plugins see them.
pub type PodAndContainer = (PodSandbox, Container);

/// The set of plugins. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Nri {
    inner: Arc<Inner>,
}

#[derive(Debug, Default)]
pub(crate) struct Inner {
    settings: Settings,
    host: OnceLock<HostRef>,
    /// Mask of the events with a subscriber.
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
    /// Creates a set without plugins. [`Nri::start`] adds them.
    #[must_use]
    pub fn new(settings: Settings) -> Self {
        let mut inner = Inner::default();
        inner.settings = settings;
        Self { inner: Arc::new(inner) }
    }

    /// Starts the pre-installed plugins, waits until they have joined or failed, and listens for other plugins.
    ///
    /// # Errors
    /// If the socket cannot be created.
    pub async fn start(&self, host: Weak<dyn Host>) -> io::Result<()> {
        let inner = &self.inner;
        if inner.host.set(HostRef(host)).is_err() {
            return Ok(());
        }
        join_all(launch_all(&inner.settings).into_iter().map(|candidate| self.add(candidate))).await;
        if let Some(path) = &inner.settings.socket {
            let listener = listen::bind(path).await?;
            // The listening task must not keep the plugins alive.
            let weak = Arc::downgrade(inner);
            let join = move |stream: UnixStream| {
                let nri = weak.upgrade().map(|inner| Self { inner })?;
                let candidate = Candidate { stream, identity: None, config: String::new(), child: None };
                Some(async move { nri.add(candidate).await })
            };
            tokio::spawn(listen::serve(listener, inner.end.clone(), join));
        }
        Ok(())
    }

    /// Sends Shutdown to all plugins and disconnects them.
    pub async fn close(&self) {
        self.inner.end.cancel();
        let plugins = self.inner.chain.lock().await.take();
        self.inner.wanted.store(0, Ordering::Release);
        join_all(plugins.iter().map(|plugin| async {
            // An unresponsive plugin is disconnected too.
            let _response = plugin.call::<Empty>("Shutdown", &Empty {}).await;
            plugin.connection.close();
        }))
        .await;
        if let Some(path) = &self.inner.settings.socket {
            // The listener is closed. A missing socket file is no error.
            let _absent = std::fs::remove_file(path);
        }
    }

    /// The socket at which plugins connect, if it is enabled.
    #[must_use]
    pub fn socket(&self) -> Option<&PathBuf> {
        self.inner.settings.socket.as_ref()
    }

    /// Prevents plugins from joining while the guard is held.
    pub async fn block_joins(&self) -> JoinGuard<'_> {
        self.inner.gate.read().await
    }

    /// Whether any plugin has subscribed. The result may be outdated immediately.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.inner.wanted.load(Ordering::Acquire) != 0
    }

    /// Adds a plugin. A failure is logged.
    pub(crate) async fn add<S>(&self, candidate: Candidate<S>)
    where
        S: AsyncRead + AsyncWrite + Send + 'static,
    {
        if let Err(error) = self.join(candidate).await {
            let cause = std::error::Error::source(&error).map(ToString::to_string);
            warn!(%error, cause, "cannot add NRI plugin");
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
            let _no_events = inner.gate.write().await;
            let mut chain = inner.chain.lock().await;
            let known = snapshot(&host).await;
            let (plugin, updates) = chain.join(plugin, known).await?;
            inner.wanted.store(chain.subscribed_events(), Ordering::Release);
            self.remove_when_closed(plugin);
            updates
        };
        update_all(&host, updates).await;
        Ok(())
    }

    /// Removes the plugin when its connection closes.
    fn remove_when_closed(&self, plugin: Arc<Plugin>) {
        let (inner, end) = (Arc::downgrade(&self.inner), self.inner.end.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = plugin.connection.closed() => {}
                () = end.cancelled() => return,
            }
            info!(plugin = plugin.identity.full(), "NRI plugin disconnected");
            drop(plugin);
            if let Some(inner) = inner.upgrade() {
                let mut chain = inner.chain.lock().await;
                chain.prune();
                inner.wanted.store(chain.subscribed_events(), Ordering::Release);
            }
        });
    }

    /// The plugins, if there are any.
    async fn chain(&self) -> Option<MutexGuard<'_, Chain>> {
        if !self.is_active() {
            return None;
        }
        let mut chain = self.inner.chain.lock().await;
        chain.prune();
        (chain.subscribed_events() != 0).then_some(chain)
    }

    /// Performs updates and evictions that plugins requested. A failure is logged and does not affect the
    /// current call.
    async fn perform(&self, updates: Vec<ContainerUpdate>, evictions: Vec<ContainerEviction>) {
        let Some(host) = self.inner.host.get().and_then(|HostRef(host)| host.upgrade()) else { return };
        for eviction in evictions {
            let (id, why) = (eviction.container_id.clone(), eviction.reason.clone());
            info!(container = id, why, "NRI plugin evicts container");
            if let Err(error) = Arc::clone(&host).evict(eviction).await {
                warn!(container = id, error, "cannot evict container for NRI plugin");
            }
        }
        update_all(&host, updates).await;
    }
}

/// Collects the existing pods and containers on a thread that may block.
async fn snapshot(host: &Arc<dyn Host>) -> Snapshot {
    let host = Arc::clone(host);
    tokio::task::spawn_blocking(move || host.snapshot()).await.unwrap_or_default()
}

// === pods ===

impl Nri {
    /// Sends RunPodSandbox: a pod is complete, and the caller is about to report it. After an error the caller must
    /// remove the pod.
    ///
    /// # Errors
    /// If a plugin refuses the event.
    pub async fn run_pod(&self, id: &str, pod: impl FnOnce() -> PodSandbox) -> Result<(), Error> {
        let Some(mut chain) = self.chain().await else { return Ok(()) };
        chain.states.set(id, SentState::Alive);
        if !chain.wants_any(&[Event::RunPodSandbox, Event::StopPodSandbox, Event::RemovePodSandbox]) {
            return Ok(());
        }
        let pod = pod();
        let result = chain.send(Event::RunPodSandbox, &pod, None).await;
        if result.is_err() {
            chain.states.remove(id);
            for event in [Event::StopPodSandbox, Event::RemovePodSandbox] {
                log(event, chain.send(event, &pod, None).await);
            }
        }
        result
    }

    /// Sends UpdatePodSandbox: the resources of a pod are about to change.
    ///
    /// # Errors
    /// If a plugin refuses the event.
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

    /// Sends PostUpdatePodSandbox: the resources of a pod have changed.
    pub async fn post_update_pod(&self, pod: impl FnOnce() -> PodSandbox) {
        self.send_pod_event(Event::PostUpdatePodSandbox, pod).await;
    }

    /// Sends StopPodSandbox: a pod's containers are stopped. Its network still exists.
    pub async fn stop_pod(&self, id: &str, pod: impl FnOnce() -> PodSandbox) {
        let Some(mut chain) = self.chain().await else { return };
        if chain.states.stop(id) && chain.wants_any(&[Event::StopPodSandbox]) {
            log(Event::StopPodSandbox, chain.send(Event::StopPodSandbox, &pod(), None).await);
        }
    }

    /// Sends RemovePodSandbox: a pod was removed.
    pub async fn remove_pod(&self, id: &str, pod: impl FnOnce() -> PodSandbox) {
        let Some(mut chain) = self.chain().await else { return };
        if chain.states.remove(id) && chain.wants_any(&[Event::RemovePodSandbox]) {
            log(Event::RemovePodSandbox, chain.send(Event::RemovePodSandbox, &pod(), None).await);
        }
    }

    async fn send_pod_event(&self, event: Event, pod: impl FnOnce() -> PodSandbox) {
        if let Some(chain) = self.chain().await
            && chain.wants_any(&[event])
        {
            log(event, chain.send(event, &pod(), None).await);
        }
    }
}

// === containers ===

impl Nri {
    /// Sends CreateContainer: a container is about to be created. Returns the requested adjustments. After an error, or
    /// if the creation fails, the caller must call [`Nri::undo_create`].
    ///
    /// # Errors
    /// If a plugin refuses the event, or plugins conflict.
    pub async fn create_container(
        &self,
        id: &str,
        about: impl FnOnce() -> PodAndContainer,
    ) -> Result<Option<ContainerAdjustment>, Error> {
        let Some(mut chain) = self.chain().await else { return Ok(None) };
        chain.states.set(id, SentState::Alive);
        if !chain.wants_any(&[Event::CreateContainer, Event::ValidateContainerAdjustment]) {
            return Ok(None);
        }
        let (pod, container) = about();
        // The future is boxed, because it is large and rarely needed. Otherwise it would enlarge the caller's future.
        let creation = Box::pin(chain.create(&pod, container)).await?;
        // The chain is released first, because an eviction sends events too.
        drop(chain);
        self.perform(creation.updates.list, creation.evictions).await;
        Ok(Some(creation.adjustment))
    }

    /// Reports to plugins that a container was removed: its creation failed after the plugins had been called for it.
    pub async fn undo_create(&self, id: &str, about: impl FnOnce() -> PodAndContainer) {
        self.remove_container(id, about).await;
    }

    /// Sends PostCreateContainer: a container was created.
    pub async fn post_create_container(&self, about: impl FnOnce() -> PodAndContainer) {
        log(Event::PostCreateContainer, self.send(Event::PostCreateContainer, about).await);
    }

    /// Sends StartContainer: a container is about to be started.
    ///
    /// # Errors
    /// If a plugin refuses the event.
    pub async fn start_container(&self, about: impl FnOnce() -> PodAndContainer) -> Result<(), Error> {
        self.send(Event::StartContainer, about).await
    }

    /// Sends PostStartContainer: a container was started.
    pub async fn post_start_container(&self, about: impl FnOnce() -> PodAndContainer) {
        log(Event::PostStartContainer, self.send(Event::PostStartContainer, about).await);
    }

    /// Sends UpdateContainer: a container's resources are about to change. Returns the resources as changed by plugins.
    /// `None` if no plugin changed the resources.
    ///
    /// # Errors
    /// If a plugin refuses the event, or plugins conflict.
    pub async fn update_container(
        &self,
        about: impl FnOnce() -> PodAndContainer,
        resources: impl FnOnce() -> LinuxResources,
    ) -> Result<Option<LinuxResources>, Error> {
        let Some(chain) = self.chain().await else { return Ok(None) };
        if !chain.wants_any(&[Event::UpdateContainer]) {
            return Ok(None);
        }
        let (pod, container) = about();
        let change = chain.update(&pod, &container, resources()).await?;
        drop(chain);
        self.perform(change.updates.list, change.evictions).await;
        Ok(change.changed.then_some(change.resources))
    }

    /// Sends PostUpdateContainer: a container's resources have changed.
    pub async fn post_update_container(&self, about: impl FnOnce() -> PodAndContainer) {
        log(Event::PostUpdateContainer, self.send(Event::PostUpdateContainer, about).await);
    }

    /// Sends StopContainer: a container has stopped, by a call or by itself. The event is sent once.
    pub async fn stop_container(&self, id: &str, about: impl FnOnce() -> PodAndContainer) {
        let Some(mut chain) = self.chain().await else { return };
        if !chain.states.stop(id) || !chain.wants_any(&[Event::StopContainer]) {
            return;
        }
        let (pod, container) = about();
        let updates = chain.stop(&pod, &container).await;
        drop(chain);
        self.perform(updates, Vec::new()).await;
    }

    /// Sends RemoveContainer: a container was removed. Sends StopContainer before, unless StopContainer was already
    /// sent.
    pub async fn remove_container(&self, id: &str, about: impl FnOnce() -> PodAndContainer) {
        let Some(mut chain) = self.chain().await else { return };
        let stopped = chain.states.stop(id);
        if !chain.states.remove(id) || !chain.wants_any(&[Event::StopContainer, Event::RemoveContainer]) {
            return;
        }
        let (pod, container) = about();
        let updates = if stopped { chain.stop(&pod, &container).await } else { Vec::new() };
        log(Event::RemoveContainer, chain.send(Event::RemoveContainer, &pod, Some(&container)).await);
        drop(chain);
        self.perform(updates, Vec::new()).await;
    }

    async fn send(&self, event: Event, about: impl FnOnce() -> PodAndContainer) -> Result<(), Error> {
        let Some(chain) = self.chain().await else { return Ok(()) };
        if !chain.wants_any(&[event]) {
            return Ok(());
        }
        let (pod, container) = about();
        chain.send(event, &pod, Some(&container)).await
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.end.cancel();
    }
}
