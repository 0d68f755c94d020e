//! Device plugins: programs that offer devices of the node as extended resources.
//!
//! ```text
//! plugin ──Register──► registration ──► table ◄── allocate, release ◄── workers of pods
//!    ▲                                    │ ▲            │
//!    └── Allocate, PreStartContainer ◄────┼─┼────────────┘
//!                                         │ └── records of pods (durable)
//!           status of the Node ◄──────────┘
//! ```
//! The plugin lists its devices with their health, and the node reports their numbers. A pod gets devices before
//! its sandbox is made. The devices are recorded before the containers of the pod start, and freed after the
//! containers have ended. Source: `pkg/kubelet/cm/devicemanager`, with two differences. A plugin that does not answer
//! cannot delay other pods. A pod that had devices before a reboot waits for them instead of failing. Without plugins
//! there is only the listening registration socket.

mod choose;
mod edits;
mod list_codec;
mod pace;
mod plugin;
mod record;
mod registration;
mod report;
mod requests;
pub(crate) mod sockets;
mod table;
#[cfg(test)]
mod tests;
mod topology;
mod used;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_error_chain::chain;
use k8s_openapi::api::core::v1::{Container, Pod};
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use crate::dra::Link;
use crate::kubelet_metrics::KubeletMetrics;
use crate::node::DeviceCounts;
use choose::{DeviceRequest, Options};
pub(crate) use edits::DeviceOptions;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use list_codec::fuzz as fuzz_list;
use pace::Pace;
use plugin::{Plugin, PluginError};
use record::Records;
use registration::Connected;
use requests::{Numbers, Request};
use table::{Allocation, Owner, Refusal, Step, Table};
pub(crate) use topology::AlignedDevices;

/// Time in which a plugin must register again after its end, as in the kubelet (`endpointStopGracePeriod`). Otherwise
/// its devices are removed.
const GRACE: Duration = Duration::from_secs(300);

/// Maximum number of registered plugins whose device lists are not followed yet.
const CONNECTED_MAX: usize = 16;

/// Settings of device plugins.
#[derive(Clone, Debug)]
pub(crate) struct DevicePluginConfig {
    /// Directory of the plugins' sockets and of the registration socket.
    pub(crate) sockets: PathBuf,
    /// Directory of records.
    pub(crate) records: PathBuf,
}

/// The reason why a pod does not get its devices.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DeviceError {
    /// The pod must be rejected. The message is upstream's.
    #[error("{0}")]
    Reject(String),
    /// The devices may be available later.
    #[error("{0}")]
    Wait(String),
    #[error("cannot write the record of the pod's devices")]
    Record(#[source] io::Error),
}

/// The devices of one resource, with the NUMA nodes of each.
pub(crate) type ResourceDevices = (String, BTreeMap<String, Vec<i64>>);

/// Device plugins of this node. Cheap to clone.
#[derive(Clone)]
pub(crate) struct DevicePlugins {
    shared: Arc<Shared>,
}

struct Shared {
    config: DevicePluginConfig,
    records: Records,
    metrics: Arc<KubeletMetrics>,
    /// Id of the boot. After a reboot, plugins are called again for devices that pods already have.
    boot: String,
    state: Mutex<State>,
    /// Numbers of devices, for the Node's status.
    counts: watch::Sender<DeviceCounts>,
    /// The uids of pods with a device whose health has changed.
    changed: mpsc::UnboundedSender<String>,
    /// Registered plugins, for the task that follows them.
    connected: mpsc::Sender<Connected>,
    /// Receiver of `connected`. The task takes it at its start.
    received: Mutex<Option<mpsc::Receiver<Connected>>>,
}

#[derive(Default)]
struct State {
    table: Table,
    /// Plugins by resource, with the numbers of their registrations. Only a plugin that requires PreStartContainer
    /// stays after its end. The call then fails, as upstream, so no container with its devices starts until the plugin
    /// has registered again.
    plugins: HashMap<String, (u64, Plugin)>,
    /// Uids of pods whose records are out of date, with the number of the last change.
    unsaved: HashMap<String, u64>,
    /// Number of the last change of the devices of any pod.
    changes: u64,
}

// === impl DevicePlugins ===

