//! Runs the service proxy: follows the shared cache, the Node object and the ServiceCIDRs, and repairs foreign changes
//! of the table.
//!
//! The table is replaced in four cases: all services and slices were listed; the properties of the node or the ranges
//! of services have changed; another process has changed the table; a transaction has failed. Any other change commits
//! only its difference. Until the first list the table of the previous run stays as it is. There may be no such table
//! (after a boot), or it may have been made from stored services. Then the proxy programs the stored services while the
//! API server does not answer.

mod ignored_ips;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_error_chain::chain;
use coracle_nft::{Monitor, TableError};
use coracle_service_proxy::{NodeView, Proxy, State};
use coracle_services::{EndpointSlice, ServiceState};
use coracle_values::object::Key;
use futures::FutureExt as _;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::{Node, Service};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::config::ServiceProxyConfig;
use crate::node_balancer::{NodeBalancer, is_checked};
use crate::proxy_health::ProxyState;
use crate::repair::RepairBackoff;
use crate::service_cache::{ServiceCache, Subscription, has_other_proxy};
use ignored_ips::IgnoredIps;

/// First back-off after a failure. It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const MAX_BACKOFF: Duration = Duration::from_secs(60);
/// Maximum number of services in a change that is committed on the async thread.
const SHORT_MAX: usize = 8;
/// Maximum [`weight`] of each service in a change that is committed on the async thread.
const WEIGHT_MAX: usize = 512;
/// Label of a node with its zone.
const ZONE: &str = "topology.kubernetes.io/zone";

/// The task that keeps the proxy's table.
pub(crate) struct ServiceProxy {
    config: ServiceProxyConfig,
    view: NodeView,
    balancer: Arc<NodeBalancer>,
    ignored_ips: Arc<IgnoredIps>,
    /// The ranges of service addresses.
    ranges: watch::Receiver<Vec<IpNetwork>>,
    state: ProxyState,
}

/// The properties of the node, as they change.
pub(crate) struct NodeProperties {
    /// The Node object. None until the API server has answered.
    pub(crate) object: watch::Receiver<Option<Arc<Node>>>,
    /// Address ranges of the node's pods. Used while the Node object is unknown.
    pub(crate) pod_ranges: watch::Receiver<Vec<IpNetwork>>,
    /// Addresses of the node. Used while the Node object is unknown.
    pub(crate) addresses: watch::Receiver<Vec<IpAddr>>,
}

/// The reason why the table must be replaced.
enum Replace {
    /// The properties of the node or the ranges of services have changed.
    ViewChanged,
    ForeignChange,
    Failed,
}

/// A change of services.
enum Change {
    /// The change takes less time than the wake-up of another thread. A second read of the cache could return larger
    /// states, so these states are committed.
    Short(Vec<State>),
    /// The change is committed on another thread.
    Long(BTreeSet<Key>),
}

// === impl ServiceProxy ===

impl ServiceProxy {
    /// A proxy for this node. `served_here` has the addresses that the node serves itself. `overlay_port` is the UDP
    /// port of the overlay.
    pub(crate) fn new(
        config: ServiceProxyConfig,
        node_name: &str,
        served_here: &[IpAddr],
        overlay_port: Option<u16>,
        balancer: Arc<NodeBalancer>,
    ) -> Self {
        let view = NodeView {
            name: node_name.to_owned(),
            served_here: served_here.to_vec(),
            external_ips: config.external_ips.clone(),
            load_balancer_ips: config.load_balancer_ips.clone(),
            node_port_addresses: config.node_port_addresses.clone(),
            overlay_port,
            ..NodeView::default()
        };
        let ranges = watch::channel(Vec::new()).1;
        let recorder = balancer.recorder().clone();
        let ignored_ips = Arc::new(IgnoredIps::new(recorder, node_name, config.external_ips.clone()));
        Self { config, view, balancer, ignored_ips, ranges, state: ProxyState::default() }
    }

    /// Whether the table is current.
    pub(crate) fn state(&self) -> ProxyState {
        self.state.clone()
    }

