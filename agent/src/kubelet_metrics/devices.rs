//! Metrics of device plugins and of the pod resources API.

use std::time::Duration;

use prometheus::{DEFAULT_BUCKETS, HistogramVec, IntCounterVec};

use super::{KubeletMetrics, Registered};

/// The version of the pod resources API.
const VERSION: &str = "v1";

/// Metrics of device plugins and of the pod resources API. As upstream, only failed calls of Get have a counter.
pub(super) struct DeviceMetrics {
    registrations: IntCounterVec,
    allocations: HistogramVec,
    requests: IntCounterVec,
    lists: IntCounterVec,
    allocatable: IntCounterVec,
    gets: IntCounterVec,
    get_errors: IntCounterVec,
}

/// A call of the pod resources API.
#[derive(Clone, Copy, Debug)]
pub(crate) enum PodResourcesCall {
    List,
    GetAllocatable,
    Get,
}

// === impl DeviceMetrics ===

impl DeviceMetrics {
    pub(super) fn new(all: &Registered<'_>) -> Self {
        let (resource, version) = (["resource_name"], ["server_api_version"]);
        Self {
            registrations: all.counters(
                "device_plugin_registration_total",
                "Cumulative number of device plugin registrations. Broken down by resource name.",
                &resource,
            ),
            allocations: all.with_buckets(DEFAULT_BUCKETS).histograms(
                "device_plugin_alloc_duration_seconds",
                "Duration in seconds to serve a device plugin Allocation request. Broken down by resource name.",
                &resource,
            ),
            requests: all.counters(
                "pod_resources_endpoint_requests_total",
                "Cumulative number of requests to the PodResource endpoint. Broken down by server api version.",
                &version,
            ),
            lists: all.counters(
                "pod_resources_endpoint_requests_list",
                "Number of requests to the PodResource List endpoint. Broken down by server api version.",
                &version,
            ),
            allocatable: all.counters(
                "pod_resources_endpoint_requests_get_allocatable",
                "Number of requests to the PodResource GetAllocatableResources endpoint. Broken down by server api version.",
                &version,
            ),
            gets: all.counters(
                "pod_resources_endpoint_requests_get",
                "Number of requests to the PodResource Get endpoint. Broken down by server api version.",
                &version,
            ),
            get_errors: all.counters(
                "pod_resources_endpoint_errors_get",
                "Number of requests to the PodResource Get endpoint which returned error. Broken down by server api version.",
                &version,
            ),
        }
    }
}

// === impl KubeletMetrics ===

impl KubeletMetrics {
    /// Counts a successful registration of a device plugin. The number of resources of plugins is limited.
    pub(crate) fn device_plugin_registered(&self, resource: &str) {
        self.devices.registrations.with_label_values(&[resource]).inc();
    }

    /// Counts a call of Allocate of the plugin of a resource, including a failed call.
    pub(crate) fn devices_allocated(&self, resource: &str, took: Duration) {
        self.devices.allocations.with_label_values(&[resource]).observe(took.as_secs_f64());
    }

    /// Counts a call of the pod resources API.
    pub(crate) fn pod_resources_called(&self, call: PodResourcesCall) {
        let counter = match call {
            PodResourcesCall::List => &self.devices.lists,
            PodResourcesCall::GetAllocatable => &self.devices.allocatable,
            PodResourcesCall::Get => &self.devices.gets,
        };
        for counter in [&self.devices.requests, counter] {
            counter.with_label_values(&[VERSION]).inc();
        }
    }

    /// Counts a call of Get of the pod resources API that failed. [`Self::pod_resources_called`] counts it as well.
    pub(crate) fn pod_resources_get_failed(&self) {
        self.devices.get_errors.with_label_values(&[VERSION]).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet_metrics::Current;

    #[test]
    fn device_plugins_and_the_pod_resources_api_have_the_kubelets_metrics() {
        let metrics = KubeletMetrics::default();
        metrics.device_plugin_registered("x.io/a");
        metrics.devices_allocated("x.io/a", Duration::from_millis(20));
        for call in [PodResourcesCall::List, PodResourcesCall::GetAllocatable, PodResourcesCall::Get] {
            metrics.pod_resources_called(call);
        }
        metrics.pod_resources_get_failed();
        let text = metrics.text(&Current::default());
        for line in [
            "kubelet_device_plugin_registration_total{resource_name=\"x.io/a\"} 1",
            "kubelet_device_plugin_alloc_duration_seconds_bucket{resource_name=\"x.io/a\",le=\"0.01\"} 0",
            "kubelet_device_plugin_alloc_duration_seconds_bucket{resource_name=\"x.io/a\",le=\"0.025\"} 1",
            "kubelet_pod_resources_endpoint_requests_total{server_api_version=\"v1\"} 3",
            "kubelet_pod_resources_endpoint_requests_list{server_api_version=\"v1\"} 1",
            "kubelet_pod_resources_endpoint_requests_get_allocatable{server_api_version=\"v1\"} 1",
            "kubelet_pod_resources_endpoint_requests_get{server_api_version=\"v1\"} 1",
            "kubelet_pod_resources_endpoint_errors_get{server_api_version=\"v1\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }
}
