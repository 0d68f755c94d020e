//! Requests of NRI plugins to the runtime: the existing pods and containers, updates of limits,
//! evictions.

use std::sync::Arc;

use coracle_nri::{Host, PodState, Snapshot};
use coracle_proto::nri::{ContainerEviction, ContainerUpdate};
use futures::future::BoxFuture;
use oci_spec::runtime::Spec;

use crate::nri::{about, limits};
use crate::records::Records;
use crate::services::containers::ContainerService;
use crate::tables::Tables;

/// Answers requests of NRI plugins.
pub(crate) struct PluginHost {
    pub(crate) tables: Arc<Tables>,
    pub(crate) records: Arc<Records>,
    pub(crate) containers: ContainerService,
}

// === impl PluginHost ===

impl Host for PluginHost {
    fn snapshot(&self) -> Snapshot {
        let sandboxes = self.tables.sandboxes.all();
        let pods = sandboxes.iter().map(|sandbox| {
            let runs = if sandbox.live().is_some() { PodState::Running } else { PodState::Stopped };
            (about::current_pod(sandbox), runs)
        });
        let containers = self.tables.containers.all();
        let containers = containers.iter().filter(|container| container.visible()).map(|container| {
            let path = self.records.container_dir(&container.id).join("config.json");
            about::container(&container.record_now(), &Spec::load(path).unwrap_or_default())
        });
        Snapshot { pods: pods.collect(), containers: containers.collect() }
    }

    fn update(self: Arc<Self>, update: ContainerUpdate) -> BoxFuture<'static, Result<(), String>> {
        Box::pin(async move {
            let Some(container) = self.tables.containers.get(&update.container_id) else { return Ok(()) };
            let requested = update.linux.and_then(|linux| linux.resources).unwrap_or_default();
            let limits = limits::to_cri(&requested)?;
            self.containers.update_limits(&container, limits).await.map_err(|error| error.chain())
        })
    }

    fn evict(self: Arc<Self>, eviction: ContainerEviction) -> BoxFuture<'static, Result<(), String>> {
        Box::pin(async move {
            let Some(container) = self.tables.containers.get(&eviction.container_id) else { return Ok(()) };
            self.containers.kill_container(&container).await.map_err(|error| error.chain())
        })
    }
}
