//! The node's pod network: the one entry point of this crate.

use std::net::IpAddr;
use std::path::PathBuf;
use std::sync::Arc;

use ipnetwork::IpNetwork;
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use tracing::{debug, warn};

use crate::conf;
use crate::error::Error;
use crate::ipam::Ipam;
use crate::link::{self, Links};
use crate::netns::Netns;
use crate::nft::{self, Firewall};
use crate::record::{Record, Records};
use crate::sysctl;

/// What the network is called where names are shared with the machine.
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// CNI configuration lists (`/etc/cni/net.d`); the default network alone when absent.
    pub conf_dir: Option<PathBuf>,
    /// Where records and addresses are kept, for example `/run/coracle/cni`.
    pub state_dir: PathBuf,
    /// The bridge that the pods hang on, for example `coracle0`.
    pub bridge: String,
    /// The nftables table that is ours alone, for example `coracle`.
    pub table: String,
    /// MTU of bridge and pods; the kernel's default when absent.
    pub mtu: Option<u32>,
}

/// A sandbox that wants the network.
#[derive(Debug, Clone)]
pub struct Attachment {
    /// The sandbox's id: the key for [`Network::del`].
    pub id: String,
    /// Its network namespace, for example `/proc/42/ns/net`.
    pub netns: PathBuf,
    /// The interface to make inside, `eth0`.
    pub ifname: String,
    /// The pod's namespace, name and uid, as CNI_ARGS would carry them.
    pub pod_namespace: String,
    /// The pod's name.
    pub pod_name: String,
    /// The pod's uid.
    pub pod_uid: String,
    /// Host ports that lead to it.
    pub ports: Vec<PortMapping>,
}

/// One port of the node that leads to one port of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PortMapping {
    /// The node's address to listen on; every one when absent.
    pub host_ip: Option<IpAddr>,
    /// The node's port.
    pub host_port: u16,
    /// The sandbox's port.
    pub container_port: u16,
    /// The transport.
    pub protocol: Protocol,
}

/// A transport protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
    /// SCTP.
    Sctp,
}

impl Protocol {
    /// The name in lower case.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Udp => "udp",
            Self::Sctp => "sctp",
        }
    }
}

/// What a sandbox got.
#[derive(Debug, Clone)]
pub struct Attached {
    /// Its addresses with the prefix of the pod network.
    pub addresses: Vec<IpNetwork>,
    /// The way out, one for each family.
    pub gateways: Vec<IpAddr>,
    /// Hardware address of its interface.
    pub mac: String,
    /// The host's end of the pair.
    pub host_interface: String,
}

/// A sandbox that lives, as told to [`Network::reconcile`].
#[derive(Debug, Clone)]
pub struct Live {
    /// The sandbox's id.
    pub id: String,
    /// Its network namespace.
    pub netns: PathBuf,
}

/// The node's pod network. Clones share one state.
#[derive(Clone)]
pub struct Network {
    inner: Arc<Inner>,
}

struct Inner {
    config: NetworkConfig,
    links: Links,
    records: Records,
    state: Mutex<State>,
    ready: std::sync::RwLock<Option<String>>,
}

#[derive(Default)]
struct State {
    cidrs: Vec<IpNetwork>,
    ipam: Option<Ipam>,
    bridge: u32,
}

// === impl Network ===

impl Network {
    /// Opens the network's records. Nothing is changed in the kernel before
    /// [`set_pod_cidrs`](Self::set_pod_cidrs), unless a configuration list says which ranges to use:
    /// then the network is made at once.
    ///
    /// # Errors
    /// When the state directory cannot be made, a netlink socket cannot be opened, or a configuration list
    /// asks for what cannot be run.
    pub async fn open(mut config: NetworkConfig) -> Result<Self, Error> {
        let conf = config.conf_dir.as_deref().map(conf::read).transpose()?.flatten();
        if let Some(conf) = &conf {
            config.mtu = conf.mtu.or(config.mtu);
            config.bridge = conf.bridge.clone().unwrap_or(config.bridge);
        }
        let records = Records::open(&config.state_dir)?;
        let links = Links::here()?;
        let ready = std::sync::RwLock::new(Some("no pod address range is set".to_owned()));
        let network =
            Self { inner: Arc::new(Inner { config, links, records, state: Mutex::default(), ready }) };
        if let Some(conf) = conf {
            network.set_pod_cidrs(conf.subnets).await?;
        }
        Ok(network)
    }

