//! Metrics of one container, from its cgroup on v1 and v2.

use std::path::Path;

use rustix::fs::{StatVfs, statvfs};

use super::builder::MetricBuilder;
use super::descriptor as names;
use super::device::{self, Devices};
use super::process;
use crate::cgroup::Cgroups;
use crate::cgroup::value::field;
use crate::container::Container;
use crate::resize::weight::{shares_of_weight, weight_of_shares};

const SECOND: u64 = 1_000_000_000;
/// `USER_HZ`, the unit of user and system time on v1: fixed by the kernel's ABI on all supported architectures.
const TICKS: u64 = 100;

/// The values that are the same for all containers of one request.
pub(super) struct Collector {
    devices: Devices,
    layers: Layers,
    pages: Vec<String>,
}

/// The file system of the writable layers.
struct Layers {
    device: String,
    bytes: u64,
    inodes: u64,
    inodes_free: u64,
}

/// A cgroup to read from.
struct Group<'a> {
    cgroups: &'a Cgroups,
    path: &'a str,
}

// === impl Collector ===

impl Collector {
    pub(super) fn new(layers_dir: &Path) -> Self {
        Self { devices: Devices::default(), layers: Layers::read(layers_dir), pages: page_sizes() }
    }

    /// All metrics of a running container. `layer_bytes` is `None` if the files of its writable layer are not counted
    /// yet.
    pub(super) fn collect(
        &self,
        cgroups: &Cgroups,
        container: &Container,
        layer_bytes: Option<u64>,
        mut builder: MetricBuilder,
    ) -> Vec<coracle_proto::cri::Metric> {
        let group = Group { cgroups, path: &container.record.cgroup };
        let second = |nanoseconds: i64| u64::try_from(nanoseconds).unwrap_or(0) / SECOND;
        let (last_seen, started) = (second(builder.timestamp()), second(container.started_at()));
        builder.put(&names::LAST_SEEN, &[], last_seen);
        builder.put(&names::START_TIME, &[], started);
        group.cpu(&mut builder);
        group.memory(&mut builder);
        group.pressure(&mut builder);
        group.huge_pages(&mut builder, &self.pages);
        group.limits(&mut builder, container);
        self.devices.put(group.io(), &mut builder);
        let device = [self.layers.device.as_str()];
        builder.put(&names::FS_INODES, &device, self.layers.inodes);
        builder.put(&names::FS_INODES_FREE, &device, self.layers.inodes_free);
        builder.put(&names::FS_LIMIT, &device, self.layers.bytes);
        if let Some(bytes) = layer_bytes {
            builder.put(&names::FS_USAGE, &device, bytes);
        }
        group.processes(&mut builder, container.pid());
        builder.metrics
    }
}

impl Layers {
    fn read(dir: &Path) -> Self {
        let found = statvfs(dir).ok();
        let of = |value: fn(&StatVfs) -> u64| found.as_ref().map_or(0, value);
        Self {
            device: device::of_file(dir),
            bytes: of(|found| found.f_blocks.saturating_mul(found.f_frsize)),
            inodes: of(|found| found.f_files),
            inodes_free: of(|found| found.f_ffree),
        }
    }
}

// === impl Group ===

