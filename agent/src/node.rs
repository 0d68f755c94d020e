//! The node in the API: registered once, its status written when it changed, its lease renewed.
//!
//! ```text
//! start ──► get or create Node ──► patch status ──► watch own Node ─┬─ podCIDR ──► network ──► Ready
//!                                                                  ├─ a fact changed ──► patch status
//!                                                                  └─ gone ──► create again
//! lease: one timer of 10 s, nothing else ever wakes an idle node; each turn asks plugins of others (STATUS)
//! ```
//! The lease is the heartbeat; a status in which only the time would differ is not written. The network is
//! told its ranges as soon as they are seen, and Ready=True goes out with the next patch, at once.

mod address;
mod disk;
mod eviction;
mod facts;
mod images;
mod lease;
mod network;
mod news;
mod plan;
mod register;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use coracle_cni::{Network, Overlay, OverlayConfig, OverlayError};
use coracle_error_chain::chain;
use coracle_values::quantity::{millis_of, value_of};
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::{ContainerImage, Node, NodeSystemInfo, Taint};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::overlay::{OverlayAgent, State, one_of_each};
use crate::pod::Recorder;

/// What can be set about the node itself.
#[derive(Clone, Debug)]
pub struct NodeConfig {
    /// Its name in the API.
    pub name: String,
    /// Its addresses, the primary one first; empty: found from the routes.
    pub ips: Vec<IpAddr>,
    /// Labels beside those that every node has.
    pub labels: BTreeMap<String, String>,
    /// Taints that it is created with.
    pub taints: Vec<Taint>,
    /// Whether to create the Node object if it is not there.
    pub register: bool,
    /// Where the kubelet API listens.
    pub kubelet_port: u16,
    /// How many pods it takes.
    pub max_pods: u32,
    /// How long its lease lasts, in seconds.
    pub lease_seconds: u16,
    /// Thresholds below which the node is under pressure.
    pub eviction: EvictionThresholds,
    /// Resources reserved for the system and for the node's own processes, by name. Pods get neither.
    pub reserved: [BTreeMap<String, String>; 2],
    /// The file system whose size is the ephemeral storage.
    pub state_dir: PathBuf,
    /// Name and version of the runtime, `coracle://0.1.0`.
    pub runtime_version: String,
    /// How pods of other nodes are reached; none: not by us.
    pub overlay: Option<OverlayConfig>,
}

/// What the node is, found once at the start.
#[derive(Clone, Debug)]
pub struct NodeFacts {
    /// Its name in the API.
    pub name: String,
    /// Its addresses, the primary one first.
    pub ips: Vec<IpAddr>,
    /// All that there is.
    pub capacity: BTreeMap<String, Quantity>,
    /// What pods may have of it.
    pub allocatable: BTreeMap<String, Quantity>,
    /// Kernel, system and version.
    pub info: NodeSystemInfo,
}

/// Why the node cannot be described.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A file of the kernel's could not be read.
    #[error("cannot read {path}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// A reserved amount is no quantity.
    #[error("reserved {name} {value:?} is not a quantity")]
    Reserved {
        /// Which resource.
        name: String,
        /// What stands there.
        value: String,
    },
    /// The overlay between nodes cannot be used.
    #[error("cannot open the overlay between nodes")]
    Overlay(#[source] OverlayError),
}

/// The node's part of the agent.
pub struct NodeAgent {
    config: NodeConfig,
    facts: Arc<NodeFacts>,
    client: kube::Client,
    recorder: Recorder,
    network: Network,
    node: watch::Sender<Option<Arc<Node>>>,
    /// The images that are here; none before they were asked for.
    images: watch::Sender<Option<Vec<ContainerImage>>>,
    /// Changes at each turn of the lease's timer.
    pulse: watch::Sender<()>,
    /// What the network's plugins said last.
    network_said: watch::Sender<network::Said>,
    /// The node's addresses now.
    ips: watch::Sender<Vec<IpAddr>>,
    /// The ranges that the network has been given; empty before.
    ranges: watch::Sender<Vec<IpNetwork>>,
    overlay: Option<Overlay>,
    overlay_state: watch::Sender<State>,
}

// === impl NodeFacts ===

impl NodeFacts {
    /// The primary address.
    pub fn ip(&self) -> Option<IpAddr> {
        self.ips.first().copied()
    }

    /// Cores in thousandths.
    pub fn cpu_millis(&self) -> i64 {
        self.capacity.get("cpu").map_or(0, millis_of)
    }

    /// Bytes of memory.
    pub fn memory(&self) -> i64 {
        self.capacity.get("memory").map_or(0, value_of)
    }

    /// Bytes of memory that pods may have.
    pub fn memory_allocatable(&self) -> i64 {
        self.allocatable.get("memory").map_or(0, value_of)
    }
}

// === impl NodeAgent ===

