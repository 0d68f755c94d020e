//! Resource usage of pods and containers, read from their cgroups on request: there is no periodic sampling.
//!
//! The files of writable layers are counted. Requests for single objects and lists with a filter wait for recent
//! counts, because the agent enforces limits on disk usage with them. Other requests get the last counts.
//! ListContainerStats, ListPodSandboxMetrics and ImageFsInfo also begin counts in the background. ListPodSandboxStats
//! does not, because most of its clients need only processor and memory.
//!
//! All calls read files, some of them many, so they run off the async executor.

mod cgroup;
mod list;

use std::sync::Arc;

use coracle_proto::cri;

use self::cgroup::value;
use crate::cgroup::Cgroups;
use crate::cgroup::driver::Layout;
use crate::clock::now;
use crate::container::Container;
use crate::error::Error;
use crate::namespaces;
use crate::records::{ContainerPhase, Records};
use crate::sandbox::Sandbox;
use crate::sandbox::filter::{matches_id, matches_labels};
use crate::tables::Tables;
use crate::usage::meter::{Disk, Meter, Recount};
use crate::usage::{DEFAULT_INTERFACE, Interface, interfaces};

/// Reads the resource usage of pods and containers.
#[derive(Clone)]
pub(crate) struct StatsService {
    pub(crate) tables: Arc<Tables>,
    pub(crate) records: Arc<Records>,
    pub(crate) cgroups: Arc<Cgroups>,
    pub(crate) layout: Arc<Layout>,
}

/// Bytes and inodes of writable layers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct LayerUsage {
    pub(crate) bytes: u64,
    pub(crate) inodes: u64,
}

// === impl StatsService ===

impl StatsService {
    /// Usage of one container.
    pub(crate) fn container_stats(
        &self,
        request: &cri::ContainerStatsRequest,
    ) -> Result<cri::ContainerStatsResponse, Error> {
        let container = self.tables.container(&request.container_id)?;
        Ok(cri::ContainerStatsResponse { stats: Some(self.stats_of(&container, Recount::Now)) })
    }

    /// Containers that match a filter.
    fn matching_containers(&self, filter: Option<cri::ContainerStatsFilter>) -> Vec<Arc<Container>> {
        let filter = filter.unwrap_or_default();
        let id = self.tables.containers.whole_id(&filter.id);
        let sandbox_id = self.tables.sandboxes.whole_id(&filter.pod_sandbox_id);
        let mut containers = self.tables.containers.all();
        containers.retain(|container| {
            container.visible()
                && matches_id(&container.id, &id)
                && matches_id(&container.record.sandbox_id, &sandbox_id)
                && matches_labels(&container.record.config.labels, &filter.label_selector)
        });
        containers
    }