impl DevicePlugins {
    /// Reads the records. Also returns a receiver, which gets the uid of a pod when the health of one of its devices
    /// changes.
    pub(crate) fn open(
        config: DevicePluginConfig,
        boot: &str,
        counts: watch::Sender<DeviceCounts>,
        metrics: Arc<KubeletMetrics>,
    ) -> (Self, mpsc::UnboundedReceiver<String>) {
        let records = Records::new(config.records.clone());
        let mut state = State::default();
        for name in records.resources() {
            state.table.restore_resource(&name);
        }
        for pod in records.pods() {
            state.table.restore_pod(pod);
        }
        counts.send_replace(state.table.counts());
        let (changed, changes) = mpsc::unbounded_channel();
        let (connected, received) = mpsc::channel(CONNECTED_MAX);
        let shared = Shared {
            config,
            records,
            metrics,
            boot: boot.to_owned(),
            state: Mutex::new(state),
            counts,
            changed,
            connected,
            received: Mutex::new(Some(received)),
        };
        (Self { shared: Arc::new(shared) }, changes)
    }

    /// Registers plugins and follows their devices, until dropped. A second call does nothing.
    pub(crate) async fn run(self) {
        let received = self.shared.received.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(mut plugins) = received else { return };
        let serving = registration::serve(self.clone());
        let following = async {
            // One task for each resource, with the number of the registration. A later registration ends the earlier
            // task.
            let mut tasks: HashMap<String, (u64, AbortOnDropHandle<()>)> = HashMap::new();
            let restored = self.state().table.names();
            for name in restored {
                let expiring = self.clone().expire(name.clone(), 0);
                tasks.insert(name, (0, AbortOnDropHandle::new(coracle_threads::spawn(expiring))));
            }
            while let Some(connected) = plugins.recv().await {
                let (name, number) = (connected.name.clone(), connected.number);
                // Concurrent registrations can arrive in an order other than the order of their numbers in the table.
                if tasks.get(&name).is_some_and(|(known, _)| *known > number) {
                    continue;
                }
                tasks.retain(|_, (_, task)| !task.is_finished());
                let following = self.clone().follow(connected);
                tasks.insert(name, (number, AbortOnDropHandle::new(coracle_threads::spawn(following))));
            }
        };
        tokio::join!(serving, following);
    }

    /// Adds a connected plugin to the table. The caller must follow it.
    fn add(&self, name: &str, plugin: Plugin, link: Link) -> Connected {
        let mut state = self.state();
        let number = state.table.connect(name);
        self.shared.metrics.device_plugin_registered(name);
        state.plugins.insert(name.to_owned(), (number, plugin.clone()));
        Connected { name: name.to_owned(), number, plugin, link, ended: None }
    }

    /// Follows the lists of a plugin until it ends, and removes its devices if it does not come back.
    async fn follow(self, connected: Connected) {
        let Connected { name, number, plugin, link, ended } = connected;
        // A known name is recorded too: the task of an earlier registration may have ended before it recorded the name.
        self.names_changed().await;
        let done = self.read_lists(&name, number, &plugin).await;
        let end = |()| "the plugin ended the list of its devices".to_owned();
        let error = done.map_or_else(|error| chain(&error), end);
        plugin.end(link);
        drop(ended);
        let is_current = {
            let mut state = self.state();
            let is_current = state.table.disconnect(&name, number);
            if is_current && !plugin.needs_pre_start {
                state.plugins.remove(&name);
            }
            is_current
        };
        if is_current {
            tracing::warn!(resource = name, error, "a device plugin has ended");
            self.publish();
            self.expire(name, number).await;
        }
    }

    async fn read_lists(&self, name: &str, number: u64, plugin: &Plugin) -> Result<(), PluginError> {
        let mut lists = plugin.watch().await?;
        let (mut pace, mut ready) = (Pace::new(), Instant::now());
        while let Some(list) = plugin::newest(&mut lists).await? {
            let waited = ready.elapsed();
            let devices = plugin::parse_devices(list)?;
            tracing::debug!(resource = name, devices = devices.len(), "devices listed");
            let changed = {
                let mut state = self.state();
                if !state.table.has_room_for(name, &devices) {
                    return Err(plugin::too_many());
                }
                state.table.list(name, number, devices)
            };
            let Some(changed) = changed else { return Ok(()) };
            let is_changed = self.publish() || !changed.is_empty();
            for uid in changed {
                // This fails only if pod sync has ended. Then the agent ends too.
                let _ = self.shared.changed.send(uid);
            }
            tokio::time::sleep(pace.delay_after(waited, is_changed)).await;
            ready = Instant::now();
        }
        Ok(())
    }

