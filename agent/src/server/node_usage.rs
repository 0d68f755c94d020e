//! Usage of the whole machine, from the kernel.

use std::fs::{self, File};
use std::io::{self, Read as _};

/// Usage of the machine. Amounts are in bytes.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NodeUsage {
    /// Processor time in nanoseconds, without idle and iowait.
    pub(super) cpu_nanos: u64,
    /// Time of the boot in seconds since the epoch.
    pub(super) booted: i64,
    pub(super) memory_used: u64,
    /// Used memory, without file pages that the kernel can free immediately.
    pub(super) memory_working_set: u64,
    pub(super) memory_available: u64,
    pub(super) memory_anonymous: u64,
    pub(super) swap_used: u64,
    pub(super) swap_available: u64,
    pub(super) interfaces: Vec<Interface>,
    /// Maximum and current number of process ids in use.
    pub(super) max_processes: Option<u64>,
    pub(super) processes: Option<u64>,
}

/// Traffic of a network interface.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) rx_bytes: u64,
    pub(super) rx_errors: u64,
    pub(super) tx_bytes: u64,
    pub(super) tx_errors: u64,
}

/// The files that the usage is read from.
#[derive(Default)]
struct Files {
    stat: String,
    meminfo: String,
    network: String,
    loadavg: String,
    pid_max: String,
    /// Ticks per second in `stat`.
    ticks: u64,
}

/// Bytes of the kernel's table of interfaces that are read, about 8,000 interfaces. A container in the node's network
/// can make any number of them.
const TABLE_MAX: u64 = 1 << 20;
/// Name prefixes of interfaces that do not count as the machine's own, as in cAdvisor.
const OTHER_INTERFACES: [&str; 4] = ["lo", "veth", "docker", "nerdctl"];

// === impl NodeUsage ===

impl NodeUsage {
    /// The usage now. Blocks for reads of files in /proc.
    pub(super) fn now() -> Self {
        let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
        let ticks = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok().flatten();
        Self::of(&Files {
            stat: read("/proc/stat"),
            meminfo: read("/proc/meminfo"),
            network: File::open("/proc/net/dev").and_then(first_lines).unwrap_or_default(),
            loadavg: read("/proc/loadavg"),
            pid_max: read("/proc/sys/kernel/pid_max"),
            ticks: ticks.and_then(|ticks| u64::try_from(ticks).ok()).unwrap_or(100),
        })
    }

    fn of(files: &Files) -> Self {
        let line =
            |name: &str| files.stat.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        let fields: Vec<u64> =
            line("cpu ").split_whitespace().map(|field| field.parse().unwrap_or(0)).collect();
        // user nice system idle iowait irq softirq steal; user includes the guest time.
        let busy: u64 = [0, 1, 2, 5, 6].iter().filter_map(|at| fields.get(*at)).sum();
        let bytes = |name: &str| crate::node::kib(&files.meminfo, name) * 1024;
        let (total, available) = (bytes("MemTotal"), bytes("MemAvailable"));
        // Runnable and existing threads: "1/234".
        let threads = files.loadavg.split_whitespace().nth(3).and_then(|text| text.split_once('/'));
        Self {
            cpu_nanos: busy * (1_000_000_000 / files.ticks.max(1)),
            booted: line("btime ").trim().parse().unwrap_or_default(),
            memory_used: total.saturating_sub(bytes("MemFree")),
            memory_working_set: total.saturating_sub(available),
            memory_available: available,
            memory_anonymous: bytes("AnonPages"),
            swap_used: bytes("SwapTotal").saturating_sub(bytes("SwapFree")),
            swap_available: bytes("SwapFree"),
            interfaces: files.network.lines().filter_map(interface).collect(),
            max_processes: files.pid_max.trim().parse().ok(),
            processes: threads.and_then(|(_, existing)| existing.parse().ok()),
        }
    }
}

/// The lines in the first [`TABLE_MAX`] bytes, without an incomplete line at the end.
fn first_lines(table: impl io::Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    table.take(TABLE_MAX).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.rsplit_once('\n').map(|(lines, _rest)| lines.to_owned()).unwrap_or_default())
}

/// An interface of the machine in a line of `/proc/net/dev`.
fn interface(line: &str) -> Option<Interface> {
    let (name, numbers) = line.split_once(':')?;
    let name = name.trim();
    if OTHER_INTERFACES.iter().any(|other| name.starts_with(other)) {
        return None;
    }
    let numbers: Vec<u64> = numbers.split_whitespace().map_while(|number| number.parse().ok()).collect();
    let number = |at: usize| numbers.get(at).copied();
    Some(Interface {
        name: name.to_owned(),
        rx_bytes: number(0)?,
        rx_errors: number(2)?,
        tx_bytes: number(8)?,
        tx_errors: number(10)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_table_without_an_end_the_first_lines_are_read() {
        let line = "eth0: 10 2 3 0 0 0 0 0 40 5 6 0 0 0 0 0\n";
        let text = first_lines(io::repeat(b' ').take(4).chain(line.repeat(1 << 15).as_bytes())).unwrap();
        assert!(text.len() < 1 << 20 && text.ends_with('0'));
        assert!(text.lines().all(|line| interface(line).is_some()));
        assert_eq!(first_lines(line.as_bytes()).unwrap(), line.trim_end());
    }

    #[test]
    fn usage_of_the_machine_is_read_from_its_files() {
        let text = |text: &str| text.to_owned();
        let node = NodeUsage::of(&Files {
            stat: text("cpu  10 1 5 1000 7 2 2 0 3 0\ncpu0 1 1 1 1\nbtime 1700000000\n"),
            meminfo: text(
                "MemTotal: 100 kB\nMemFree: 50 kB\nMemAvailable: 60 kB\nAnonPages: 9 kB\nSwapTotal: 8 kB\nSwapFree: 6 kB\n",
            ),
            network: text(
                "Inter-|   Receive\n face |bytes packets\n  lo: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n\
                 eth0: 10 2 3 0 0 0 0 0 40 5 6 0 0 0 0 0\nveth1: 1 1 0 0 0 0 0 0 1 1 0 0 0 0 0 0\n",
            ),
            loadavg: text("0.00 0.01 0.05 1/234 5678\n"),
            pid_max: text("4194304\n"),
            ticks: 100,
        });
        assert_eq!((node.cpu_nanos, node.booted), (200_000_000, 1_700_000_000));
        assert_eq!((node.memory_used, node.memory_working_set), (51_200, 40_960));
        assert_eq!((node.memory_available, node.memory_anonymous), (61_440, 9_216));
        assert_eq!((node.swap_used, node.swap_available), (2_048, 6_144));
        assert_eq!((node.max_processes, node.processes), (Some(4_194_304), Some(234)));
        let eth0 = Interface { name: text("eth0"), rx_bytes: 10, rx_errors: 3, tx_bytes: 40, tx_errors: 6 };
        assert_eq!(node.interfaces, [eth0]);
    }

    #[test]
    fn this_machine_has_memory_and_processes() {
        let node = NodeUsage::now();
        assert!(node.cpu_nanos > 0 && node.memory_used > 0 && node.booted > 0, "{node:?}");
        assert!(node.processes.is_some_and(|count| count > 0), "{node:?}");
    }
}