    /// Runs until dropped. Services work while the table exists, even after the agent has ended.
    pub(crate) async fn run(mut self, services: ServiceCache, mut node: NodeProperties) {
        // With `br_netfilter`, the built-in network enables the IP layer's filters for its own bridge. For any other
        // bridge, the program that makes the bridge decides.
        self.view.bridge_bypasses_filters = !coracle_cni::filters_bridges();
        let changes = services.subscribe();
        // The watch ends with this task.
        let mut watch_of_ranges = JoinSet::new();
        let (ranges, received) = watch::channel(Vec::new());
        self.ranges = received;
        watch_of_ranges.spawn(services.clone().watch_ranges(ranges).boxed());
        if !self.wait_for_services(&services, &node).await {
            return;
        }
        let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
        let mut repair = RepairBackoff::default();
        loop {
            match self.keep(&services, &changes, &mut node, &mut backoff).await {
                Ok(Replace::ViewChanged) => {}
                Ok(Replace::ForeignChange) => {
                    tracing::info!(
                        table = self.config.table,
                        "the table of services was changed by another process, repairing it"
                    );
                    repair.before_repair().await;
                }
                Ok(Replace::Failed) => {
                    self.state.fail_change();
                    tokio::time::sleep(FIRST_BACKOFF).await;
                }
                Err(error) => {
                    self.state.fail_change();
                    tracing::warn!(error = chain(&error), "cannot program services, retrying");
                    tokio::time::sleep(backoff.next_delay()).await;
                }
            }
        }
    }

    /// Waits until the services are known: until the first lists, or until stored services are used. Returns false if
    /// the agent ends.
    async fn wait_for_services(&self, services: &ServiceCache, node: &NodeProperties) -> bool {
        let (mut progress, mut object) = (services.changes(), node.object.clone());
        let listed = async {
            let is_listed =
                progress.wait_for(|progress| progress.listed && progress.slices_listed).await.is_ok();
            is_listed && object.wait_for(Option::is_some).await.is_ok()
        };
        let mut has_stored = services.has_stored();
        let stored = async {
            let is_used = has_stored.wait_for(|has_stored| *has_stored).await.is_ok();
            if !is_used || !self.takes_stored(services).await {
                std::future::pending::<()>().await;
            }
        };
        // Cancel-safe: both arms only read, except that `takes_stored` can create a mark file. The first lists cause
        // its removal.
        tokio::select! {
            is_listed = listed => is_listed,
            () = stored => {
                tracing::info!("the API server does not answer, programming the stored services");
                true
            }
        }
    }

    /// Whether the stored services are programmed, see [`ServiceCache::take_stored`]. They are not programmed if the
    /// agent cannot determine whether the kernel has the table.
    async fn takes_stored(&self, services: &ServiceCache) -> bool {
        let (table, view, services) = (self.config.table.clone(), self.view.clone(), services.clone());
        let decide = move || {
            let has_table = Proxy::open(&table, view).and_then(|mut proxy| proxy.is_intact());
            has_table.is_ok_and(|has_table| services.take_stored(has_table))
        };
        let decided = coracle_threads::spawn_blocking(decide).await;
        decided.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }

    /// The view with the current properties of the node.
    fn current_view(&mut self, node: &mut NodeProperties) -> NodeView {
        let mut view = self.view.clone();
        node.update(&mut view);
        view.service_ranges.clone_from(&self.ranges.borrow_and_update());
        view
    }

    /// A function that reads a service for the proxy, and reports its ignored addresses. A service of another proxy has
    /// no state. A refused load balancer has no node addresses.
    fn reader(&self, services: &ServiceCache) -> impl Fn(Key) -> State + Send + use<> {
        let (cache, permit) = (services.clone(), self.permit());
        move |key| {
            let state = cache.state(&key);
            permit((key, state))
        }
    }