    /// Usage of one pod.
    pub(crate) fn sandbox_stats(
        &self,
        request: &cri::PodSandboxStatsRequest,
    ) -> Result<cri::PodSandboxStatsResponse, Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.tables.sandbox(id)?;
        Ok(cri::PodSandboxStatsResponse { stats: Some(self.pod_stats_of(&sandbox, Recount::Now)) })
    }

    /// Sandboxes that match a filter.
    fn matching_sandboxes(&self, filter: Option<cri::PodSandboxStatsFilter>) -> Vec<Arc<Sandbox>> {
        let filter = filter.unwrap_or_default();
        let id = self.tables.sandboxes.whole_id(&filter.id);
        let mut sandboxes = self.tables.sandboxes.all();
        sandboxes.retain(|sandbox| {
            matches_id(&sandbox.id, &id) && matches_labels(&sandbox.config().labels, &filter.label_selector)
        });
        sandboxes
    }

    /// Bytes and inodes of all writable layers that are counted. 0 without a count, because the kubelet needs numbers.
    pub(crate) fn writable_usage(&self) -> LayerUsage {
        let containers = self.tables.containers.all();
        let layers =
            containers.iter().filter_map(|container| self.layer_usage(container, Recount::InBackground));
        layers.fold(LayerUsage::default(), |sum, layer| LayerUsage {
            bytes: sum.bytes + layer.bytes,
            inodes: sum.inodes + layer.inodes,
        })
    }

    /// Usage of a container's writable layer. `None` if there is no count yet, and the request does not wait for one.
    pub(crate) fn layer_usage(&self, container: &Container, recount: Recount) -> Option<Disk> {
        let ended = matches!(container.phase(), ContainerPhase::Exited(_));
        container.meter.disk(&self.records.layer_dir(&container.id).join("upper"), ended, recount)
    }

    /// Interfaces of a live pod with its own network. Interfaces of the node belong to no pod.
    pub(crate) fn interfaces_of(&self, sandbox: &Sandbox) -> Option<Vec<Interface>> {
        let live = sandbox.live().filter(|_| namespaces::own_network(sandbox.config()))?;
        let found = interfaces(live.shim.pid());
        found.filter(|_| live.shim.is_alive())
    }

    pub(crate) fn stats_of(&self, container: &Container, recount: Recount) -> cri::ContainerStats {
        let config = &container.record.config;
        let layer = self.layer_usage(container, recount);
        let timestamp = now();
        let group = &container.record.cgroup;
        let cgroups = &self.cgroups;
        let began = match container.started_at() {
            0 => container.record.created_at,
            started_at => started_at,
        };
        let fs_id = self.records.layers_dir().to_string_lossy().into_owned();
        cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes {
                id: container.id.clone(),
                metadata: config.metadata.clone(),
                labels: config.labels.clone(),
                annotations: config.annotations.clone(),
            }),
            cpu: self.cpu(group, &container.meter, began),
            memory: cgroups.memory(group, timestamp),
            writable_layer: layer.map(|layer| cri::FilesystemUsage {
                timestamp: layer.at,
                fs_id: Some(cri::FilesystemIdentifier { mountpoint: fs_id }),
                used_bytes: value(layer.bytes),
                inodes_used: value(layer.inodes),
            }),
            swap: cgroups.swap(group, timestamp),
            io: self.io(group, timestamp),
        }
    }

    pub(crate) fn pod_stats_of(&self, sandbox: &Sandbox, recount: Recount) -> cri::PodSandboxStats {
        let config = sandbox.config();
        let timestamp = now();
        let group = sandbox.cgroup(&self.layout);
        let containers = self.tables.containers_of(&sandbox.id);
        cri::PodSandboxStats {
            attributes: Some(cri::PodSandboxAttributes {
                id: sandbox.id.clone(),
                metadata: config.metadata.clone(),
                labels: config.labels.clone(),
                annotations: config.annotations.clone(),
            }),
            linux: Some(cri::LinuxPodSandboxStats {
                cpu: self.cpu(&group, &sandbox.meter, sandbox.record.created_at),
                memory: self.cgroups.memory(&group, timestamp),
                network: self.interfaces_of(sandbox).map(|found| network(&found, timestamp)),
                process: Some(cri::ProcessUsage {
                    timestamp,
                    process_count: value(self.cgroups.process_count(&group)),
                }),
                containers: containers
                    .iter()
                    .filter(|container| container.visible())
                    .map(|container| self.stats_of(container, recount))
                    .collect(),
                io: self.io(&group, timestamp),
            }),
            windows: None,
        }
    }

    fn cpu(&self, group: &str, meter: &Meter, began: i64) -> Option<cri::CpuUsage> {
        let used = self.cgroups.cpu_nanoseconds(group)?;
        let timestamp = now();
        Some(cri::CpuUsage {
            timestamp,
            usage_core_nano_seconds: value(used),
            usage_nano_cores: meter.nano_cores(timestamp, used, began).and_then(value),
            psi: self.cgroups.pressure(group, "cpu"),
        })
    }

    fn io(&self, group: &str, timestamp: i64) -> Option<cri::IoUsage> {
        let psi = self.cgroups.pressure(group, "io")?;
        Some(cri::IoUsage { timestamp, psi: Some(psi) })
    }
}

fn network(found: &[Interface], timestamp: i64) -> cri::NetworkUsage {
    let usage = |interface: &Interface| cri::NetworkInterfaceUsage {
        name: interface.name.clone(),
        rx_bytes: value(interface.received.bytes),
        rx_errors: value(interface.received.errors),
        tx_bytes: value(interface.sent.bytes),
        tx_errors: value(interface.sent.errors),
    };
    let (default, others): (Vec<_>, Vec<_>) =
        found.iter().partition(|interface| interface.name == DEFAULT_INTERFACE);
    cri::NetworkUsage {
        timestamp,
        default_interface: default.first().map(|interface| usage(interface)),
        interfaces: others.into_iter().map(usage).collect(),
    }
}
