//! The Node object and its lease: registration, status updates, heartbeat.
//!
//! ```text
//! start ──► get or create Node ──► patch status ──► watch own Node ─┬─ podCIDR ──► network ──► Ready
//!                                                                  ├─ a fact changed ──► patch status
//!                                                                  └─ gone ──► create again
//! lease: one timer (default: 10 s), the only frequent timer of an idle node; each interval polls external CNI plugins
//!        (STATUS), also while the API server does not respond
//! ```
//! The lease is the heartbeat. A status that would differ in times only is not written. The network gets its ranges
//! as soon as they are assigned, and Ready=True follows with the next patch, at once.

mod cloud;
mod config;
mod devices;
mod disk;
mod events;
mod eviction;
mod images;
mod lease;
mod network;
mod overlay_changes;
mod plan;
mod pressure;
mod properties;
mod register;
mod startup;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64};

use coracle_cni::Overlay;
use coracle_error_chain::chain;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::{ContainerImage, Node};
use prometheus::core::Collector;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::event_recorder::Recorder;
use crate::overlay::{OverlayAgent, State, one_of_each};
use crate::own_address;
use startup::Startup;

/// The part of the agent that maintains the Node object.
pub struct NodeAgent {
    config: NodeConfig,
    properties: Arc<MachineProperties>,
    client: kube::Client,
    recorder: Recorder,
    network: PodNetwork,
    node: watch::Sender<Option<Arc<Node>>>,
    /// Revision of the last status whose events were recorded; 0 means none.
    recorded_revision: AtomicU64,
    /// Whether the node was cordoned in the last version that was received. Responses to writes do not count: a cordon
    /// in such a response is received later.
    is_cordoned: AtomicBool,
    /// Images in the store. None before the first list.
    images: watch::Sender<Option<Vec<ContainerImage>>>,
    /// Numbers of the devices of device plugins.
    devices: watch::Sender<DeviceCounts>,
    /// Changes once in each renewal interval of the lease.
    heartbeats: watch::Sender<()>,
    /// Changes with each renewal of the lease.
    renewals: watch::Sender<()>,
    /// Result of the network's last STATUS call.
    network_status: watch::Sender<network::LastStatus>,
    /// The node's current addresses.
    ips: watch::Sender<Vec<IpAddr>>,
    /// Address ranges of the network. Empty before the network gets its first range.
    ranges: watch::Sender<Vec<IpNetwork>>,
    pressure: PressureConditions,
    overlay: Option<Overlay>,
    overlay_state: watch::Sender<State>,
    startup: Startup,
}

// === impl NodeAgent ===

impl NodeAgent {
    /// Reads the properties of the node. No request is sent yet.
    ///
    /// # Errors
    /// When a kernel file cannot be read, a setting is not a quantity, or the overlay cannot be opened. Also when an
    /// overlay is configured although the container runtime sets up the network.
    pub(crate) fn new(
        config: NodeConfig,
        client: kube::Client,
        recorder: Recorder,
        network: PodNetwork,
    ) -> Result<NodeAgent, NodeError> {
        if config.overlay.is_some() && network.cni().is_none() {
            return Err(NodeError::OverlayOfRuntime);
        }
        let properties = Arc::new(properties::find(&config)?);
        let overlay = config.overlay.clone().map(Overlay::open).transpose().map_err(NodeError::Overlay)?;
        let pressure = PressureConditions::new(config.eviction.pressure_transition);
        Ok(NodeAgent {
            ips: watch::channel(properties.ips.clone()).0,
            config,
            properties,
            client,
            recorder,
            network,
            node: watch::channel(None).0,
            recorded_revision: AtomicU64::new(0),
            is_cordoned: AtomicBool::new(false),
            images: watch::channel(None).0,
            devices: watch::channel(DeviceCounts::new()).0,
            heartbeats: watch::channel(()).0,
            renewals: watch::channel(()).0,
            network_status: watch::channel(Some(Ok(()))).0,
            ranges: watch::channel(Vec::new()).0,
            pressure,
            overlay,
            overlay_state: watch::channel(State::default()).0,
            startup: Startup::begin(),
        })
    }

    /// This agent, with a channel on which it sends once in each renewal interval of the lease.
    pub(crate) fn with_heartbeats(self, heartbeats: watch::Sender<()>) -> NodeAgent {
        NodeAgent { heartbeats, ..self }
    }

    /// Reserves the overlay's device and route protocol number for this agent in its network namespace.
    ///
    /// # Errors
    /// When another agent has reserved either of them, or the reservation fails.
    pub async fn claim_overlay(&mut self) -> Result<(), NodeError> {
        match &mut self.overlay {
            Some(overlay) => overlay.lock_names().await.map_err(NodeError::Overlay),
            None => Ok(()),
        }
    }

    /// The metrics of the node's startup, for a registry.
    pub(crate) fn startup_metrics(&self) -> Vec<Box<dyn Collector>> {
        self.startup.collectors()
    }

