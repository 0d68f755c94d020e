//! Metrics of this process, with the names of Prometheus' client libraries.
//!
//! The feature `process` of the crate `prometheus` has them, too, but reads `/proc` with `procfs`, which is a large library
//! for six numbers.

use std::fs;

use nix::sys::resource::{Resource, getrlimit};
use nix::unistd::{SysconfVar, sysconf};
use prometheus::core::{Collector, Desc};
use prometheus::proto::MetricFamily;
use prometheus::{Counter, IntGauge};

/// Collector of the metrics of this process. The values are read for each response.
#[derive(Debug)]
pub struct ProcessMetrics {
    cpu: Counter,
    open_files: IntGauge,
    max_open_files: IntGauge,
    virtual_memory: IntGauge,
    resident_memory: IntGauge,
    start_time: IntGauge,
    threads: IntGauge,
}

/// Values of `/proc/self/stat` (proc_pid_stat(5)).
#[derive(Debug, PartialEq)]
struct Stat {
    /// Processor time of user and system.
    cpu_ticks: u64,
    threads: u64,
    /// Start of the process after the start of the system.
    start_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

// === impl ProcessMetrics ===

impl ProcessMetrics {
    /// The metrics. Their names can be registered once in a registry.
    #[must_use]
    pub fn new() -> Self {
        let gauge = |name, help| valid(IntGauge::new(name, help));
        let metrics = Self {
            cpu: cpu(),
            open_files: gauge("process_open_fds", "Number of open file descriptors."),
            max_open_files: gauge("process_max_fds", "Maximum number of open file descriptors."),
            virtual_memory: gauge("process_virtual_memory_bytes", "Virtual memory size in bytes."),
            resident_memory: gauge("process_resident_memory_bytes", "Resident memory size in bytes."),
            start_time: gauge(
                "process_start_time_seconds",
                "Start time of the process since unix epoch in seconds.",
            ),
            threads: gauge("process_threads", "Number of OS threads in the process."),
        };
        if let Some((booted, stat)) = boot_time().zip(Stat::now()) {
            set(&metrics.start_time, booted + stat.start_ticks / ticks_per_second());
        }
        metrics
    }

    fn gauges(&self) -> [&IntGauge; 6] {
        [
            &self.open_files,
            &self.max_open_files,
            &self.virtual_memory,
            &self.resident_memory,
            &self.start_time,
            &self.threads,
        ]
    }
}

impl Collector for ProcessMetrics {
    fn desc(&self) -> Vec<&Desc> {
        let mut all = self.cpu.desc();
        all.extend(self.gauges().into_iter().flat_map(Collector::desc));
        all
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let Some(stat) = Stat::now() else { return Vec::new() };
        if let Some(open) = open_files() {
            set(&self.open_files, open);
        }
        if let Ok((soft, _)) = getrlimit(Resource::RLIMIT_NOFILE)
            && soft != libc::RLIM_INFINITY
        {
            set(&self.max_open_files, soft);
        }
        set(&self.virtual_memory, stat.virtual_bytes);
        set(
            &self.resident_memory,
            stat.resident_pages.saturating_mul(system_value(SysconfVar::PAGE_SIZE, 4096)),
        );
        set(&self.threads, stat.threads);
        // A counter of this response: two responses at the same time would count a difference twice.
        let total = cpu();
        total.inc_by(stat.cpu_ticks as f64 / ticks_per_second() as f64);
        let mut families = total.collect();
        families.extend(self.gauges().into_iter().flat_map(Collector::collect));
        families
    }
}

impl Default for ProcessMetrics {
    fn default() -> Self {
        Self::new()
    }
}

/// Unwraps a result that is an error only if a name in this file is invalid.
fn valid<T>(made: prometheus::Result<T>) -> T {
    made.unwrap_or_else(|error| unreachable!("invalid metric: {error}"))
}

fn cpu() -> Counter {
    valid(Counter::new("process_cpu_seconds_total", "Total user and system CPU time spent in seconds."))
}

fn set(gauge: &IntGauge, value: u64) {
    gauge.set(i64::try_from(value).unwrap_or(i64::MAX));
}

// === impl Stat ===

impl Stat {
    fn now() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/self/stat").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The name of the process is in parentheses and may contain spaces and parentheses.
        let (_, fields) = text.rsplit_once(')')?;
        let fields: Vec<&str> = fields.split_ascii_whitespace().collect();
        // The manual page counts fields from 1. The first field after the name is field 3.
        let field = |number: usize| fields.get(number - 3)?.parse::<u64>().ok();
        Some(Self {
            cpu_ticks: field(14)? + field(15)?,
            threads: field(20)?,
            start_ticks: field(22)?,
            virtual_bytes: field(23)?,
            resident_pages: field(24)?,
        })
    }
}

/// Start of the system, in seconds since 1970.
fn boot_time() -> Option<u64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

/// Number of open file descriptors. Since Linux 6.2 it is the size of the directory.
fn open_files() -> Option<u64> {
    const OPEN_FILES: &str = "/proc/self/fd";
    let size = fs::metadata(OPEN_FILES).ok()?.len();
    if size > 0 {
        return Some(size);
    }
    // The directory itself is open while it is read.
    fs::read_dir(OPEN_FILES).ok()?.count().checked_sub(1)?.try_into().ok()
}

fn ticks_per_second() -> u64 {
    system_value(SysconfVar::CLK_TCK, 100)
}

/// A value of sysconf(3), or the usual value if it is unknown.
fn system_value(variable: SysconfVar, usual: u64) -> u64 {
    let found = sysconf(variable).ok().flatten();
    found.and_then(|value| u64::try_from(value).ok()).filter(|value| *value > 0).unwrap_or(usual)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_those_after_the_name_of_the_process() {
        let text = "7 (a (b) c) S 1 7 7 0 -1 4194560 100 200 0 0 31 11 5 6 20 0 9 0 4567 8192000 321 18446744073709551615 1\n";
        let expected = Stat {
            cpu_ticks: 42,
            threads: 9,
            start_ticks: 4567,
            virtual_bytes: 8_192_000,
            resident_pages: 321,
        };
        assert_eq!(Stat::parse(text), Some(expected));
        assert_eq!(Stat::parse("7 (a) S 1 7"), None);
        assert_eq!(Stat::parse(""), None);
    }

    #[test]
    fn all_metrics_have_values_of_this_process() {
        let metrics = ProcessMetrics::new();
        let families = metrics.collect();
        let names: Vec<&str> = families.iter().map(MetricFamily::name).collect();
        let described: Vec<&str> = metrics.desc().into_iter().map(|desc| desc.fq_name.as_str()).collect();
        assert_eq!(names, described);
        assert_eq!(names.len(), 7);
        let gauge = |name: &str| {
            let family = families.iter().find(|family| family.name() == name).expect(name);
            family.get_metric()[0].get_gauge().get_value()
        };
        for name in ["process_virtual_memory_bytes", "process_resident_memory_bytes"] {
            assert!(gauge(name) > 100_000.0, "{name}: {}", gauge(name));
        }
        for name in ["process_open_fds", "process_max_fds", "process_threads"] {
            assert!(gauge(name) >= 1.0, "{name}: {}", gauge(name));
        }
        assert!(gauge("process_start_time_seconds") > 1_000_000_000.0);
    }
}