impl NodeAgent {
    /// Finds out what the node is. Nothing is sent yet.
    ///
    /// # Errors
    /// When the kernel does not say, or a setting is no quantity.
    pub(crate) fn new(
        config: NodeConfig,
        (client, recorder): (kube::Client, Recorder),
        network: Network,
    ) -> Result<NodeAgent, NodeError> {
        let facts = Arc::new(facts::find(&config)?);
        let overlay = config.overlay.clone().map(Overlay::open).transpose().map_err(NodeError::Overlay)?;
        Ok(NodeAgent {
            ips: watch::channel(facts.ips.clone()).0,
            config,
            facts,
            client,
            recorder,
            network,
            node: watch::channel(None).0,
            images: watch::channel(None).0,
            pulse: watch::channel(()).0,
            network_said: watch::channel(Some(Ok(()))).0,
            ranges: watch::channel(Vec::new()).0,
            overlay,
            overlay_state: watch::channel(State::default()).0,
        })
    }

    /// Sees to it that no other agent of the network namespace takes its overlay for its own.
    ///
    /// # Errors
    /// When another one's has the same device, or routes of the same number.
    pub async fn lock_names(&mut self) -> Result<(), NodeError> {
        match &mut self.overlay {
            Some(overlay) => overlay.lock_names().await.map_err(NodeError::Overlay),
            None => Ok(()),
        }
    }

    /// What the node is.
    pub fn facts(&self) -> Arc<NodeFacts> {
        self.facts.clone()
    }

    /// The Node object as last seen: labels and taints for admission.
    pub fn node(&self) -> watch::Receiver<Option<Arc<Node>>> {
        self.node.subscribe()
    }

    /// Changes with each renewal of the node's lease.
    pub(crate) fn pulse(&self) -> watch::Receiver<()> {
        self.pulse.subscribe()
    }

    /// The node's addresses, the primary one first, as they change.
    pub fn ips(&self) -> watch::Receiver<Vec<IpAddr>> {
        self.ips.subscribe()
    }

    /// Where to put the images that are here.
    pub fn images(&self) -> watch::Sender<Option<Vec<ContainerImage>>> {
        self.images.clone()
    }

    /// Keeps the node in the API until `shutdown`, whether or not the API can be reached.
    pub async fn run(mut self, shutdown: CancellationToken) {
        self.set_first_mtu().await;
        drop(self.network_said.send_replace(network::first_word(&self.network).await));
        let (overlay, ips) = (self.overlay_agent(), self.ips.clone());
        let follows = self.config.ips.is_empty();
        // The overlay looks after the addresses itself: what it makes of them must fit.
        let overlay = async {
            match overlay {
                Some(overlay) => overlay.run().await,
                None if follows => address::follow(&ips).await,
                None => std::future::pending().await,
            }
        };
        let lease = lease::keep(
            self.client.clone(),
            (self.config.name.clone(), self.config.lease_seconds),
            self.node.subscribe(),
            self.pulse.clone(),
        );
        let asked = network::ask(self.network.clone(), self.pulse.subscribe(), self.network_said.clone());
        tokio::select! {
            // All are dropped for good at the end: there is nothing to be lost.
            () = shutdown.cancelled() => {}
            () = lease => {}
            () = asked => {}
            () = register::keep(&self) => {}
            () = overlay => {}
        }
    }

    /// The first pod must have it already.
    async fn set_first_mtu(&mut self) {
        let Some(overlay) = &mut self.overlay else {
            // What an earlier agent's overlay led is not led any more.
            if let Err(error) = self.network.set_unmasqueraded(Vec::new()).await {
                tracing::warn!(%error, "packets may leave with the addresses of pods");
            }
            return;
        };
        let addresses = one_of_each(&self.ips.borrow());
        match overlay.mtu(&addresses) {
            Ok(mtu) => drop(self.network.set_mtu(mtu).await),
            Err(error) => {
                tracing::warn!(error = chain(&error), "the MTU of the way to other nodes is not known")
            }
        }
    }

    fn overlay_agent(&mut self) -> Option<OverlayAgent> {
        Some(OverlayAgent {
            name: self.config.name.clone(),
            client: self.client.clone(),
            overlay: self.overlay.take()?,
            network: self.network.clone(),
            ips: self.ips.clone(),
            ips_are_set: !self.config.ips.is_empty(),
            ranges: self.ranges.subscribe(),
            state: self.overlay_state.clone(),
            pulse: self.pulse.subscribe(),
            unmasqueraded: None,
        })
    }
}

pub use eviction::{EvictionThresholds, Threshold};

pub(crate) use address::find_again as find_addresses_again;
pub(crate) use disk::{Resource, Shortage, disk_shortage};
pub(crate) use facts::{is_ours, kib};
pub(crate) use images::keep as keep_images;
pub(crate) use register::pod_cidrs;

/// The addresses that a node without a setting for them reports: for its certificate, made before it.
pub fn own_addresses() -> Vec<IpAddr> {
    address::find()
}

#[cfg(test)]
mod tests;