    /// Properties of the node.
    pub fn properties(&self) -> Arc<MachineProperties> {
        self.properties.clone()
    }

    /// The Node object as last received: labels and taints for admission.
    pub fn node(&self) -> watch::Receiver<Option<Arc<Node>>> {
        self.node.subscribe()
    }

    /// Changes once in each renewal interval of the lease, also while the API server does not respond.
    pub(crate) fn heartbeats(&self) -> watch::Receiver<()> {
        self.heartbeats.subscribe()
    }

    /// Changes with each renewal of the node's lease.
    pub(crate) fn renewals(&self) -> watch::Receiver<()> {
        self.renewals.subscribe()
    }

    /// The node's conditions of pressure. All clones have the same observations.
    pub(crate) fn pressure(&self) -> PressureConditions {
        self.pressure.clone()
    }

    /// The node's addresses, the primary one first, as they change.
    pub fn ips(&self) -> watch::Receiver<Vec<IpAddr>> {
        self.ips.subscribe()
    }

    /// The address ranges of the node's pods, as they change. Until the API server answers, they come from an earlier
    /// run.
    pub(crate) fn ranges(&self) -> watch::Receiver<Vec<IpNetwork>> {
        self.ranges.subscribe()
    }

    /// The sender for the images in the store.
    pub fn images(&self) -> watch::Sender<Option<Vec<ContainerImage>>> {
        self.images.clone()
    }

    /// The sender for the numbers of devices.
    pub(crate) fn devices(&self) -> watch::Sender<DeviceCounts> {
        self.devices.clone()
    }

    /// Maintains the Node object until `shutdown`, even while the API is not reachable.
    pub async fn run(mut self, shutdown: CancellationToken) {
        self.set_first_mtu().await;
        drop(self.network_status.send_replace(network::first_status(&self.network).await));
        let (overlay, ips) = (self.overlay_agent(), self.ips.clone());
        let follows = self.config.ips.is_empty();
        // The overlay updates the addresses itself, because its configuration depends on them.
        let overlay = async {
            match overlay {
                Some(overlay) => overlay.run().await,
                None if follows => own_address::follow(&ips).await,
                None => std::future::pending().await,
            }
        };
        let lease = lease::keep(
            self.client.clone(),
            self.config.name.clone(),
            self.config.lease_seconds,
            self.node.subscribe(),
            lease::Heartbeats { intervals: self.heartbeats.clone(), renewals: self.renewals.clone() },
        );
        let polling =
            network::poll(self.network.clone(), self.heartbeats.subscribe(), self.network_status.clone());
        tokio::select! {
            // Cancel-safe: all arms run until the agent ends.
            () = shutdown.cancelled() => {}
            () = lease => {}
            () = polling => {}
            () = register::keep(&self) => {}
            () = overlay => {}
        }
    }

    /// Sets the MTU of the pod network before the first pod starts.
    async fn set_first_mtu(&mut self) {
        let Some(network) = self.network.cni() else { return };
        let Some(overlay) = &mut self.overlay else {
            // The overlay of an earlier agent routed ranges that are not routed now, so packets to them must be
            // masqueraded.
            if let Err(error) = network.set_unmasqueraded(Vec::new()).await {
                tracing::warn!(%error, "cannot masquerade packets to other nodes' pods");
            }
            return;
        };
        let addresses = one_of_each(&self.ips.borrow());
        match overlay.mtu(&addresses) {
            Ok(mtu) => drop(network.set_mtu(mtu).await),
            Err(error) => tracing::warn!(error = chain(&error), "cannot find the MTU of the overlay"),
        }
    }

    fn overlay_agent(&mut self) -> Option<OverlayAgent> {
        let network = self.network.cni()?.clone();
        Some(OverlayAgent {
            name: self.config.name.clone(),
            client: self.client.clone(),
            overlay: self.overlay.take()?,
            network,
            ips: self.ips.clone(),
            ips_are_set: !self.config.ips.is_empty(),
            ranges: self.ranges.subscribe(),
            state: self.overlay_state.clone(),
            heartbeats: self.heartbeats.subscribe(),
            unmasqueraded: None,
        })
    }
}

pub use config::{NodeConfig, NodeError};
pub use eviction::{EvictionThresholds, MinimumReclaim, SoftThreshold, SoftThresholds, Threshold};
pub use network::PodNetwork;
pub use properties::MachineProperties;

pub(crate) use devices::{DeviceCount, DeviceCounts};
pub(crate) use disk::{DiskLevels, DiskShortage, Resource};
pub(crate) use eviction::Shortage;
pub(crate) use images::keep as keep_images;
pub(crate) use pressure::{
    Level, MachineLevels, MachineResource, MachineShortage, Pressure, PressureConditions,
};
pub(crate) use properties::{binary, kib};

/// Addresses of a node without configured addresses. The node's certificate, which is created before the node agent,
/// needs them.
pub fn own_addresses() -> Vec<IpAddr> {
    own_address::find()
}

#[cfg(test)]
mod tests;
