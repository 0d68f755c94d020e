//! Processor time and memory of a cgroup, on v1 and v2.

use std::path::PathBuf;

use coracle_proto::cri;

use crate::cgroup::Cgroups;

/// v1 writes "no limit" as a page-aligned `i64::MAX`.
const UNLIMITED: u64 = 1 << 62;

impl Cgroups {
    /// Processor time since the group was made; none when the group is gone.
    pub(super) fn cpu(&self, group: &str, timestamp: i64) -> Option<cri::CpuUsage> {
        let nanoseconds = if self.unified() {
            field(&text(self.file("cpu", group, "cpu.stat"))?, "usage_usec")?.saturating_mul(1000)
        } else {
            number(self.file("cpuacct", group, "cpuacct.usage"))?
        };
        Some(cri::CpuUsage {
            timestamp,
            usage_core_nano_seconds: value(nanoseconds),
            usage_nano_cores: None,
            psi: None,
        })
    }

    /// Memory in use; none when the group is gone.
    pub(super) fn memory(&self, group: &str, timestamp: i64) -> Option<cri::MemoryUsage> {
        let v2 = self.unified();
        let name = |old: &str, new: &str| self.file("memory", group, if v2 { new } else { old });
        let stat = text(name("memory.stat", "memory.stat"))?;
        let used = number(name("memory.usage_in_bytes", "memory.current"))?;
        let inactive = field(&stat, if v2 { "inactive_file" } else { "total_inactive_file" }).unwrap_or(0);
        let working = used.saturating_sub(inactive);
        let limit = number(name("memory.limit_in_bytes", "memory.max")).filter(|limit| *limit < UNLIMITED);
        Some(cri::MemoryUsage {
            timestamp,
            working_set_bytes: value(working),
            available_bytes: limit.and_then(|limit| value(limit.saturating_sub(working))),
            usage_bytes: value(used),
            rss_bytes: field(&stat, if v2 { "anon" } else { "total_rss" }).and_then(value),
            page_faults: field(&stat, if v2 { "pgfault" } else { "total_pgfault" }).and_then(value),
            major_page_faults: field(&stat, if v2 { "pgmajfault" } else { "total_pgmajfault" })
                .and_then(value),
            psi: None,
        })
    }

    /// Swap in use, where it is counted.
    pub(super) fn swap(&self, group: &str, timestamp: i64) -> Option<cri::SwapUsage> {
        let used = if self.unified() {
            number(self.file("memory", group, "memory.swap.current"))?
        } else {
            field(&text(self.file("memory", group, "memory.stat"))?, "total_swap")?
        };
        Some(cri::SwapUsage { timestamp, swap_available_bytes: None, swap_usage_bytes: value(used) })
    }
}

#[allow(clippy::unnecessary_wraps, reason = "every field of the wire's type is optional")]
fn value(value: u64) -> Option<cri::UInt64Value> {
    Some(cri::UInt64Value { value })
}

fn text(path: Option<PathBuf>) -> Option<String> {
    std::fs::read_to_string(path?).ok()
}

fn number(path: Option<PathBuf>) -> Option<u64> {
    text(path)?.trim().parse().ok()
}

fn field(stat: &str, name: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_found_by_its_whole_name() {
        let stat = "rss 1\ntotal_rss 2\ntotal_rss_huge 3\n";
        assert_eq!(field(stat, "rss"), Some(1));
        assert_eq!(field(stat, "total_rss"), Some(2));
        assert_eq!(field(stat, "total"), None);
    }
}
