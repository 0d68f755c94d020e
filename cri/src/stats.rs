//! What pods and containers use, read from their cgroups when asked: nothing is sampled between.

mod cgroup;
mod usage;

use coracle_proto::cri;

use self::usage::disk;
use crate::container::Container;
use crate::error::Error;
use crate::runtime::Runtime;
use crate::sandbox::Sandbox;
use crate::sandbox::filter::{named, selected};
use crate::server::now;

impl Runtime {
    /// What one container uses.
    pub(crate) fn container_stats(
        &self,
        request: cri::ContainerStatsRequest,
    ) -> Result<cri::ContainerStatsResponse, Error> {
        let container = self.container(&request.container_id)?;
        Ok(cri::ContainerStatsResponse { stats: Some(self.stats_of(&container)) })
    }

    /// What the containers that a filter lets through use.
    pub(crate) fn container_stats_list(
        &self,
        request: cri::ListContainerStatsRequest,
    ) -> Result<cri::ListContainerStatsResponse, Error> {
        let filter = request.filter.unwrap_or_default();
        let stats = self
            .inner
            .containers
            .all()
            .iter()
            .filter(|container| {
                container.visible()
                    && named(&container.id, &filter.id)
                    && named(&container.record.sandbox_id, &filter.pod_sandbox_id)
                    && selected(&container.record.config.labels, &filter.label_selector)
            })
            .map(|container| self.stats_of(container))
            .collect();
        Ok(cri::ListContainerStatsResponse { stats })
    }

    /// What one pod uses.
    pub(crate) fn sandbox_stats(
        &self,
        request: cri::PodSandboxStatsRequest,
    ) -> Result<cri::PodSandboxStatsResponse, Error> {
        let id = &request.pod_sandbox_id;
        let sandbox = self.inner.sandboxes.get(id).ok_or_else(|| Error::no_sandbox(id))?;
        Ok(cri::PodSandboxStatsResponse { stats: Some(self.pod_stats_of(&sandbox)) })
    }

    /// What the pods that a filter lets through use.
    pub(crate) fn sandbox_stats_list(
        &self,
        request: cri::ListPodSandboxStatsRequest,
    ) -> Result<cri::ListPodSandboxStatsResponse, Error> {
        let filter = request.filter.unwrap_or_default();
        let stats = self
            .inner
            .sandboxes
            .all()
            .iter()
            .filter(|sandbox| {
                named(&sandbox.id, &filter.id) && selected(&sandbox.config().labels, &filter.label_selector)
            })
            .map(|sandbox| self.pod_stats_of(sandbox))
            .collect();
        Ok(cri::ListPodSandboxStatsResponse { stats })
    }

    /// Bytes and inodes of all writable layers.
    pub(crate) fn writable_usage(&self) -> (u64, u64) {
        disk(&self.inner.config.root.join("containers"))
    }

    fn stats_of(&self, container: &Container) -> cri::ContainerStats {
        let config = &container.record.config;
        let upper = self.inner.records.layer_dir(&container.id).join("upper");
        let (bytes, inodes) = disk(&upper);
        let timestamp = now();
        let group = &container.record.cgroup;
        cri::ContainerStats {
            attributes: Some(cri::ContainerAttributes {
                id: container.id.clone(),
                metadata: config.metadata.clone(),
                labels: config.labels.clone(),
                annotations: config.annotations.clone(),
            }),
            cpu: self.inner.cgroups.cpu(group, timestamp),
            memory: self.inner.cgroups.memory(group, timestamp),
            writable_layer: Some(cri::FilesystemUsage {
                timestamp,
                fs_id: Some(cri::FilesystemIdentifier { mountpoint: upper.to_string_lossy().into_owned() }),
                used_bytes: Some(cri::UInt64Value { value: bytes }),
                inodes_used: Some(cri::UInt64Value { value: inodes }),
            }),
            swap: self.inner.cgroups.swap(group, timestamp),
            io: None,
        }
    }

    fn pod_stats_of(&self, sandbox: &Sandbox) -> cri::PodSandboxStats {
        let config = sandbox.config();
        let timestamp = now();
        let parent = config.linux.as_ref().map(|linux| linux.cgroup_parent.clone()).unwrap_or_default();
        let group = if parent.is_empty() { self.own_pod_cgroup(&sandbox.id) } else { parent };
        let containers = self.containers_of(&sandbox.id);
        cri::PodSandboxStats {
            attributes: Some(cri::PodSandboxAttributes {
                id: sandbox.id.clone(),
                metadata: config.metadata.clone(),
                labels: config.labels.clone(),
                annotations: config.annotations.clone(),
            }),
            linux: Some(cri::LinuxPodSandboxStats {
                cpu: self.inner.cgroups.cpu(&group, timestamp),
                memory: self.inner.cgroups.memory(&group, timestamp),
                network: sandbox.live().and_then(|live| usage::network(live.shim.pid(), timestamp)),
                process: Some(cri::ProcessUsage {
                    timestamp,
                    process_count: Some(cri::UInt64Value {
                        value: u64::try_from(self.inner.cgroups.processes(&group).len()).unwrap_or_default(),
                    }),
                }),
                containers: containers
                    .iter()
                    .filter(|container| container.visible())
                    .map(|container| self.stats_of(container))
                    .collect(),
                io: None,
            }),
            windows: None,
        }
    }
}