    /// The second part of [`reader`](Self::reader). The function gets a state that was read from the cache.
    fn permit(&self) -> impl Fn(State) -> State + Send + use<> {
        let (balancer, ignored_ips) = (Arc::clone(&self.balancer), Arc::clone(&self.ignored_ips));
        let addresses = self.view.addresses.clone();
        move |(key, state)| {
            let state = state.filter(|state| !has_other_proxy(&state.service));
            ignored_ips.report(&key, state.as_ref().map(|state| &*state.service));
            let state = balancer.permit(&key, state, &addresses);
            (key, state)
        }
    }

    /// Applies changes of services.
    async fn change(
        &self,
        services: &ServiceCache,
        mut proxy: Proxy,
        changed: BTreeSet<Key>,
    ) -> Result<Proxy, TableError> {
        let are_small = changed.len() <= SHORT_MAX && proxy.are_small(changed.iter());
        let states = match Change::of(changed, are_small, |key| services.state(key)) {
            Change::Short(states) => states,
            Change::Long(changed) => {
                let states = changed.into_iter().map(self.reader(services));
                return blocking(proxy, move |proxy| proxy.change(states)).await;
            }
        };
        let are_flows_stale = proxy.change_table(states.into_iter().map(self.permit()))?;
        match are_flows_stale {
            true => {
                let delete = |proxy: &mut Proxy| {
                    proxy.delete_stale_flows();
                    Ok(())
                };
                blocking(proxy, delete).await
            }
            false => Ok(proxy),
        }
    }

    /// Replaces the table and applies changes, until it must be replaced again.
    async fn keep(
        &mut self,
        services: &ServiceCache,
        changes: &Subscription,
        node: &mut NodeProperties,
        backoff: &mut Backoff,
    ) -> Result<Replace, TableError> {
        self.state.begin_change();
        self.view = self.current_view(node);
        let proxy = Proxy::open(&self.config.table, self.view.clone())?;
        let author = proxy.author();
        changes.take();
        let triggers = services.take_trigger_times();
        self.balancer.withdraw();
        let (keys, read, view) = (services.keys(), self.reader(services), self.view.clone());
        let mut proxy = blocking(proxy, move |proxy| proxy.replace(view, keys.into_iter().map(read))).await?;
        // Open the monitor after the replacement, because the notifications of the replacement may exceed the buffer.
        let mut monitor = Monitor::open().map_err(TableError::Socket)?;
        if !proxy.is_intact()? {
            return Ok(Replace::ForeignChange);
        }
        backoff.reset();
        self.state.end_change(&triggers);
        self.balancer.end_transaction();
        loop {
            // Each arm is cancel-safe. Keys stay in the subscription until they are returned, and a change of the node
            // stays marked. Notifications that are unread at the end of the loop are not needed, because the table is
            // replaced next.
            tokio::select! {
                changed = changes.next() => {
                    self.state.begin_change();
                    let triggers = services.take_trigger_times();
                    match self.change(services, proxy, changed).await {
                        Ok(applied) => {
                            proxy = applied;
                            self.state.end_change(&triggers);
                            self.balancer.end_transaction();
                        }
                        Err(error) => {
                            tracing::warn!(error = chain(&error), "cannot change services, replacing the table");
                            return Ok(Replace::Failed);
                        }
                    }
                }
                () = self.balancer.retry_is_due() => changes.add(&self.balancer.forget_refused()),
                () = view_changed(node, &mut self.ranges) => {
                    if self.current_view(node) != self.view {
                        return Ok(Replace::ViewChanged);
                    }
                }
                foreign = monitor.foreign_change(&self.config.table, author) => {
                    return foreign.map(|()| Replace::ForeignChange).map_err(TableError::Socket);
                }
            }
        }
    }
}

// === impl NodeProperties ===

impl NodeProperties {
    /// Sets the properties of the view.
    fn update(&mut self, view: &mut NodeView) {
        let object = self.object.borrow_and_update().clone();
        let (ranges, addresses) = (self.pod_ranges.borrow_and_update(), self.addresses.borrow_and_update());
        if object.is_some() {
            return update_node(view, object.as_deref());
        }
        view.pod_networks.clone_from(&ranges);
        view.addresses.clone_from(&addresses);
    }
}

