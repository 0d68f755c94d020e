//! ListMetricDescriptors, ListPodSandboxMetrics and its stream: the figures that the kubelet passes on to
//! Prometheus under cAdvisor's names, read from the kernel when asked.
//!
//! The CRI's values are whole numbers: times of less than a second are rounded down.

mod container;
mod descriptor;
mod device;
mod process;
mod sheet;

use std::sync::Arc;

use coracle_proto::cri;

use self::container::Collector;
use self::descriptor as names;
use self::sheet::Sheet;
use crate::container::Container;
use crate::records::ContainerPhase;
use crate::runtime::Runtime;
use crate::sandbox::Sandbox;
use crate::server::{Streamed, batches, now};

/// All metrics that there may be. The same for the life of the process, as the CRI asks.
pub(crate) fn descriptors() -> cri::ListMetricDescriptorsResponse {
    let descriptors = names::ALL.iter().map(|descriptor| cri::MetricDescriptor {
        name: descriptor.name.to_owned(),
        help: descriptor.help.to_owned(),
        label_keys: descriptor.labels().map(str::to_owned).collect(),
    });
    cri::ListMetricDescriptorsResponse { descriptors: descriptors.collect() }
}

impl Runtime {
    /// The metrics of every pod that is ready.
    pub(crate) fn metrics_list(
        &self,
        _request: &cri::ListPodSandboxMetricsRequest,
    ) -> cri::ListPodSandboxMetricsResponse {
        let collector = Collector::new(self);
        let pods = self.pods_ready();
        cri::ListPodSandboxMetricsResponse {
            pod_metrics: pods.iter().map(|pod| self.metrics_of(&collector, pod)).collect(),
        }
    }

    /// The same, in pieces: read as they are sent.
    pub(crate) fn metrics_stream(
        &self,
        _request: &cri::StreamPodSandboxMetricsRequest,
    ) -> Streamed<cri::StreamPodSandboxMetricsResponse> {
        let runtime = self.clone();
        let mut collector = None;
        let metrics = self.pods_ready().into_iter().map(move |pod| {
            let collector = collector.get_or_insert_with(|| Collector::new(&runtime));
            runtime.metrics_of(collector, &pod)
        });
        batches(metrics, |pod_sandbox_metrics| cri::StreamPodSandboxMetricsResponse { pod_sandbox_metrics })
    }

    fn pods_ready(&self) -> Vec<Arc<Sandbox>> {
        let mut pods = self.inner.sandboxes.all();
        pods.retain(|pod| pod.live().is_some());
        pods
    }

    fn metrics_of(&self, collector: &Collector, pod: &Sandbox) -> cri::PodSandboxMetrics {
        let containers = self.containers_of(&pod.id);
        let running = containers
            .iter()
            .filter(|row| matches!(row.phase(), ContainerPhase::Running { .. }))
            .map(|row| cri::ContainerMetrics {
                container_id: row.id.clone(),
                metrics: collector.collect(self, row, container_sheet(pod, row)),
            });
        cri::PodSandboxMetrics {
            pod_sandbox_id: pod.id.clone(),
            metrics: self.network_metrics(pod),
            container_metrics: running.collect(),
        }
    }

    /// A pod's traffic, of every interface.
    fn network_metrics(&self, pod: &Sandbox) -> Vec<cri::Metric> {
        let metadata = pod.config().metadata.clone().unwrap_or_default();
        let labels = [
            String::new(),
            self.pod_cgroup(pod),
            String::new(),
            pod.id.clone(),
            metadata.namespace,
            metadata.name,
        ];
        let mut sheet = Sheet::new(labels, now());
        for interface in self.interfaces_of(pod).unwrap_or_default() {
            let label = [interface.name.as_str()];
            let (received, sent) = (interface.received, interface.sent);
            for (descriptor, value) in [
                (&names::NETWORK_RECEIVE_BYTES, received.bytes),
                (&names::NETWORK_RECEIVE_PACKETS, received.packets),
                (&names::NETWORK_RECEIVE_DROPPED, received.dropped),
                (&names::NETWORK_RECEIVE_ERRORS, received.errors),
                (&names::NETWORK_TRANSMIT_BYTES, sent.bytes),
                (&names::NETWORK_TRANSMIT_PACKETS, sent.packets),
                (&names::NETWORK_TRANSMIT_DROPPED, sent.dropped),
                (&names::NETWORK_TRANSMIT_ERRORS, sent.errors),
            ] {
                sheet.put(descriptor, &label, value);
            }
        }
        sheet.metrics
    }
}

fn container_sheet(pod: &Sandbox, container: &Container) -> Sheet {
    let config = &container.record.config;
    let metadata = pod.config().metadata.clone().unwrap_or_default();
    let labels = [
        config.metadata.clone().unwrap_or_default().name,
        container.record.cgroup.clone(),
        config.image.clone().map(|image| image.image).unwrap_or_default(),
        container.id.clone(),
        metadata.namespace,
        metadata.name,
    ];
    Sheet::new(labels, now())
}