    /// Removes the devices of a resource after the grace period, if no plugin has registered since.
    async fn expire(self, name: String, number: u64) {
        tokio::time::sleep(GRACE).await;
        {
            let mut state = self.state();
            state.table.expire(&name, number);
            if !state.table.manages(&name) {
                state.plugins.remove(&name);
            }
        }
        self.names_changed().await;
    }

    /// Records the names of the resources if they have changed, and publishes the numbers of devices.
    async fn names_changed(&self) {
        self.publish();
        let this = self.clone();
        let names = move || this.state().table.names();
        let shared = Arc::clone(&self.shared);
        if let Err(error) = blocking(move || shared.records.save_resources(names)).await {
            tracing::warn!(%error, "cannot record the resources of device plugins");
        }
    }

    /// Publishes the numbers of devices. Returns whether they have changed.
    fn publish(&self) -> bool {
        self.shared.counts.send_if_modified(|held| {
            let counts = self.state().table.counts();
            let is_changed = *held != counts;
            *held = counts;
            is_changed
        })
    }

    /// Whether [`Self::allocate`] checks that the devices of this resource suffice. The admission then leaves the
    /// resource out of its sums.
    pub(crate) fn manages(&self, resource: &str) -> bool {
        self.state().table.manages(resource)
    }

    /// Allocates the devices of all containers of a pod. A pod without devices costs nothing.
    ///
    /// # Errors
    /// The error of the first container that does not get its devices. Devices that are only reserved are freed.
    /// Allocated devices stay until [`Self::release`].
    pub(crate) async fn allocate(&self, pod: &Pod) -> Result<(), DeviceError> {
        if self.state().table.is_empty() {
            return Ok(());
        }
        let requests = requests::of_pod(pod);
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        if requests.is_empty() {
            return Ok(());
        }
        match self.allocate_all(uid, &requests).await {
            Ok(()) if !self.state().unsaved.contains_key(uid) => Ok(()),
            Ok(()) => self.save(uid).await.map_err(DeviceError::Record),
            Err(refusal) => {
                self.state().table.cancel(uid);
                Err(match refusal {
                    Refusal::Reject(message) => DeviceError::Reject(message),
                    Refusal::Wait(message) => DeviceError::Wait(message),
                })
            }
        }
    }

    async fn allocate_all(&self, uid: &str, requests: &[Request]) -> Result<(), Refusal> {
        for request in requests {
            let owner = Owner { uid, container: &request.container };
            for (resource, count) in &request.numbers {
                if self.manages(resource) {
                    let reusable = self.state().table.reusable(owner, resource, requests);
                    let want =
                        DeviceRequest { resource: resource.clone(), count: *count, reusable, affinity: None };
                    self.allocate_one(owner, &want).await?;
                }
            }
        }
        Ok(())
    }

    /// Allocates devices of one resource to a container.
    async fn allocate_one(&self, owner: Owner<'_>, want: &DeviceRequest) -> Result<(), Refusal> {
        let name = &want.resource;
        let (step, is_answered) = {
            let state = self.state();
            let step = state.table.step(owner, want, &self.shared.boot)?;
            (step, state.table.allocation(owner, name).is_some_and(Allocation::is_answered))
        };
        let (ids, is_again) = match step {
            Step::Done => return Ok(()),
            Step::Call(ids) => (ids, is_answered),
            Step::Choose(choice) => {
                let plugin = self.plugin(name).filter(|plugin| plugin.has_preferences);
                let preferred = match (plugin, choice.options()) {
                    (Some(plugin), Some(options)) => {
                        let Options { available, included } = options;
                        let preferred = plugin.preferred(available, included, want.count).await;
                        preferred.map_err(|error| {
                            let error = chain(&error);
                            let call = "device plugin GetPreferredAllocation rpc failed with err:";
                            Refusal::Reject(format!("{call} {error}"))
                        })?
                    }
                    _ => Vec::new(),
                };
                let ids = self.state().table.reserve(owner, want, &preferred)?;
                (ids, false)
            }
        };
        let refuse: fn(String) -> Refusal = if is_again { Refusal::Wait } else { Refusal::Reject };
        let Some(plugin) = self.plugin(name) else {
            return Err(refuse(format!("unknown Device Plugin {name}")));
        };
        tracing::debug!(
            uid = owner.uid,
            container = owner.container,
            resource = name,
            ?ids,
            "allocating devices"
        );
        let begun = Instant::now();
        let allocated = plugin.allocate(ids).await;
        self.shared.metrics.devices_allocated(name, begun.elapsed());
        let edits = allocated.map_err(|error| refuse(chain(&error)))?;
        let mut state = self.state();
        if !state.table.answer(owner, name, edits, &self.shared.boot) {
            return Err(Refusal::Wait("the pod has ended".to_owned()));
        }
        state.changes += 1;
        let change = state.changes;
        state.unsaved.insert(owner.uid.to_owned(), change);
        Ok(())
    }

