//! Services and EndpointSlices of the cluster: one watch of each kind, shared by all consumers in the agent.
//!
//! While the API server does not answer, the cache has the last known state. If the agent was restarted in the
//! meantime, the cache has the stored services and slices of the namespaces of this node's pods. For all other
//! services, cluster DNS then has only the names, addresses and ports. A consumer that follows changes takes a
//! [`Subscription`], which collects the changed services.
//!
//! A pod of this node that is not ready gets no traffic from this node, even if its EndpointSlice shows it as ready.
//! The slices do not change while the API server is down.

mod local_pods;
mod namespaces;
mod ranges;
mod stored;
mod subscription;
mod trigger_times;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use coracle_services::{EndpointSlice, ServiceState, Tables};
use coracle_values::object::{Key as ObjectKey, ObjectExt as _};
use coracle_watch::{Config, Event};
use futures::StreamExt;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Service, ServiceStatus};
use kube::{Api, Client};
use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;

use crate::api_health::ApiHealth;
use crate::checkpoint::{Checkpoint, Key, Kind};
use crate::namespace_watch::NamespaceWatch;
pub(crate) use local_pods::LocalPod;
use local_pods::{Change, LocalPods};
use stored::{StoredSlice, Unsaved};
pub(crate) use subscription::Subscription;
use trigger_times::TriggerTimes;

/// Namespace and name of the API server's service, which the environment of every pod has.
const OWN_NAMESPACE: &str = "default";
const OWN_NAME: &str = "kubernetes";

/// Label of a service that another proxy serves, with the name of the proxy.
const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";

/// Delay before changes are stored, so that a burst is written once.
const STORE_AFTER: Duration = Duration::from_secs(1);
/// Maximum wait for the first list of services if the checkpoint has a copy.
const LIST_TIMEOUT_WITH_COPY: Duration = Duration::from_secs(2);
/// Maximum wait for the first list of services if the checkpoint has no copy.
const LIST_TIMEOUT_WITHOUT_COPY: Duration = Duration::from_secs(5);

/// The cache; cheap to clone.
#[derive(Clone)]
pub(crate) struct ServiceCache {
    shared: Arc<Shared>,
}

struct Shared {
    client: Client,
    namespaces: NamespaceWatch,
    checkpoint: Checkpoint,
    health: ApiHealth,
    tables: Arc<RwLock<Tables>>,
    local_pods: Mutex<LocalPods>,
    subscriptions: Mutex<Vec<Arc<Subscription>>>,
    trigger_times: TriggerTimes,
    progress: watch::Sender<Progress>,
    /// Namespaces with changes that are not stored yet.
    unsaved: Mutex<BTreeSet<String>>,
    /// Notified when a namespace is added to `unsaved`.
    unsaved_more: Notify,
    unsaved_slices: Unsaved,
    /// Namespaces whose names of services are not stored yet.
    unsaved_names: Unsaved,
    /// Slices of an earlier run, until the first list.
    stored_slices: Mutex<Vec<StoredSlice>>,
    has_stored: watch::Sender<bool>,
}

/// Progress of the watches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Whether all services were listed once.
    pub(crate) listed: bool,
    /// Whether all EndpointSlices were listed once.
    pub(crate) slices_listed: bool,
    /// Whether the last attempt failed.
    failed: bool,
    /// Number of changes so far.
    pub(crate) revision: u64,
}

/// The services are not listed yet. The text is the kubelet's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("services have not yet been read at least once, cannot construct envvars")]
pub(crate) struct NotListed;

// === impl ServiceCache ===

