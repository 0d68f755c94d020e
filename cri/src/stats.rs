//! What pods and containers use, read from their cgroups when asked: nothing is sampled between. All of this
//! reads files, some of it many, and belongs off the async executor.

mod cgroup;
mod meter;
mod usage;

use std::sync::Arc;

use coracle_proto::cri;

use self::cgroup::value;
pub(crate) use self::meter::{Disk, Meter};
pub(crate) use self::usage::{Interface, interfaces};
use crate::container::Container;
use crate::error::Error;
use crate::records::ContainerPhase;
use crate::runtime::Runtime;
use crate::sandbox::filter::{named, selected};
use crate::sandbox::{Sandbox, namespaces};
use crate::server::now;

/// The pod's own interface, which the CRI calls the default one.
const DEFAULT_INTERFACE: &str = "eth0";

impl Runtime {
    /// What one container uses.
    pub(crate) fn container_stats(
        &self,
        request: &cri::ContainerStatsRequest,
    ) -> Result<cri::ContainerStatsResponse, Error> {
        let container = self.container(&request.container_id)?;
        Ok(cri::ContainerStatsResponse { stats: Some(self.stats_of(&container)) })
    }

    /// The containers that a filter of statistics lets through.
    pub(crate) fn containers_counted(
        &self,
        filter: Option<cri::ContainerStatsFilter>,
    ) -> Vec<Arc<Container>> {
        let filter = filter.unwrap_or_default();
        let id = self.inner.containers.whole_id(&filter.id);
        let sandbox_id = self.inner.sandboxes.whole_id(&filter.pod_sandbox_id);
        let mut containers = self.inner.containers.all();
        containers.retain(|container| {
            container.visible()
                && named(&container.id, &id)
                && named(&container.record.sandbox_id, &sandbox_id)
                && selected(&container.record.config.labels, &filter.label_selector)
        });
        containers
    }

    /// What one pod uses.
    pub(crate) fn sandbox_stats(
        &self,
        request: &cri::PodSandboxStatsRequest,
    ) -> Result<cri::PodSandboxStatsResponse, Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?;
        Ok(cri::PodSandboxStatsResponse { stats: Some(self.pod_stats_of(&sandbox)) })
    }

    /// The sandboxes that a filter of statistics lets through.
    pub(crate) fn sandboxes_counted(&self, filter: Option<cri::PodSandboxStatsFilter>) -> Vec<Arc<Sandbox>> {
        let filter = filter.unwrap_or_default();
        let id = self.inner.sandboxes.whole_id(&filter.id);
        let mut sandboxes = self.inner.sandboxes.all();
        sandboxes.retain(|sandbox| {
            named(&sandbox.id, &id) && selected(&sandbox.config().labels, &filter.label_selector)
        });
        sandboxes
    }

    /// Bytes and inodes of all writable layers.
    pub(crate) fn writable_usage(&self) -> (u64, u64) {
        let layers = self.inner.containers.all();
        let layers = layers.iter().map(|container| self.layer_usage(container));
        layers.fold((0, 0), |(bytes, inodes), layer| (bytes + layer.bytes, inodes + layer.inodes))
    }

    /// What a container's writable layer takes.
    pub(crate) fn layer_usage(&self, container: &Container) -> Disk {
        let ended = matches!(container.phase(), ContainerPhase::Exited(_));
        container.meter.disk(&self.inner.records.layer_dir(&container.id).join("upper"), ended)
    }

    /// The cgroup that a pod's containers are in.
    pub(crate) fn pod_cgroup(&self, sandbox: &Sandbox) -> String {
        let parent = sandbox.config().linux.as_ref().map_or("", |linux| &linux.cgroup_parent);
        self.inner.layout.pod(parent, &sandbox.id)
    }

    /// The interfaces of a pod that lives and has a network of its own: the node's are nobody's in particular.
    pub(crate) fn interfaces_of(&self, sandbox: &Sandbox) -> Option<Vec<Interface>> {
        let live = sandbox.live().filter(|_| namespaces::own_network(sandbox.config()))?;
        let found = interfaces(live.shim.pid());
        found.filter(|_| live.shim.is_alive())
    }

    pub(crate) fn stats_of(&self, container: &Container) -> cri::ContainerStats {
        let config = &container.record.config;
        let layer = self.layer_usage(container);
        let timestamp = now();
        let group = &container.record.cgroup;
        let cgroups = &self.inner.cgroups;
        let began = match container.started_at() {
            0 => container.record.created_at,
            started_at => started_at,
        };
        let fs_id = self.inner.records.layers_dir().to_string_lossy().into_owned();
        cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes {
                id: container.id.clone(),
                metadata: config.metadata.clone(),
                labels: config.labels.clone(),
                annotations: config.annotations.clone(),
            }),
            cpu: self.cpu(group, &container.meter, began),
            memory: cgroups.memory(group, timestamp),
            writable_layer: Some(cri::FilesystemUsage {
                timestamp: layer.at,
                fs_id: Some(cri::FilesystemIdentifier { mountpoint: fs_id }),
                used_bytes: value(layer.bytes),
                inodes_used: value(layer.inodes),
            }),
            swap: cgroups.swap(group, timestamp),
            io: self.io(group, timestamp),
        }
    }

    pub(crate) fn pod_stats_of(&self, sandbox: &Sandbox) -> cri::PodSandboxStats {
        let config = sandbox.config();
        let timestamp = now();
        let group = self.pod_cgroup(sandbox);
        let containers = self.containers_of(&sandbox.id);
        cri::PodSandboxStats {
            attributes: Some(cri::PodSandboxAttributes {
                id: sandbox.id.clone(),
                metadata: config.metadata.clone(),
                labels: config.labels.clone(),
                annotations: config.annotations.clone(),
            }),
            linux: Some(cri::LinuxPodSandboxStats {
                cpu: self.cpu(&group, &sandbox.meter, sandbox.record.created_at),
                memory: self.inner.cgroups.memory(&group, timestamp),
                network: self.interfaces_of(sandbox).map(|found| network(&found, timestamp)),
                process: Some(cri::ProcessUsage {
                    timestamp,
                    process_count: value(self.inner.cgroups.process_count(&group)),
                }),
                containers: containers
                    .iter()
                    .filter(|container| container.visible())
                    .map(|container| self.stats_of(container))
                    .collect(),
                io: self.io(&group, timestamp),
            }),
            windows: None,
        }
    }

    fn cpu(&self, group: &str, meter: &Meter, began: i64) -> Option<cri::CpuUsage> {
        let used = self.inner.cgroups.cpu_nanoseconds(group)?;
        let timestamp = now();
        Some(cri::CpuUsage {
            timestamp,
            usage_core_nano_seconds: value(used),
            usage_nano_cores: meter.nano_cores(timestamp, used, began).and_then(value),
            psi: self.inner.cgroups.pressure(group, "cpu"),
        })
    }

    fn io(&self, group: &str, timestamp: i64) -> Option<cri::IoUsage> {
        let psi = self.inner.cgroups.pressure(group, "io")?;
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