// === impl Change ===

impl Change {
    /// `are_small` is true if there are few services and their programs in the table are small.
    fn of(changed: BTreeSet<Key>, are_small: bool, read: impl Fn(&Key) -> Option<ServiceState>) -> Self {
        if !are_small {
            return Self::Long(changed);
        }
        let states: Vec<State> = changed.iter().map(|key| (key.clone(), read(key))).collect();
        // The check of a load balancer may list all sockets, which takes longer.
        let is_light = |ServiceState { service, slices }: &ServiceState| {
            !is_checked(service) && weight(service, slices) <= WEIGHT_MAX
        };
        match states.iter().all(|(_, state)| state.as_ref().is_none_or(is_light)) {
            true => Self::Short(states),
            false => Self::Long(changed),
        }
    }
}

/// Upper bound of the elements of a service in the table, with its targets.
fn weight(service: &Service, slices: &[Arc<EndpointSlice>]) -> usize {
    let Some(spec) = &service.spec else { return 0 };
    let balancer = service.status.as_ref().and_then(|status| status.load_balancer.as_ref());
    let length = |list: Option<&Vec<String>>| list.map_or(0, Vec::len);
    let addresses = length(spec.external_ips.as_ref())
        + length(spec.load_balancer_source_ranges.as_ref())
        + balancer.and_then(|balancer| balancer.ingress.as_ref()).map_or(0, Vec::len);
    let endpoints: usize = slices.iter().map(|slice| slice.endpoints.len() + slice.ports.len()).sum();
    spec.ports.as_ref().map_or(0, Vec::len).saturating_mul(1 + addresses + endpoints)
}

/// Returns after a change of the node's properties or of the ranges of services. Cancel safe: a change stays marked
/// until it is read.
async fn view_changed(node: &mut NodeProperties, ranges: &mut watch::Receiver<Vec<IpNetwork>>) {
    tokio::select! {
        () = changed(&mut node.object) => {}
        () = changed(&mut node.pod_ranges) => {}
        () = changed(&mut node.addresses) => {}
        () = changed(ranges) => {}
    }
}