impl ServiceCache {
    pub(crate) fn new(client: Client, checkpoint: Checkpoint, health: ApiHealth) -> Self {
        let shared = Shared {
            namespaces: NamespaceWatch::new(client.clone()),
            client,
            checkpoint,
            health,
            tables: Arc::default(),
            local_pods: Mutex::default(),
            subscriptions: Mutex::default(),
            trigger_times: TriggerTimes::default(),
            progress: watch::Sender::default(),
            unsaved: Mutex::default(),
            unsaved_more: Notify::new(),
            unsaved_slices: Unsaved::default(),
            unsaved_names: Unsaved::default(),
            stored_slices: Mutex::default(),
            has_stored: watch::Sender::default(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The watch of namespaces, for other followers.
    pub(crate) fn namespaces(&self) -> &NamespaceWatch {
        &self.shared.namespaces
    }

    /// The known services of a namespace.
    #[must_use]
    pub(crate) fn of(&self, namespace: &str) -> Vec<Arc<Service>> {
        self.read(|tables| tables.of(namespace))
    }

    /// The tables, for readers that need several entries.
    pub(crate) fn tables(&self) -> Arc<RwLock<Tables>> {
        Arc::clone(&self.shared.tables)
    }

    /// A service with the slices to which proxies forward its traffic: those without the label
    /// `service.kubernetes.io/headless`, as in kube-proxy.
    #[must_use]
    pub(crate) fn state(&self, key: &ObjectKey) -> Option<ServiceState> {
        self.read(|tables| {
            let service = Arc::clone(tables.get(&key.namespace, &key.name)?);
            let mut slices = tables.slices(key);
            slices.retain(|slice| !slice.is_headless());
            Some(ServiceState { service, slices })
        })
    }

    /// Reads a service from the API server, not from the cache. `None` if there is none.
    ///
    /// # Errors
    /// The request's own error, or a timeout after 5 s.
    pub(crate) async fn fetch(&self, key: &ObjectKey) -> Result<Option<Service>, kube::Error> {
        let api: Api<Service> = Api::namespaced(self.shared.client.clone(), &key.namespace);
        self.shared.health.request(false, api.get_opt(&key.name)).await
    }

    /// The keys of all services.
    #[must_use]
    pub(crate) fn keys(&self) -> Vec<ObjectKey> {
        self.read(|tables| tables.services().map(|service| service.key()).collect())
    }

    /// Collects the services that change from now on.
    pub(crate) fn subscribe(&self) -> Arc<Subscription> {
        let subscription = Arc::new(Subscription::default());
        let mut all = self.shared.subscriptions.lock().unwrap_or_else(PoisonError::into_inner);
        all.push(Arc::clone(&subscription));
        subscription
    }

    /// Sets the metrics of cluster DNS, which count how long changes of endpoints take.
    pub(crate) fn measure_dns(&self, metrics: Arc<coracle_dns::Metrics>) {
        self.shared.trigger_times.measure_dns(metrics);
    }

    /// Returns the times of the changes that EndpointSlices have shown since the last call.
    pub(crate) fn take_trigger_times(&self) -> Vec<Timestamp> {
        self.shared.trigger_times.take()
    }

    /// Records the readiness of a pod of this node.
    pub(crate) fn report_pod(&self, pod: &LocalPod<'_>) {
        self.change_pods(|pods| pods.put(pod));
    }

    /// Removes a pod of this node.
    pub(crate) fn remove_pod(&self, uid: &str) {
        self.change_pods(|pods| pods.remove(uid));
    }

    /// Whether a pod of this node has the address.
    pub(crate) fn has_pod(&self, address: IpAddr) -> bool {
        self.shared.local_pods.lock().unwrap_or_else(PoisonError::into_inner).has(address)
    }

    fn change_pods(&self, change: impl FnOnce(&mut LocalPods) -> Vec<Change>) {
        // Hold the lock until the tables are changed, so that changes of one address are applied in their order.
        let mut pods = self.shared.local_pods.lock().unwrap_or_else(PoisonError::into_inner);
        let changes = change(&mut pods);
        if changes.is_empty() {
            return;
        }
        let apply = |tables: &mut Tables| -> Vec<ObjectKey> {
            changes.iter().flat_map(|(address, is_ready)| tables.set_ready(*address, *is_ready)).collect()
        };
        let mut changed = self.write(apply);
        // The records of slices name the pods of the endpoints, so they change too.
        let served: Vec<ObjectKey> = self.read(|tables| {
            changes.iter().flat_map(|(address, _)| tables.with_endpoint(*address)).cloned().collect()
        });
        self.slices_changed(&served);
        changed.extend(self.place_stored_slices(&pods));
        self.notify(&changed);
    }

    /// A receiver that is notified of each change.
    pub(crate) fn changes(&self) -> watch::Receiver<Progress> {
        self.shared.progress.subscribe()
    }

    /// The services of a container's environment: the API server's, and those of the namespace if one is given. Waits
    /// for the first list. Uses the checkpoint while the API server does not answer.
    pub(crate) async fn environment(&self, namespace: Option<&str>) -> Result<Vec<Arc<Service>>, NotListed> {
        let mut progress = self.changes();
        let stored = !progress.borrow().listed && self.is_stored(namespace.unwrap_or(OWN_NAMESPACE));
        let decided = progress.wait_for(|progress| {
            progress.listed || stored && (progress.failed || self.shared.health.is_unavailable())
        });
        let timeout = if stored { LIST_TIMEOUT_WITH_COPY } else { LIST_TIMEOUT_WITHOUT_COPY };
        let listed = matches!(tokio::time::timeout(timeout, decided).await, Ok(Ok(now)) if now.listed);
        if listed {
            self.store_once(namespace);
            return Ok(self.read(|tables| environment(tables, namespace)));
        }
        if !stored {
            return Err(NotListed);
        }
        let mut tables = Tables::default();
        for namespace in [Some(OWN_NAMESPACE), namespace].into_iter().flatten() {
            let services: Vec<Service> =
                self.shared.checkpoint.get(&Key::services(namespace)).unwrap_or_default();
            services.into_iter().for_each(|service| drop(tables.put_service(Arc::new(service))));
        }
        Ok(environment(&tables, namespace))
    }

    /// Watches services and stores changes, until dropped. With `with_slices`, it also watches EndpointSlices, which
    /// only the service proxy and DNS read. The kubelet's role upstream has no right to read them.
    pub(crate) async fn run(self, with_slices: bool) {
        // The slices have a separate task, so that the two lists are parsed in parallel. The task ends when the set is
        // dropped.
        let mut watch_of_slices = JoinSet::new();
        if with_slices {
            let (cache, mut slices) = (self.clone(), Vec::new());
            watch_of_slices.spawn(async move {
                let apply_event = |event| cache.apply_slice_event(event, &mut slices);
                cache.watch("endpointslices.discovery.k8s.io", apply_event).await;
            });
        }
        let mut services = Vec::new();
        let watch = self.watch("services", |event| self.apply_event(event, &mut services));
        tokio::join!(watch, self.store(with_slices), async {
            if with_slices {
                tokio::join!(self.use_stored(), self.store_slices(), self.store_names());
            }
        });
    }

    /// Adds the stored services and slices to the tables if the API server does not answer after the start. Cluster
    /// DNS and the service proxy use them. The first lists replace them.
    async fn use_stored(&self) {
        let mut progress = self.changes();
        let decided = progress
            .wait_for(|progress| progress.listed || progress.failed || self.shared.health.is_unavailable());
        let listed =
            matches!(tokio::time::timeout(LIST_TIMEOUT_WITH_COPY, decided).await, Ok(Ok(now)) if now.listed);
        if listed {
            return;
        }
        self.use_stored_names().await;
        let checkpoint = self.shared.checkpoint.clone();
        let stored = coracle_threads::spawn_blocking(move || {
            let services = checkpoint.all::<Vec<Service>>(Kind::Services);
            (services, checkpoint.all::<Vec<StoredSlice>>(Kind::Slices))
        });
        let stored = stored.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
        let (services, slices) = stored;
        if services.is_empty() {
            return;
        }
        self.write(|tables| tables.put_stored(services.into_iter().flatten().map(Arc::new)));
        self.use_stored_slices(slices.into_iter().flatten().collect());
    }

    async fn watch<K>(&self, kind: &'static str, mut apply_event: impl FnMut(Event<K>))
    where
        K: kube::Resource<DynamicType = ()> + serde::de::DeserializeOwned,
    {
        let api: Api<K> = Api::all(self.shared.client.clone());
        let mut events = coracle_watch::watch(api, Config::default());
        while let Some(event) = events.next().await {
            match event {
                // `Init` precedes the request, so it is not a response.
                Ok(event @ Event::Init) => apply_event(event),
                Ok(event) => {
                    self.shared.health.record_response();
                    apply_event(event);
                }
                Err(error) => {
                    tracing::debug!(error = &error as &dyn std::error::Error, kind, "a watch failed");
                    self.shared.progress.send_modify(|progress| progress.failed = true);
                }
            }
        }
    }

    fn apply_event(&self, event: Event<Service>, listed: &mut Vec<Arc<Service>>) {
        let changed: Vec<ObjectKey> = match event {
            Event::Init => {
                listed.clear();
                return;
            }
            Event::InitApply(service) => {
                listed.push(Arc::new(without_unread_fields(service)));
                return;
            }
            Event::InitDone => self.write(|tables| tables.replace_services(std::mem::take(listed))),
            Event::Apply(service) => self
                .write(|tables| tables.put_service(Arc::new(without_unread_fields(service))))
                .into_iter()
                .collect(),
            Event::Delete(service) => {
                let key = service.key();
                self.write(|tables| tables.remove_service(&key));
                vec![key]
            }
        };
        let namespaces = changed.iter().map(|key| key.namespace.clone());
        self.shared.unsaved.lock().unwrap_or_else(PoisonError::into_inner).extend(namespaces);
        self.notify(&changed);
        self.shared.progress.send_modify(|progress| {
            progress.listed = true;
            progress.failed = false;
            progress.revision += 1;
        });
        self.shared.unsaved_more.notify_one();
    }

    fn apply_slice_event(&self, event: Event<EndpointSlice>, listed: &mut Vec<Arc<EndpointSlice>>) {
        let changed: Vec<ObjectKey> = match event {
            Event::Init => {
                listed.clear();
                return;
            }
            Event::InitApply(slice) => {
                listed.push(slice.slim());
                return;
            }
            Event::InitDone => {
                let all = std::mem::take(listed);
                let changed = self.write(|tables| tables.replace_slices(all)).into_iter().collect();
                self.forget_stored_slices();
                changed
            }
            Event::Apply(slice) => {
                let trigger = trigger_times::of(&slice.metadata);
                let slice = slice.slim();
                let (changed, kind) = self.write(|tables| {
                    let kind = trigger_times::kind(tables, &slice);
                    (tables.put_slice(slice), kind)
                });
                if let Some(time) = trigger.filter(|_| !changed.is_empty()) {
                    self.shared.trigger_times.add(time, kind);
                }
                changed
            }
            Event::Delete(slice) => {
                self.write(|tables| tables.remove_slice(&slice.key())).into_iter().collect()
            }
        };
        self.notify(&changed);
        self.slices_changed(&changed);
        // Readers of the progress read no slices, so only the first list of slices wakes them.
        self.shared
            .progress
            .send_if_modified(|progress| !std::mem::replace(&mut progress.slices_listed, true));
    }

    fn notify(&self, changed: &[ObjectKey]) {
        let all = self.shared.subscriptions.lock().unwrap_or_else(PoisonError::into_inner);
        all.iter().for_each(|subscription| subscription.add(changed));
    }

    fn write<T>(&self, write: impl FnOnce(&mut Tables) -> T) -> T {
        write(&mut self.shared.tables.write().unwrap_or_else(PoisonError::into_inner))
    }

    /// Stores the changed namespaces. The checkpoint skips namespaces without pods of this node. With `with_names`, the
    /// names of all namespaces are stored, too.
    async fn store(&self, with_names: bool) {
        loop {
            self.shared.unsaved_more.notified().await;
            tokio::time::sleep(STORE_AFTER).await;
            let unsaved =
                std::mem::take(&mut *self.shared.unsaved.lock().unwrap_or_else(PoisonError::into_inner));
            unsaved.iter().for_each(|namespace| self.store_one(namespace));
            if with_names {
                self.shared.unsaved_names.add(unsaved);
            }
        }
    }

    /// Stores a pod's namespace if it is not stored: for the first pod of a namespace on this node.
    fn store_once(&self, namespace: Option<&str>) {
        for namespace in [Some(OWN_NAMESPACE), namespace].into_iter().flatten() {
            if !self.shared.checkpoint.has(&Key::services(namespace)) {
                self.store_one(namespace);
            }
            self.store_slices_once(namespace);
        }
    }

    fn store_one(&self, namespace: &str) {
        let services: Vec<Service> =
            self.of(namespace).iter().map(|service| stored_fields(service)).collect();
        self.shared.checkpoint.put(Key::services(namespace), &services);
    }

    fn is_stored(&self, namespace: &str) -> bool {
        let key = Key::services(namespace);
        self.shared.checkpoint.has(&key) || self.shared.checkpoint.get::<Vec<Service>>(&key).is_some()
    }

    fn read<T>(&self, read: impl FnOnce(&Tables) -> T) -> T {
        read(&self.shared.tables.read().unwrap_or_else(PoisonError::into_inner))
    }
}

fn environment(tables: &Tables, namespace: Option<&str>) -> Vec<Arc<Service>> {
    let own = tables.get(OWN_NAMESPACE, OWN_NAME).filter(|_| namespace != Some(OWN_NAMESPACE));
    own.cloned()
        .into_iter()
        .chain(namespace.map(|namespace| tables.of(namespace)).into_iter().flatten())
        .collect()
}

/// A service without fields that no consumer reads and that are often large.
fn without_unread_fields(mut service: Service) -> Service {
    let metadata = &mut service.metadata;
    (metadata.managed_fields, metadata.owner_references) = (None, None);
    metadata.annotations = None;
    let proxy = metadata.labels.take().unwrap_or_default().remove_entry(PROXY_NAME);
    metadata.labels = proxy.map(|label| [label].into());
    service
}

/// Whether another proxy than the node's own serves a service. Upstream's kube-proxy skips such services, too.
pub(crate) fn has_other_proxy(service: &Service) -> bool {
    service.metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(PROXY_NAME))
}

/// A service with the fields that environments and the service proxy need.
fn stored_fields(service: &Service) -> Service {
    let balancer = service.status.as_ref().and_then(|status| status.load_balancer.clone());
    let status =
        balancer.map(|balancer| ServiceStatus { load_balancer: Some(balancer), ..Default::default() });
    let mut light = Service { spec: service.spec.clone(), status, ..Service::default() };
    let (stored, metadata) = (&mut light.metadata, &service.metadata);
    stored.name.clone_from(&metadata.name);
    stored.namespace.clone_from(&metadata.namespace);
    stored.uid.clone_from(&metadata.uid);
    // If several services claim an address, the oldest one gets it.
    stored.creation_timestamp.clone_from(&metadata.creation_timestamp);
    stored.labels.clone_from(&metadata.labels);
    light
}

#[cfg(test)]
mod tests;
