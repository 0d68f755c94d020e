//! Metrics of the CPU manager, the memory manager and the topology manager.

use std::time::Duration;

use prometheus::{Histogram, IntCounter, IntCounterVec, IntGauge, IntGaugeVec};

use super::{KubeletMetrics, Registered};

/// Bounds in milliseconds of the durations of admissions. The first bound is 50 µs; each further bound is twice the
/// previous bound.
const ADMISSIONS: [f64; 15] =
    [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 102.4, 204.8, 409.6, 819.2];

/// Metrics of the managers of resources.
pub(super) struct ManagerMetrics {
    cpu_requests: IntCounter,
    cpu_errors: IntCounter,
    shared_millicores: IntGauge,
    exclusive_cpus: IntGauge,
    exclusive_by_node: IntGaugeVec,
    memory_requests: IntCounter,
    memory_errors: IntCounter,
    aligned: IntCounterVec,
    not_aligned: IntCounterVec,
    admissions: IntCounter,
    admission_errors: IntCounter,
    admission_durations: Histogram,
}

/// The unit that is aligned.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scope {
    Container,
    Pod,
}

/// The part of the machine that contains aligned resources.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Boundary {
    NumaNode,
    PhysicalCpu,
    UncoreCache,
}

// === impl ManagerMetrics ===

impl ManagerMetrics {
    pub(super) fn new(all: &Registered<'_>) -> Self {
        let labels = ["scope", "boundary"];
        Self {
            cpu_requests: all.counter(
                "cpu_manager_pinning_requests_total",
                "The number of cpu core allocations which required pinning.",
            ),
            cpu_errors: all.counter(
                "cpu_manager_pinning_errors_total",
                "The number of cpu core allocations which required pinning failed.",
            ),
            shared_millicores: all.gauge(
                "cpu_manager_shared_pool_size_millicores",
                "The size of the shared CPU pool for non-guaranteed QoS pods, in millicores.",
            ),
            exclusive_cpus: all.gauge(
                "cpu_manager_exclusive_cpu_allocation_count",
                "The total number of CPUs exclusively allocated to containers running on this node",
            ),
            exclusive_by_node: all.gauges(
                "cpu_manager_allocation_per_numa",
                "Number of CPUs allocated per NUMA node",
                &[Boundary::NumaNode.name()],
            ),
            memory_requests: all.counter(
                "memory_manager_pinning_requests_total",
                "The number of memory pages allocations which required pinning.",
            ),
            memory_errors: all.counter(
                "memory_manager_pinning_errors_total",
                "The number of memory pages allocations which required pinning that failed.",
            ),
            aligned: all.counters(
                "container_aligned_compute_resources_count",
                "Cumulative number of aligned compute resources allocated to containers by alignment type.",
                &labels,
            ),
            not_aligned: all.counters(
                "container_aligned_compute_resources_failure_count",
                "Cumulative number of failures to allocate aligned compute resources to containers by alignment type.",
                &labels,
            ),
            admissions: all.counter(
                "topology_manager_admission_requests_total",
                "The number of admission requests where resources have to be aligned.",
            ),
            admission_errors: all.counter(
                "topology_manager_admission_errors_total",
                "The number of admission request failures where resources could not be aligned.",
            ),
            admission_durations: all.with_buckets(&ADMISSIONS).histogram(
                "topology_manager_admission_duration_ms",
                "Duration in milliseconds to serve a pod admission request.",
            ),
        }
    }
}

// === impl Scope ===

impl Scope {
    fn name(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::Pod => "pod",
        }
    }
}

// === impl Boundary ===

impl Boundary {
    fn name(self) -> &'static str {
        match self {
            Self::NumaNode => "numa_node",
            Self::PhysicalCpu => "physical_cpu",
            Self::UncoreCache => "uncore_cache",
        }
    }
}

// === impl KubeletMetrics ===

impl KubeletMetrics {
    /// Counts a request for exclusive CPUs.
    pub(crate) fn cpus_pinned(&self, succeeded: bool) {
        self.managers.cpu_requests.inc();
        if !succeeded {
            self.managers.cpu_errors.inc();
        }
    }