/// Returns after a change. Never returns if the channel is closed.
async fn changed<T>(receiver: &mut watch::Receiver<T>) {
    if receiver.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// Runs a transaction, which blocks until the kernel answers.
async fn blocking(
    mut proxy: Proxy,
    act: impl FnOnce(&mut Proxy) -> Result<(), TableError> + Send + 'static,
) -> Result<Proxy, TableError> {
    let done = coracle_threads::spawn_blocking(move || act(&mut proxy).map(|()| proxy)).await;
    match done {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

/// Sets the properties of the view that come from the Node object.
pub(crate) fn update_node(view: &mut NodeView, node: Option<&Node>) {
    let Some(node) = node else { return };
    view.zone = node.metadata.labels.as_ref().and_then(|labels| labels.get(ZONE)).cloned();
    let spec = node.spec.as_ref();
    let ranges = spec.and_then(|spec| spec.pod_cidrs.clone()).unwrap_or_default();
    let addresses = node.status.as_ref().and_then(|status| status.addresses.as_ref()).into_iter().flatten();
    let addresses = addresses.filter(|address| matches!(address.type_.as_str(), "InternalIP" | "ExternalIP"));
    view.addresses = addresses.filter_map(|address| address.address.parse().ok()).collect();
    view.pod_networks = ranges.iter().filter_map(|range| range.parse().ok()).collect();
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_weight_of_a_service_grows_with_its_ports_addresses_and_endpoints() {
        let service = |ports: usize, addresses: usize| -> Service {
            let ports = vec![json!({"port": 80}); ports];
            let spec = json!({"ports": ports, "externalIPs": vec!["192.0.2.1"; addresses]});
            serde_json::from_value(json!({"spec": spec})).unwrap()
        };
        let slice = |endpoints: usize| -> Arc<EndpointSlice> {
            let endpoints = vec![json!({"addresses": ["10.0.0.1"]}); endpoints];
            let slice = json!({"metadata": {}, "addressType": "IPv4", "endpoints": endpoints, "ports": [{"port": 80}]});
            Arc::new(serde_json::from_value(slice).unwrap())
        };
        assert_eq!(weight(&Service::default(), &[slice(9)]), 0, "no ports");
        assert_eq!(weight(&service(2, 0), &[]), 2);
        assert!(weight(&service(1, 0), &[slice(10)]) <= WEIGHT_MAX, "a usual service");
        for large in [(service(100, 10), slice(0)), (service(1, 600), slice(0)), (service(1, 0), slice(600))]
        {
            assert!(weight(&large.0, &[large.1]) > WEIGHT_MAX);
        }
    }

    #[test]
    fn a_change_is_decided_from_the_states_that_are_committed() {
        let service = |kind: &str| -> ServiceState {
            let service = json!({"metadata": {"name": "s"}, "spec": {"type": kind, "ports": [{"port": 80}]}});
            let service = Arc::new(serde_json::from_value(service).unwrap());
            ServiceState { service, slices: Vec::new() }
        };
        let changed = || BTreeSet::from([Key::new("n", "s")]);
        // The service becomes a load balancer after the first read.
        let kinds = std::cell::RefCell::new(vec!["LoadBalancer", "ClusterIP"]);
        let read = |_: &Key| kinds.borrow_mut().pop().map(service);
        let Change::Short(states) = Change::of(changed(), true, read) else { panic!("a small service") };
        assert_eq!(states[0].1.as_ref().unwrap(), &service("ClusterIP"));
        assert_eq!(kinds.borrow().len(), 1, "each service is read once");
        assert!(matches!(Change::of(changed(), true, |_| Some(service("LoadBalancer"))), Change::Long(_)));
        assert!(matches!(Change::of(changed(), true, |_| None), Change::Short(_)));
        assert!(matches!(Change::of(changed(), false, |_| None), Change::Long(_)));
    }

    /// The sender of the Node object, and properties without it.
    fn node_properties() -> (watch::Sender<Option<Arc<Node>>>, NodeProperties) {
        let (sender, object) = watch::channel(None);
        let pod_ranges = watch::channel(vec!["10.42.0.0/24".parse().unwrap()]).1;
        let addresses = watch::channel(vec!["192.0.2.1".parse().unwrap()]).1;
        (sender, NodeProperties { object, pod_ranges, addresses })
    }

    #[test]
    fn a_node_without_its_object_has_its_own_addresses_and_the_ranges_of_an_earlier_run() {
        let ((sender, mut node), mut view) = (node_properties(), NodeView::default());
        node.update(&mut view);
        let known = NodeView {
            pod_networks: vec!["10.42.0.0/24".parse().unwrap()],
            addresses: vec!["192.0.2.1".parse().unwrap()],
            ..NodeView::default()
        };
        assert_eq!(view, known);
        let object = json!({"metadata": {}, "spec": {"podCIDRs": ["10.42.7.0/24"]}});
        sender.send(Some(Arc::new(serde_json::from_value(object).unwrap()))).unwrap();
        node.update(&mut view);
        let received =
            NodeView { pod_networks: vec!["10.42.7.0/24".parse().unwrap()], ..NodeView::default() };
        assert_eq!(view, received);
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_of_the_node_is_seen_after_the_end_of_the_ranges() {
        let (nodes, mut node) = node_properties();
        let mut ranges = watch::channel(Vec::new()).1;
        let mut waiting = std::pin::pin!(view_changed(&mut node, &mut ranges));
        tokio::select! {
            biased;
            () = &mut waiting => panic!("nothing changed"),
            () = std::future::ready(()) => {}
        }
        nodes.send(Some(Arc::default())).unwrap();
        tokio::time::timeout(Duration::from_secs(60), waiting).await.expect("the change");
    }
}
