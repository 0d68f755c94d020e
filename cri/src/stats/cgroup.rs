//! CPU time, memory, swap and pressure of a cgroup, on v1 and v2.

use coracle_proto::cri;

use crate::cgroup::Cgroups;
use crate::cgroup::value::field;

impl Cgroups {
    /// Nanoseconds of CPU time since the group was created. `None` if the group does not exist.
    pub(crate) fn cpu_nanoseconds(&self, group: &str) -> Option<u64> {
        if self.unified() {
            Some(field(&self.text("cpu", group, "cpu.stat")?, "usage_usec")?.saturating_mul(1000))
        } else {
            self.number("cpuacct", group, "cpuacct.usage")
        }
    }

    /// Memory usage. `None` if the group does not exist.
    pub(super) fn memory(&self, group: &str, timestamp: i64) -> Option<cri::MemoryUsage> {
        let stat = self.text("memory", group, "memory.stat")?;
        let used = self.number("memory", group, self.select("memory.usage_in_bytes", "memory.current"))?;
        let of = |v1, v2| field(&stat, self.select(v1, v2));
        let working = used.saturating_sub(of("total_inactive_file", "inactive_file").unwrap_or(0));
        let limit = self.limit("memory", group, self.select("memory.limit_in_bytes", "memory.max"));
        Some(cri::MemoryUsage {
            timestamp,
            working_set_bytes: value(working),
            available_bytes: limit.and_then(|limit| value(limit.saturating_sub(working))),
            usage_bytes: value(used),
            rss_bytes: of("total_rss", "anon").and_then(value),
            page_faults: of("total_pgfault", "pgfault").and_then(value),
            major_page_faults: of("total_pgmajfault", "pgmajfault").and_then(value),
            psi: self.pressure(group, "memory"),
        })
    }

    /// Swap usage. `None` if the kernel does not count swap.
    pub(super) fn swap(&self, group: &str, timestamp: i64) -> Option<cri::SwapUsage> {
        let used = self.swap_used(group)?;
        let limit = if self.unified() {
            self.limit("memory", group, "memory.swap.max")
        } else {
            // v1 limits memory and swap together.
            let both = self.limit("memory", group, "memory.memsw.limit_in_bytes");
            let memory = self.limit("memory", group, "memory.limit_in_bytes");
            both.zip(memory).map(|(both, memory)| both.saturating_sub(memory))
        };
        Some(cri::SwapUsage {
            timestamp,
            swap_available_bytes: limit.and_then(|limit| value(limit.saturating_sub(used))),
            swap_usage_bytes: value(used),
        })
    }

    /// Bytes of the group in swap.
    pub(crate) fn swap_used(&self, group: &str) -> Option<u64> {
        if self.unified() {
            self.number("memory", group, "memory.swap.current")
        } else {
            field(&self.text("memory", group, "memory.stat")?, "total_swap")
        }
    }

    /// Pressure stall information of a group for a resource: `cpu`, `memory` or `io`. `None` on v1, or if the kernel does not
    /// measure pressure.
    pub(crate) fn pressure(&self, group: &str, resource: &str) -> Option<cri::PsiStats> {
        if !self.unified() {
            return None;
        }
        parse_pressure(&self.text(resource, group, &format!("{resource}.pressure"))?)
    }
}

/// Parses a pressure file: averages in percent, the total in microseconds (the kernel's Documentation/accounting/psi.rst).
fn parse_pressure(text: &str) -> Option<cri::PsiStats> {
    let line = |kind: &str| -> Option<cri::PsiData> {
        let line = text.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(' '))?;
        let of = |name: &str| {
            line.split(' ').find_map(|pair| pair.split_once('=').filter(|(key, _)| *key == name))
        };
        let average = |name: &str| of(name).and_then(|(_, text)| text.parse().ok());
        let total: u64 = of("total")?.1.trim().parse().ok()?;
        Some(cri::PsiData {
            total: total.saturating_mul(1000),
            avg10: average("avg10")?,
            avg60: average("avg60")?,
            avg300: average("avg300")?,
        })
    };
    // A group's `cpu.pressure` had no "full" before Linux 5.13.
    Some(cri::PsiStats { some: Some(line("some")?), full: line("full") })
}

#[allow(clippy::unnecessary_wraps, reason = "every field of the message is optional")]
pub(super) fn value(value: u64) -> Option<cri::UInt64Value> {
    Some(cri::UInt64Value { value })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_is_converted_to_nanoseconds() {
        let text = "some avg10=96.80 avg60=94.72 avg300=63.66 total=4798446741\n\
                    full avg10=0.00 avg60=0.00 avg300=0.50 total=7\n";
        let found = parse_pressure(text).expect("both lines");
        let (some, full) = (found.some.expect("some"), found.full.expect("full"));
        assert_eq!((some.total, some.avg10), (4_798_446_741_000, 96.80));
        assert_eq!((full.total, full.avg300), (7_000, 0.50));
        assert!(parse_pressure("some avg10=1.00 avg60=1.00 avg300=1.00 total=2\n").is_some());
        assert_eq!(parse_pressure(""), None);
    }
}