    /// The changes of a container's configuration for its devices. Calls PreStartContainer of the plugins that require
    /// it.
    ///
    /// # Errors
    /// When the container does not get its devices, or a plugin refuses its start.
    pub(crate) async fn container_options(
        &self,
        pod: &Pod,
        container: &Container,
    ) -> Result<DeviceOptions, DeviceError> {
        let mut options = DeviceOptions::default();
        let numbers = requests::of_container(pod, container);
        if numbers.is_empty() || self.state().table.is_empty() {
            return Ok(options);
        }
        let uid = pod.metadata.uid.as_deref().unwrap_or_default();
        let owner = Owner { uid, container: &container.name };
        if self.lacks(owner, &numbers) {
            // This is the case if the pod was admitted before the plugin registered, or if its record could not be
            // written.
            self.allocate(pod).await?;
        }
        for resource in numbers.keys() {
            let allocation = self.state().table.allocation(owner, resource).cloned();
            let Some((devices, edits)) = allocation.and_then(|found| Some((found.devices, found.edits?)))
            else {
                continue;
            };
            if let Some(plugin) = self.plugin(resource).filter(|plugin| plugin.needs_pre_start) {
                let started = plugin.pre_start(devices.into_keys().collect()).await;
                started.map_err(|error| {
                    let call = "device plugin PreStartContainer rpc failed with err:";
                    DeviceError::Wait(format!("{call} {}", chain(&error)))
                })?;
            }
            options.add(&edits);
        }
        Ok(options)
    }

    /// Whether a container does not have the devices that it requests, or the record of its pod is out of date.
    fn lacks(&self, owner: Owner<'_>, numbers: &Numbers) -> bool {
        let state = self.state();
        if state.unsaved.contains_key(owner.uid) {
            return true;
        }
        let is_given =
            |resource: &str| state.table.allocation(owner, resource).is_some_and(Allocation::is_answered);
        numbers.keys().any(|resource| state.table.manages(resource) && !is_given(resource))
    }

    /// Frees the devices of a pod. The pod's containers must have ended.
    pub(crate) async fn release(&self, uid: &str) {
        let had = {
            let mut state = self.state();
            state.unsaved.remove(uid);
            state.table.remove(uid).is_some()
        };
        if had && let Err(error) = self.save(uid).await {
            // The next start of the agent removes the record.
            tracing::warn!(%error, uid, "cannot remove the record of a pod's devices");
        }
    }

    /// Whether the pod has devices. The end of the pod must be reported only after its devices are freed.
    pub(crate) fn holds(&self, uid: &str) -> bool {
        self.state().table.pod(uid).is_some()
    }

    /// The uids of all pods with devices.
    pub(crate) fn pods(&self) -> Vec<String> {
        self.state().table.pods()
    }

    fn plugin(&self, resource: &str) -> Option<Plugin> {
        self.state().plugins.get(resource).map(|(_, plugin)| plugin.clone())
    }

    /// Writes the record of a pod from the table, or removes it if the pod has no devices.
    async fn save(&self, uid: &str) -> io::Result<()> {
        let (this, uid) = (self.clone(), uid.to_owned());
        let save = move || {
            let change = this.state().unsaved.get(&uid).copied();
            this.shared.records.save(&uid, || this.state().table.pod(&uid).cloned())?;
            // If the devices changed during the write, the record still counts as out of date, as after a failed write.
            let mut state = this.state();
            if state.unsaved.get(&uid).copied() == change {
                state.unsaved.remove(&uid);
            }
            Ok(())
        };
        blocking(save).await
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn blocking(work: impl FnOnce() -> io::Result<()> + Send + 'static) -> io::Result<()> {
    coracle_threads::spawn_blocking(work).await.unwrap_or_else(|error| Err(io::Error::other(error)))
}
