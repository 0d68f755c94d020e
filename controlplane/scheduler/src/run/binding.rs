//! The binding of a pod: its volumes and devices first, then the request.

use std::sync::Arc;

use kube::Client;
use tokio::sync::Semaphore;

use super::Scheduler;
use super::report::record_wait;
use crate::bind;
use crate::config::{SchedulerConfig, VOLUME_TIMEOUT};
use crate::consult;
use crate::devices::{self, Devices};
use crate::extender::client::Remote;
use crate::metrics::{ExtensionPoint, SchedulerMetrics};
use crate::object::Pod;
use crate::reserve::Reserved;
use crate::volumes::bind::BindError;
use crate::volumes::{self, Volumes};
use coracle_events::Recorder;

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
