//! The binding of a pod: its volumes and devices first, then the request.

use std::sync::Arc;

use kube::Client;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::report::record_wait;
use super::{Bound, Scheduler};
use crate::bind;
use crate::config::{SchedulerConfig, VOLUME_TIMEOUT};
use crate::consult;
use crate::devices::{self, Devices, may_use_devices};
use crate::extender::client::Remote;
use crate::metrics::{Attempt, ExtensionPoint, SchedulerMetrics};
use crate::object::Pod;
use crate::reserve::Reserved;
use crate::volumes::bind::BindError;
use crate::volumes::{self, Volumes};
use coracle_events::Recorder;

/// Maximum number of concurrent binding requests. The store syncs concurrent writes together. More requests need more
/// memory and, with a remote server, more connections.
pub(super) const MAX_BINDINGS: usize = 32;

/// Maximum number of decided pods whose binding needs nothing but a request. So each ended request finds a decided pod,
/// but most pods of a burst wait in the queue. There they need no task, and pods of a higher priority go first.
pub(super) const MAX_DECIDED: usize = 2 * MAX_BINDINGS;

/// The parts of the scheduler that a binding needs.
pub(super) struct Binding {
    config: Arc<SchedulerConfig>,
    client: Client,
    volumes: Volumes,
    devices: Devices,
    recorder: Recorder,
    metrics: SchedulerMetrics,
    extenders: Arc<[Remote]>,
    requests: Arc<Semaphore>,
    extender_requests: Arc<Semaphore>,
}

// === impl Binding ===

impl Binding {
    pub(super) fn new(scheduler: &Scheduler) -> Self {
        Self {
            config: scheduler.config.clone(),
            client: scheduler.client.clone(),
            volumes: scheduler.snapshot.volumes.clone(),
            devices: scheduler.snapshot.devices.clone(),
            recorder: scheduler.recorder.clone(),
            metrics: scheduler.config.metrics.clone(),
            extenders: scheduler.extender_calls.extenders.clone(),
            requests: scheduler.requests.clone(),
            extender_requests: scheduler.extender_requests.clone(),
        }
    }

    /// Binds the volumes, the devices and the pod.
    pub(super) async fn run(self, pod: &Pod, node: &str, reserved: &Reserved) -> Result<(), BindError> {
        let profile = pod.scheduler();
        let pre_bind = self.pre_bind(pod, node, reserved);
        self.metrics.measure(ExtensionPoint::PreBind, profile, pre_bind).await?;
        self.metrics.measure(ExtensionPoint::Bind, profile, self.bind(pod, node)).await
    }

    async fn pre_bind(&self, pod: &Pod, node: &str, reserved: &Reserved) -> Result<(), BindError> {
        let Self { client, volumes, devices, .. } = self;
        let profile = self.config.profile(pod.scheduler());
        let timeout = profile.map_or(VOLUME_TIMEOUT, |profile| profile.volume_timeout);
        volumes::bind::bind(client, volumes, &reserved.volumes, node, timeout).await?;
        let claims = devices::bind::bind(client, devices, pod, &reserved.devices).await?;
        let on_wait = || record_wait(&self.recorder, pod, node);
        devices::binding::wait(client, devices, pod, &claims, on_wait).await
    }

    async fn bind(&self, pod: &Pod, node: &str) -> Result<(), BindError> {
        if let Some(bound) = consult::bind(&self.extenders, pod, node, &self.extender_requests).await {
            return bound.map_err(BindError::Extender);
        }
        // The semaphore is never closed. The wait for volumes and devices does not hold a permit.
        let _permit = self.requests.acquire().await;
        bind::bind(self.client.clone(), pod, node).await.map_err(BindError::Request)
    }
}

// === impl Scheduler ===

impl Scheduler {
    /// Whether another pod may be decided.
    pub(super) fn may_decide(&self) -> bool {
        self.decided.available_permits() > 0
    }

    /// Starts the binding of a pod that is placed on its node.
    pub(super) fn start_binding(
        &mut self,
        pod: Arc<Pod>,
        node: String,
        reserved: Reserved,
        attempt: Option<Attempt>,
    ) {
        let (binding, permit) = (Binding::new(self), self.decided_permit(&pod));
        self.bindings.spawn(async move {
            let result = binding.run(&pod, &node, &reserved).await;
            drop(permit);
            Bound { pod, node, reserved, attempt, result }
        });
    }

    /// The permit that a decided pod holds until it is bound. `None` if the binding may wait for volumes, devices or an
    /// extender, because such a wait must not delay other pods. The pods of a gang are decided together, so some of them
    /// may have no permit.
    fn decided_permit(&self, pod: &Pod) -> Option<OwnedSemaphorePermit> {
        let may_wait = volumes::claims_of(pod).next().is_some()
            || may_use_devices(pod)
            || self.extender_calls.binds(pod);
        if may_wait { None } else { self.decided.clone().try_acquire_owned().ok() }
    }

    pub(super) fn update_saturation(&self) {
        let is_saturated = self.requests.available_permits() == 0;
        self.is_saturated.send_if_modified(|value| std::mem::replace(value, is_saturated) != is_saturated);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::test_scheduler::scheduler_of_accepting_server;
    use super::*;
    use crate::fixture;

    #[tokio::test]
    async fn decisions_do_not_run_far_ahead_of_bindings() {
        let mut scheduler = scheduler_of_accepting_server();
        scheduler.snapshot.set_node(&fixture::node("a", json!({"/status/allocatable/pods": "1000"})));
        for number in 0..=MAX_DECIDED {
            scheduler.queue.add(fixture::pod(&format!("p{number}"), json!({"containers": [{}]})));
        }
        for _ in 0..=MAX_DECIDED {
            if scheduler.may_decide() {
                scheduler.schedule_next();
            }
        }
        assert_eq!((scheduler.bindings.len(), scheduler.queue.lengths().active), (MAX_DECIDED, 1));
        let bound = scheduler.bindings.join_next().await.unwrap().unwrap();
        scheduler.bound(bound);
        assert!(scheduler.may_decide());
    }

    #[tokio::test]
    async fn bindings_that_may_wait_do_not_delay_other_pods() {
        let scheduler = scheduler_of_accepting_server();
        let with_permit = |spec: serde_json::Value| {
            let permit = scheduler.decided_permit(&fixture::pod("p", spec));
            permit.is_some()
        };
        assert!(with_permit(json!({"containers": [{}]})));
        let claim = json!({"name": "v", "persistentVolumeClaim": {"claimName": "c"}});
        assert!(!with_permit(json!({"volumes": [claim]})));
        assert!(!with_permit(json!({"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]})));
    }
}
