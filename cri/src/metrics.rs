//! ListMetricDescriptors, ListPodSandboxMetrics and StreamPodSandboxMetrics: metrics with cAdvisor's names.
//!
//! The kubelet passes the metrics on to Prometheus. They are read from the kernel on request. The CRI's values are
//! integers: times are rounded down to seconds.

mod builder;
mod container;
mod descriptor;
mod device;
mod process;

use std::sync::Arc;

use coracle_proto::cri;

use self::builder::MetricBuilder;
use self::container::Collector;
use self::descriptor as names;
use crate::clock::now;
use crate::container::Container;
use crate::list_stream::{Streamed, batches};
use crate::records::ContainerPhase;
use crate::sandbox::Sandbox;
use crate::stats::StatsService;
use crate::usage::meter::Recount;

/// Descriptors of all metrics. They do not change while the process runs, as the CRI requires.
pub(crate) fn descriptors() -> cri::ListMetricDescriptorsResponse {
    let descriptors = names::ALL.iter().map(|descriptor| cri::MetricDescriptor {
        name: descriptor.name.to_owned(),
        help: descriptor.help.to_owned(),
        label_keys: descriptor.labels().map(str::to_owned).collect(),
    });
    cri::ListMetricDescriptorsResponse { descriptors: descriptors.collect() }
}

impl StatsService {
    /// Metrics of all ready pods.
    pub(crate) fn metrics_list(
        &self,
        _request: &cri::ListPodSandboxMetricsRequest,
    ) -> cri::ListPodSandboxMetricsResponse {
        let collector = Collector::new(self.records.layers_dir());
        let pods = self.ready_pods();
        cri::ListPodSandboxMetricsResponse {
            pod_metrics: pods.iter().map(|pod| self.metrics_of(&collector, pod)).collect(),
        }
    }

    /// [`metrics_list`](Self::metrics_list) as a stream of batches; each batch is read when it is sent.
    pub(crate) fn metrics_stream(
        &self,
        _request: &cri::StreamPodSandboxMetricsRequest,
    ) -> Streamed<cri::StreamPodSandboxMetricsResponse> {
        let stats = self.clone();
        let mut collector = None;
        let metrics = self.ready_pods().into_iter().map(move |pod| {
            let collector = collector.get_or_insert_with(|| Collector::new(stats.records.layers_dir()));
            stats.metrics_of(collector, &pod)
        });
        batches(metrics, |pod_sandbox_metrics| cri::StreamPodSandboxMetricsResponse { pod_sandbox_metrics })
    }

    fn ready_pods(&self) -> Vec<Arc<Sandbox>> {
        let mut pods = self.tables.sandboxes.all();
        pods.retain(|pod| pod.live().is_some());
        pods
    }

    fn metrics_of(&self, collector: &Collector, pod: &Sandbox) -> cri::PodSandboxMetrics {
        let containers = self.tables.containers_of(&pod.id);
        let running = containers
            .iter()
            .filter(|row| matches!(row.phase(), ContainerPhase::Running { .. }))
            .map(|row| cri::ContainerMetrics {
                container_id: row.id.clone(),
                metrics: collector.collect(
                    &self.cgroups,
                    row,
                    self.layer_usage(row, Recount::InBackground).map(|layer| layer.bytes),
                    container_sheet(pod, row),
                ),
            });
        cri::PodSandboxMetrics {
            pod_sandbox_id: pod.id.clone(),
            metrics: self.network_metrics(pod),
            container_metrics: running.collect(),
        }
    }

    /// Network traffic of a pod per interface.
    fn network_metrics(&self, pod: &Sandbox) -> Vec<cri::Metric> {
        let metadata = pod.config().metadata.clone().unwrap_or_default();
        let labels = [
            String::new(),
            pod.cgroup(&self.layout),
            String::new(),
            pod.id.clone(),
            metadata.namespace,
            metadata.name,
        ];
        let mut builder = MetricBuilder::new(labels, now());
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
                builder.put(descriptor, &label, value);
            }
        }
        builder.metrics
    }
}

fn container_sheet(pod: &Sandbox, container: &Container) -> MetricBuilder {
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
    MetricBuilder::new(labels, now())
}