    /// Sets the node's pod ranges: makes the bridge with each range's first address as gateway, turns
    /// forwarding on and writes the firewall table. Calling it again with the same ranges repairs.
    ///
    /// # Errors
    /// When a range is too small or the kernel refuses.
    pub async fn set_pod_cidrs(&self, cidrs: Vec<IpNetwork>) -> Result<(), Error> {
        let inner = &self.inner;
        let mut state = inner.state.lock().await;
        let ipam = Ipam::open(&inner.config.state_dir.join("networks/coracle"), &cidrs)?;
        sysctl::forwarding(&cidrs)?;
        let bridge = inner.links.ensure_bridge(&inner.config.bridge, inner.config.mtu).await?;
        inner.links.ensure_addresses(bridge, &ipam.gateways()).await?;
        sysctl::route_localnet(&inner.config.bridge)?;
        let mappings = nft::mappings(&inner.records.all());
        self.firewall(&cidrs).replace(&mappings)?;
        *state = State { cidrs, ipam: Some(ipam), bridge };
        drop(state);
        self.set_ready(None);
        Ok(())
    }

    /// Whether pods can be attached.
    ///
    /// # Errors
    /// The reason why not yet.
    pub fn ready(&self) -> Result<(), String> {
        let reason = self.inner.ready.read().unwrap_or_else(std::sync::PoisonError::into_inner);
        reason.clone().map_or(Ok(()), Err)
    }

    /// Gives a sandbox its interface, addresses, routes and host ports (CNI ADD).
    ///
    /// # Errors
    /// When the network is not ready, the range is full, a host port is taken or the kernel refuses;
    /// nothing half-made remains.
    pub async fn add(&self, at: &Attachment) -> Result<Attached, Error> {
        self.ready().map_err(|reason| Error::NotReady { reason })?;
        let record = self.reserve(at).await?;
        match self.wire(at, &record).await {
            Ok(attached) => Ok(attached),
            Err(error) => {
                if let Err(undo) = self.del(&at.id).await {
                    warn!(sandbox = %at.id, error = %undo, "cannot undo a half-made attachment");
                }
                Err(error)
            }
        }
    }

    /// Takes all back that [`add`](Self::add) gave (CNI DEL). A sandbox never added is no error, and the
    /// namespace may be gone.
    ///
    /// # Errors
    /// When the kernel refuses; calling again resumes.
    pub async fn del(&self, id: &str) -> Result<(), Error> {
        let inner = &self.inner;
        let Some(record) = inner.records.get(id) else { return Ok(()) };
        inner.links.delete(&record.host_interface).await?;
        let state = inner.state.lock().await;
        inner.records.remove(id)?;
        if !record.ports.is_empty() {
            self.firewall(&state.cidrs).replace(&nft::mappings(&inner.records.all()))?;
        }
        if let Some(ipam) = &state.ipam {
            ipam.release(id)?;
        }
        Ok(())
    }