impl Group<'_> {
    fn text(&self, controller: &str, v1: &str, v2: &str) -> String {
        self.cgroups.text(controller, self.path, self.cgroups.select(v1, v2)).unwrap_or_default()
    }

    fn number(&self, controller: &str, v1: &str, v2: &str) -> Option<u64> {
        self.cgroups.number(controller, self.path, self.cgroups.select(v1, v2))
    }

    fn limit(&self, controller: &str, v1: &str, v2: &str) -> Option<u64> {
        self.cgroups.limit(controller, self.path, self.cgroups.select(v1, v2))
    }

    fn cpu(&self, builder: &mut MetricBuilder) {
        let v2 = self.cgroups.unified();
        let stat = self.text("cpu", "cpu.stat", "cpu.stat");
        let seconds_of = |name| field(&stat, name).map(|value| value / 1_000_000);
        if let Some(nanoseconds) = self.cgroups.cpu_nanoseconds(self.path) {
            builder.put(&names::CPU_USAGE, &["total"], nanoseconds / SECOND);
        }
        let ticks = self.text("cpuacct", "cpuacct.stat", "cpu.stat");
        let time = |v1, v2_name| {
            if v2 { seconds_of(v2_name) } else { field(&ticks, v1).map(|value| value / TICKS) }
        };
        builder.put_some(&names::CPU_USER, time("user", "user_usec"));
        builder.put_some(&names::CPU_SYSTEM, time("system", "system_usec"));
        // v2 has these fields only where the cpu controller is enabled; elsewhere nothing is throttled.
        builder.put(&names::CPU_PERIODS, &[], field(&stat, "nr_periods").unwrap_or(0));
        builder.put(&names::CPU_THROTTLED_PERIODS, &[], field(&stat, "nr_throttled").unwrap_or(0));
        let throttled = if v2 {
            seconds_of("throttled_usec")
        } else {
            field(&stat, "throttled_time").map(|value| value / SECOND)
        };
        builder.put(&names::CPU_THROTTLED, &[], throttled.unwrap_or(0));
    }

    fn memory(&self, builder: &mut MetricBuilder) {
        let stat = self.text("memory", "memory.stat", "memory.stat");
        let of = |v1, v2| field(&stat, self.cgroups.select(v1, v2));
        builder.put_some(&names::MEMORY_CACHE, of("total_cache", "file"));
        builder.put_some(&names::MEMORY_RSS, of("total_rss", "anon"));
        builder.put_some(&names::MEMORY_MAPPED, of("total_mapped_file", "file_mapped"));
        let kernel = if self.cgroups.unified() {
            // Linux 5.18 and newer report the total. For older kernels it is the sum of the largest parts.
            let parts = ["kernel_stack", "pagetables", "sock", "slab"];
            let sum = || parts.iter().filter_map(|name| field(&stat, name)).sum();
            Some(field(&stat, "kernel").unwrap_or_else(sum))
        } else {
            self.number("memory", "memory.kmem.usage_in_bytes", "")
        };
        builder.put_some(&names::MEMORY_KERNEL, kernel);
        builder.put(&names::MEMORY_SWAP, &[], self.cgroups.swap_used(self.path).unwrap_or(0));
        let events = self.text("memory", "memory.oom_control", "memory.events");
        let hits = if self.cgroups.unified() {
            field(&events, "max")
        } else {
            self.number("memory", "memory.failcnt", "")
        };
        builder.put_some(&names::MEMORY_LIMIT_HITS, hits);
        builder.put(&names::OOM_EVENTS, &[], field(&events, "oom_kill").unwrap_or(0));
        let used = self.number("memory", "memory.usage_in_bytes", "memory.current");
        let idle = of("total_inactive_file", "inactive_file").unwrap_or(0);
        builder.put_some(&names::MEMORY_USAGE, used);
        builder.put_some(&names::MEMORY_WORKING_SET, used.map(|used| used.saturating_sub(idle)));
        // memory.peak needs Linux 5.19.
        builder
            .put_some(&names::MEMORY_PEAK, self.number("memory", "memory.max_usage_in_bytes", "memory.peak"));
        for kind in ["pgfault", "pgmajfault"] {
            let all = format!("total_{kind}");
            for (scope, name) in [("container", kind), ("hierarchy", self.cgroups.select(&all, kind))] {
                builder.put(&names::MEMORY_FAULTS, &[kind, scope], field(&stat, name).unwrap_or(0));
            }
        }
    }

    fn pressure(&self, builder: &mut MetricBuilder) {
        for (resource, waiting, stalled) in [
            ("cpu", &names::PRESSURE_CPU_WAITING, &names::PRESSURE_CPU_STALLED),
            ("memory", &names::PRESSURE_MEMORY_WAITING, &names::PRESSURE_MEMORY_STALLED),
            ("io", &names::PRESSURE_IO_WAITING, &names::PRESSURE_IO_STALLED),
        ] {
            let Some(pressure) = self.cgroups.pressure(self.path, resource) else { continue };
            builder.put_some(waiting, pressure.some.map(|data| data.total / SECOND));
            builder.put_some(stalled, pressure.full.map(|data| data.total / SECOND));
        }
    }

    fn huge_pages(&self, builder: &mut MetricBuilder, sizes: &[String]) {
        for size in sizes {
            let file = |end: &str| format!("hugetlb.{size}.{end}");
            let read = |v1: &str, v2: &str| self.number("hugetlb", &file(v1), &file(v2));
            if let Some(used) = read("usage_in_bytes", "current") {
                builder.put(&names::HUGETLB_USAGE, &[size], used);
            }
            // v2 records no peak.
            if !self.cgroups.unified()
                && let Some(most) = read("max_usage_in_bytes", "")
            {
                builder.put(&names::HUGETLB_PEAK, &[size], most);
            }
        }
    }

    fn limits(&self, builder: &mut MetricBuilder, container: &Container) {
        let (quota, period, shares) = if self.cgroups.unified() {
            let max = self.text("cpu", "", "cpu.max");
            let mut words = max.split_whitespace().map(str::parse::<u64>);
            let quota = words.next().and_then(Result::ok);
            let weight = self.number("cpu", "", "cpu.weight");
            let requested = container.resources().and_then(|limits| u64::try_from(limits.cpu_shares).ok());
            // Several values of CPU shares convert to the same weight. The requested value is reported if it converts
            // to the cgroup's weight.
            let shares = weight.map(|weight| match requested {
                Some(requested) if requested > 0 && weight_of_shares(requested) == weight => requested,
                _ => shares_of_weight(weight),
            });
            (quota, words.next().and_then(Result::ok), shares)
        } else {
            let of = |name| self.number("cpu", name, "");
            (of("cpu.cfs_quota_us"), of("cpu.cfs_period_us"), of("cpu.shares"))
        };
        builder.put_some(&names::SPEC_CPU_QUOTA, quota);
        builder.put_some(&names::SPEC_CPU_PERIOD, period);
        builder.put_some(&names::SPEC_CPU_SHARES, shares);
        for (name, v1, v2) in [
            (&names::SPEC_MEMORY_LIMIT, "memory.limit_in_bytes", "memory.max"),
            (&names::SPEC_MEMORY_RESERVATION, "memory.soft_limit_in_bytes", "memory.low"),
            (&names::SPEC_MEMORY_SWAP_LIMIT, "memory.memsw.limit_in_bytes", "memory.swap.max"),
        ] {
            builder.put(name, &[], self.limit("memory", v1, v2).unwrap_or(0));
        }
    }

    /// Bytes and operations per block device.
    fn io(&self) -> Vec<device::Io> {
        if self.cgroups.unified() {
            return device::parse_v2(&self.text("io", "", "io.stat"));
        }
        let bytes = self.text("blkio", "blkio.throttle.io_service_bytes_recursive", "");
        let counts = self.text("blkio", "blkio.throttle.io_serviced_recursive", "");
        device::parse_v1(&bytes, &counts)
    }

    fn processes(&self, builder: &mut MetricBuilder, first: i32) {
        let pids = self.cgroups.processes_for_statistics(self.path);
        let open = process::open_files(process::in_group(&pids, self.path));
        builder.put(&names::PROCESSES, &[], u64::try_from(pids.len()).unwrap_or(u64::MAX));
        let threads = self.number("pids", "pids.current", "pids.current");
        let count = || process::threads(process::in_group(&pids, self.path));
        builder.put(&names::THREADS, &[], threads.unwrap_or_else(count));
        let most = self.number("pids", "pids.max", "pids.max");
        builder.put(&names::THREADS_MAX, &[], most.unwrap_or(0));
        builder.put(&names::FILE_DESCRIPTORS, &[], open.files);
        builder.put(&names::SOCKETS, &[], open.sockets);
        let first = process::in_group(&[first], self.path).next();
        for (name, limit) in first.iter().flat_map(process::soft_limits) {
            builder.put(&names::ULIMITS_SOFT, &[&name], limit);
        }
    }
}

/// Sizes of huge pages on this machine, in the notation of the hugetlb controller.
fn page_sizes() -> Vec<String> {
    let entries = std::fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten();
    let mut sizes: Vec<String> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok().map(page_size)
        })
        .collect();
    sizes.sort_unstable();
    sizes
}

fn page_size(kib: u64) -> String {
    match kib {
        kib if kib >= 1 << 20 => format!("{}GB", kib >> 20),
        kib if kib >= 1 << 10 => format!("{}MB", kib >> 10),
        kib => format!("{kib}KB"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_sizes_are_named_like_the_kernels_files() {
        assert_eq!([64, 2048, 1 << 20].map(page_size), ["64KB", "2MB", "1GB"]);
    }
}