    /// Sets the number of CPUs that can be assigned, and the numbers of exclusive CPUs in total and by NUMA node.
    pub(crate) fn exclusive_cpus(
        &self,
        available: usize,
        exclusive: usize,
        by_node: impl Iterator<Item = (u32, usize)>,
    ) {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        self.managers.shared_millicores.set(number(available).saturating_mul(1000));
        self.managers.exclusive_cpus.set(number(exclusive));
        for (node, count) in by_node {
            let node = node.to_string();
            self.managers.exclusive_by_node.with_label_values(&[node.as_str()]).set(number(count));
        }
    }

    /// Counts a request for memory of NUMA nodes.
    pub(crate) fn memory_pinned(&self, succeeded: bool) {
        self.managers.memory_requests.inc();
        if !succeeded {
            self.managers.memory_errors.inc();
        }
    }

    /// Counts a container or pod whose resources had to be aligned.
    pub(crate) fn aligned(&self, scope: Scope, boundary: Boundary, succeeded: bool) {
        self.alignments(scope, boundary, succeeded).inc();
    }

    /// Creates counters of alignments, so that they are 0 instead of absent before the first pod. `outcomes` selects
    /// successes (true), failures (false) or both.
    pub(crate) fn create_alignments(
        &self,
        scope: Scope,
        boundary: Boundary,
        outcomes: impl IntoIterator<Item = bool>,
    ) {
        for succeeded in outcomes {
            self.alignments(scope, boundary, succeeded).inc_by(0);
        }
    }

    fn alignments(&self, scope: Scope, boundary: Boundary, succeeded: bool) -> IntCounter {
        let counters = if succeeded { &self.managers.aligned } else { &self.managers.not_aligned };
        counters.with_label_values(&[scope.name(), boundary.name()])
    }

    /// Counts an admission by the topology manager.
    pub(crate) fn topology_admission(&self, took: Duration, succeeded: bool) {
        self.managers.admissions.inc();
        self.managers.admission_durations.observe(took.as_secs_f64() * 1000.0);
        if !succeeded {
            self.managers.admission_errors.inc();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kubelet_metrics::Current;

    #[test]
    fn managers_have_the_kubelets_metrics() {
        let metrics = KubeletMetrics::default();
        metrics.cpus_pinned(false);
        metrics.exclusive_cpus(3, 1, [(0, 1)].into_iter());
        metrics.memory_pinned(true);
        metrics.aligned(Scope::Container, Boundary::PhysicalCpu, true);
        metrics.aligned(Scope::Pod, Boundary::NumaNode, false);
        metrics.create_alignments(Scope::Container, Boundary::UncoreCache, [true]);
        metrics.create_alignments(Scope::Container, Boundary::PhysicalCpu, [true, false]);
        metrics.topology_admission(Duration::from_micros(150), true);
        let text = metrics.text(&Current::default());
        for line in [
            "kubelet_cpu_manager_pinning_requests_total 1",
            "kubelet_cpu_manager_pinning_errors_total 1",
            "kubelet_cpu_manager_shared_pool_size_millicores 3000",
            "kubelet_cpu_manager_exclusive_cpu_allocation_count 1",
            "kubelet_cpu_manager_allocation_per_numa{numa_node=\"0\"} 1",
            "kubelet_memory_manager_pinning_requests_total 1",
            "kubelet_memory_manager_pinning_errors_total 0",
            "kubelet_container_aligned_compute_resources_count{boundary=\"physical_cpu\",scope=\"container\"} 1",
            "kubelet_container_aligned_compute_resources_count{boundary=\"uncore_cache\",scope=\"container\"} 0",
            "kubelet_container_aligned_compute_resources_failure_count{boundary=\"physical_cpu\",scope=\"container\"} 0",
            "kubelet_container_aligned_compute_resources_failure_count{boundary=\"numa_node\",scope=\"pod\"} 1",
            "kubelet_topology_manager_admission_requests_total 1",
            "kubelet_topology_manager_admission_errors_total 0",
            "kubelet_topology_manager_admission_duration_ms_bucket{le=\"0.1\"} 0",
            "kubelet_topology_manager_admission_duration_ms_bucket{le=\"0.2\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }
}