    /// Makes addresses, interfaces and firewall what the living sandboxes need, and frees the rest.
    ///
    /// # Errors
    /// The first failure, after everything was tried.
    pub async fn reconcile(&self, live: &[Live]) -> Result<(), Error> {
        let inner = &self.inner;
        let mut first = None;
        for record in inner.records.all() {
            if live.iter().all(|l| l.id != record.id) {
                debug!(sandbox = %record.id, "freeing the network of a sandbox that is gone");
                if let Err(error) = self.del(&record.id).await {
                    first.get_or_insert(error);
                }
            }
        }
        let state = inner.state.lock().await;
        let records = inner.records.all();
        if let Some(ipam) = &state.ipam {
            let owned: Vec<_> =
                records.iter().flat_map(|r| r.addresses.iter().map(|a| (a.ip(), r.id.as_str()))).collect();
            if let Err(error) = ipam.rebuild(&owned) {
                first.get_or_insert(error);
            }
        }
        if state.bridge != 0 {
            let wanted: Vec<&str> = records.iter().map(|r| r.host_interface.as_str()).collect();
            if let Err(error) = inner.links.delete_ports_except(state.bridge, &wanted).await {
                first.get_or_insert(error);
            }
        }
        first.map_or(Ok(()), Err)
    }

    /// Removes the bridge, the firewall table and every record: the node is being taken down.
    ///
    /// # Errors
    /// The first failure, after everything was tried.
    pub async fn remove(&self) -> Result<(), Error> {
        let inner = &self.inner;
        let reconciled = self.reconcile(&[]).await;
        let firewall = self.firewall(&[]).remove();
        let bridge = inner.links.delete_bridge(&inner.config.bridge).await;
        let files = inner.records.remove_all();
        self.set_ready(Some("the network was removed".to_owned()));
        reconciled.and(firewall).and(bridge).and(files)
    }

    /// Records the sandbox with its addresses before the kernel is touched, so that a crash at any later
    /// instruction leaves a record that `del` and `reconcile` work from.
    async fn reserve(&self, at: &Attachment) -> Result<Record, Error> {
        let inner = &self.inner;
        let state = inner.state.lock().await;
        let Some(ipam) = &state.ipam else {
            return Err(Error::NotReady { reason: "no pod address range is set".to_owned() });
        };
        if let Some(record) = inner.records.get(&at.id) {
            return Ok(record);
        }
        nft::check_ports(&at.ports, &inner.records.all())?;
        let addresses = ipam.reserve(&at.id, &at.ifname)?;
        let record = Record {
            id: at.id.clone(),
            host_interface: link::host_interface(&at.id),
            addresses,
            ports: at.ports.clone(),
        };
        if let Err(error) = inner.records.put(&record) {
            ipam.release(&at.id)?;
            return Err(error);
        }
        Ok(record)
    }

    async fn wire(&self, at: &Attachment, record: &Record) -> Result<Attached, Error> {
        let inner = &self.inner;
        let netns = Netns::open(&at.netns)?;
        let (bridge, gateways) = {
            let state = inner.state.lock().await;
            if !record.ports.is_empty() {
                self.firewall(&state.cidrs).replace(&nft::mappings(&inner.records.all()))?;
            }
            let gateways = state.ipam.as_ref().map(Ipam::gateways).unwrap_or_default();
            (state.bridge, gateways)
        };
        let pair = link::Pair {
            host: &record.host_interface,
            inside: &at.ifname,
            bridge,
            mtu: inner.config.mtu,
            mac: link::hardware_address(&record.addresses),
        };
        inner.links.add_pair(&pair, &netns).await?;
        let inside = Links::inside(&netns)?;
        let gateways: Vec<IpAddr> = gateways.iter().map(IpNetwork::ip).collect();
        inside.configure(&at.ifname, &record.addresses, &gateways).await?;
        Ok(Attached {
            addresses: record.addresses.clone(),
            gateways,
            mac: link::format_mac(pair.mac),
            host_interface: record.host_interface.clone(),
        })
    }

    fn firewall<'a>(&'a self, cidrs: &'a [IpNetwork]) -> Firewall<'a> {
        Firewall { table: &self.inner.config.table, bridge: &self.inner.config.bridge, cidrs }
    }

    fn set_ready(&self, reason: Option<String>) {
        *self.inner.ready.write().unwrap_or_else(std::sync::PoisonError::into_inner) = reason;
    }
}
