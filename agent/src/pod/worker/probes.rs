//! Keeps one probe task per running container that has probes.

use std::collections::HashMap;
use std::sync::Arc;

use futures::channel::mpsc;
use k8s_openapi::api::core::v1::PodStatus;
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;

use crate::pod::NodeContext;
use crate::pod::probe::metrics::CountedContainer;
use crate::pod::probe::{Finding, Watched, wanted};
use crate::pod::state::{DesiredPod, ObservedPod, Probed, Shape, is_sidecar};

/// The pod whose containers are probed.
pub(super) struct ProbedPod<'a> {
    pub(super) desired: &'a DesiredPod,
    pub(super) observed: &'a ObservedPod,
    /// Results so far, by container id.
    pub(super) results: &'a HashMap<String, Probed>,
}

#[derive(Default)]
pub(super) struct Probes {
    /// Probe tasks by container id. Dropping a handle ends its task.
    tasks: HashMap<String, AbortOnDropHandle<()>>,
    /// Counts of the probes by container name.
    counted: HashMap<String, CountedContainer>,
    /// Ends the startup and liveness probes of the tasks when the pod has to end.
    ending: CancellationToken,
}

impl Probes {
    /// Starts missing probe tasks, and ends the tasks of containers that do not run. While the pod ends, only readiness
    /// is probed.
    pub(super) fn reconcile(
        &mut self,
        node: &Arc<NodeContext>,
        pod: &ProbedPod<'_>,
        findings: &mpsc::UnboundedSender<Finding>,
    ) {
        let ProbedPod { desired, observed, results } = pod;
        let running = |id: &str| observed.containers.iter().any(|c| c.id == id && c.running());
        let is_ending = desired.ending().is_some();
        if is_ending {
            self.ending.cancel();
        }
        self.tasks.retain(|id, _| running(id));
        let (Some(spec), Some(sandbox)) = (desired.pod().spec.as_ref(), observed.sandbox()) else { return };
        let shape = Shape::of(spec);
        for container in shape.inits().iter().filter(|c| is_sidecar(c)).chain(shape.mains()) {
            let Some(current) = observed.current(&container.name).filter(|c| c.running()) else { continue };
            if !wanted(container, is_ending) || self.tasks.contains_key(&current.id) {
                continue;
            }
            let ip = sandbox
                .ips
                .first()
                .cloned()
                .or_else(|| node.host_ips().into_iter().next())
                .unwrap_or_default();
            let counted = self.counted.entry(container.name.clone());
            let counted =
                counted.or_insert_with(|| node.pods.probe_metrics().register(desired.pod(), container));
            let watched = Watched {
                node: Arc::clone(node),
                pod: Arc::clone(desired.pod()),
                container: container.clone(),
                id: current.id.clone(),
                ip,
                before: results.get(&current.id).copied().unwrap_or_default(),
                findings: findings.clone(),
                counts: counted.counts(),
                ending: self.ending.clone(),
            };
            let task = AbortOnDropHandle::new(coracle_threads::spawn(watched.run()));
            self.tasks.insert(current.id.clone(), task);
        }
    }
}

/// Probe results that the stored status records: a ready container stays ready until a probe fails.
pub(super) fn probe_results(status: Option<&PodStatus>) -> HashMap<String, Probed> {
    let statuses = status.into_iter().flat_map(|s| {
        s.init_container_statuses.iter().flatten().chain(s.container_statuses.iter().flatten())
    });
    statuses
        .filter_map(|s| {
            let id = s.container_id.as_deref()?.split_once("://")?.1.to_owned();
            Some((id, Probed { started: s.started == Some(true), ready: s.ready }))
        })
        .collect()
}
