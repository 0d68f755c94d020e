//! Descriptors of all metrics: name, help text and labels. Names and labels are those of cAdvisor, which critest and
//! dashboards expect.

use coracle_proto::cri::MetricType;

/// Labels of every metric, in the order of their values.
pub(super) const BASE_LABELS: [&str; 6] = ["container", "id", "image", "name", "namespace", "pod"];

/// Name, type and labels of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Descriptor {
    pub(super) name: &'static str,
    pub(super) kind: MetricType,
    /// Labels in addition to [`BASE_LABELS`].
    pub(super) own_labels: &'static [&'static str],
    pub(super) help: &'static str,
}

impl Descriptor {
    /// All labels, in the order of their values.
    pub(super) fn labels(&self) -> impl Iterator<Item = &'static str> + use<> {
        BASE_LABELS.into_iter().chain(self.own_labels.iter().copied())
    }
}

macro_rules! descriptors {
    ($($constant:ident $kind:ident $name:literal $labels:tt $help:literal;)*) => {
        $(pub(super) const $constant: Descriptor =
            Descriptor { name: $name, kind: MetricType::$kind, own_labels: &$labels, help: $help };)*
        /// All descriptors.
        pub(super) const ALL: &[Descriptor] = &[$($constant),*];
    };
}

descriptors! {
    // processors
    CPU_USAGE Counter "container_cpu_usage_seconds_total" ["cpu"]
        "Processor time used, in seconds.";
    CPU_USER Counter "container_cpu_user_seconds_total" []
        "Processor time used in user mode, in seconds.";
    CPU_SYSTEM Counter "container_cpu_system_seconds_total" []
        "Processor time used by the kernel, in seconds.";
    CPU_PERIODS Counter "container_cpu_cfs_periods_total" []
        "Periods of the quota that passed with something to run.";
    CPU_THROTTLED_PERIODS Counter "container_cpu_cfs_throttled_periods_total" []
        "Periods in which the quota was used up.";
    CPU_THROTTLED Counter "container_cpu_cfs_throttled_seconds_total" []
        "Time spent waiting for the next period, in seconds.";

    // memory
    MEMORY_CACHE Gauge "container_memory_cache" []
        "Page cache, in bytes.";
    MEMORY_RSS Gauge "container_memory_rss" []
        "Anonymous memory, in bytes.";
    MEMORY_KERNEL Gauge "container_memory_kernel_usage" []
        "The kernel's own memory for the container, in bytes.";
    MEMORY_MAPPED Gauge "container_memory_mapped_file" []
        "Mapped files, in bytes.";
    MEMORY_SWAP Gauge "container_memory_swap" []
        "Swap in use, in bytes.";
    MEMORY_LIMIT_HITS Counter "container_memory_failcnt" []
        "Number of times the memory limit was reached.";
    MEMORY_USAGE Gauge "container_memory_usage_bytes" []
        "Memory in use, page cache included, in bytes.";
    MEMORY_PEAK Gauge "container_memory_max_usage_bytes" []
        "Maximum memory in use, in bytes.";
    MEMORY_WORKING_SET Gauge "container_memory_working_set_bytes" []
        "Memory in use without inactive page cache, in bytes.";
    MEMORY_FAULTS Counter "container_memory_failures_total" ["failure_type", "scope"]
        "Page faults, by kind.";
    OOM_EVENTS Counter "container_oom_events_total" []
        "Processes killed by the OOM killer.";

    // network
    NETWORK_RECEIVE_BYTES Counter "container_network_receive_bytes_total" ["interface"]
        "Bytes received.";
    NETWORK_RECEIVE_PACKETS Counter "container_network_receive_packets_total" ["interface"]
        "Packets received.";
    NETWORK_RECEIVE_DROPPED Counter "container_network_receive_packets_dropped_total" ["interface"]
        "Packets dropped instead of being received.";
    NETWORK_RECEIVE_ERRORS Counter "container_network_receive_errors_total" ["interface"]
        "Packets not received because of an error.";
    NETWORK_TRANSMIT_BYTES Counter "container_network_transmit_bytes_total" ["interface"]
        "Bytes sent.";
    NETWORK_TRANSMIT_PACKETS Counter "container_network_transmit_packets_total" ["interface"]
        "Packets sent.";
    NETWORK_TRANSMIT_DROPPED Counter "container_network_transmit_packets_dropped_total" ["interface"]
        "Packets dropped instead of being sent.";
    NETWORK_TRANSMIT_ERRORS Counter "container_network_transmit_errors_total" ["interface"]
        "Packets not sent because of an error.";

    // file systems and devices
    FS_INODES_FREE Gauge "container_fs_inodes_free" ["device"]
        "Free inodes of the file system of the writable layer.";
    FS_INODES Gauge "container_fs_inodes_total" ["device"]
        "All inodes of the file system of the writable layer.";
    FS_LIMIT Gauge "container_fs_limit_bytes" ["device"]
        "Size of the file system of the writable layer, in bytes.";
    FS_USAGE Gauge "container_fs_usage_bytes" ["device"]
        "Size of the writable layer, in bytes.";
    FS_READ_BYTES Counter "container_fs_reads_bytes_total" ["device"]
        "Bytes read from the device.";
    FS_READS Counter "container_fs_reads_total" ["device"]
        "Reads from the device.";
    FS_WRITTEN_BYTES Counter "container_fs_writes_bytes_total" ["device"]
        "Bytes written to the device.";
    FS_WRITES Counter "container_fs_writes_total" ["device"]
        "Writes to the device.";
    BLKIO_USAGE Counter "container_blkio_device_usage_total" ["device", "major", "minor", "operation"]
        "Bytes moved, by device and operation.";
    HUGETLB_USAGE Gauge "container_hugetlb_usage_bytes" ["pagesize"]
        "Huge pages in use, in bytes.";
    HUGETLB_PEAK Gauge "container_hugetlb_max_usage_bytes" ["pagesize"]
        "Maximum huge pages in use, in bytes.";

    // pressure
    PRESSURE_CPU_WAITING Counter "container_pressure_cpu_waiting_seconds_total" []
        "Time in which some task waited for a processor, in seconds.";
    PRESSURE_CPU_STALLED Counter "container_pressure_cpu_stalled_seconds_total" []
        "Time in which all tasks waited for a processor, in seconds.";
    PRESSURE_MEMORY_WAITING Counter "container_pressure_memory_waiting_seconds_total" []
        "Time in which some task waited for memory, in seconds.";
    PRESSURE_MEMORY_STALLED Counter "container_pressure_memory_stalled_seconds_total" []
        "Time in which all tasks waited for memory, in seconds.";
    PRESSURE_IO_WAITING Counter "container_pressure_io_waiting_seconds_total" []
        "Time in which some task waited for input or output, in seconds.";
    PRESSURE_IO_STALLED Counter "container_pressure_io_stalled_seconds_total" []
        "Time in which all tasks waited for input or output, in seconds.";

    // processes
    PROCESSES Gauge "container_processes" []
        "Processes.";
    THREADS Gauge "container_threads" []
        "Threads.";
    THREADS_MAX Gauge "container_threads_max" []
        "Maximum threads; 0 without a limit.";
    FILE_DESCRIPTORS Gauge "container_file_descriptors" []
        "Open file descriptors.";
    SOCKETS Gauge "container_sockets" []
        "Open sockets.";
    ULIMITS_SOFT Gauge "container_ulimits_soft" ["ulimit"]
        "Soft limits of the container's first process; unlimited resources are left out.";

    // the container itself
    LAST_SEEN Gauge "container_last_seen" []
        "When the container was last seen, in Unix seconds.";
    START_TIME Gauge "container_start_time_seconds" []
        "When the container was started, in Unix seconds.";
    SPEC_CPU_PERIOD Gauge "container_spec_cpu_period" []
        "Period of the processor quota, in microseconds.";
    SPEC_CPU_QUOTA Gauge "container_spec_cpu_quota" []
        "Processor quota in a period, in microseconds; absent without a quota.";
    SPEC_CPU_SHARES Gauge "container_spec_cpu_shares" []
        "Processor shares.";
    SPEC_MEMORY_LIMIT Gauge "container_spec_memory_limit_bytes" []
        "Memory limit, in bytes; 0 without a limit.";
    SPEC_MEMORY_RESERVATION Gauge "container_spec_memory_reservation_limit_bytes" []
        "Memory reservation, in bytes; 0 without a reservation.";
    SPEC_MEMORY_SWAP_LIMIT Gauge "container_spec_memory_swap_limit_bytes" []
        "Swap limit (on cgroup v1 of memory and swap), in bytes; 0 without a limit.";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_have_help_and_labels() {
        let mut names: Vec<&str> = ALL.iter().map(|descriptor| descriptor.name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!((names.len(), count), (56, 56));
        assert!(
            ALL.iter()
                .all(|descriptor| !descriptor.help.is_empty() && descriptor.name.starts_with("container_"))
        );
        assert_eq!(CPU_USAGE.labels().last(), Some("cpu"));
    }
}
