//! Process metrics from /proc. A process that ends before it is read counts as zero, even if its pid is reused.

use std::fs::{self, File};
use std::os::fd::AsRawFd as _;

use nix::fcntl::OFlag;

use crate::pidfd::Process;

/// Maximum descriptors of a container that are examined. A container can have millions of them, and one response has the
/// metrics of all containers of the node.
const MAX_EXAMINED: usize = 20_000;

/// Open file descriptors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Open {
    pub(super) files: u64,
    pub(super) sockets: u64,
}

/// Opens the processes that are alive and in the cgroup, one after the other: a container can have many of them.
pub(super) fn in_group(pids: &[i32], group: &str) -> impl Iterator<Item = Process> {
    pids.iter().filter_map(move |pid| Process::in_group(*pid, group).ok())
}

/// Counts the file descriptors of a container's processes. Only the first 20,000 descriptors are examined for sockets.
/// Before Linux 6.2, further descriptors are not counted.
pub(super) fn open_files(processes: impl Iterator<Item = Process>) -> Open {
    count_open(processes, MAX_EXAMINED)
}

fn count_open(processes: impl Iterator<Item = Process>, most: usize) -> Open {
    let (mut open, mut left) = (Open::default(), most);
    for process in processes {
        let Some((directory, entries)) = list(&process, "fd") else { continue };
        // Since Linux 6.2 the size of the directory is the number of descriptors. Before, it is 0.
        let number = directory.metadata().map_or(0, |found| found.len());
        let mut examined = 0;
        for entry in entries.flatten().take(left) {
            examined += 1;
            let target = fs::read_link(entry.path()).unwrap_or_default();
            open.sockets += u64::from(target.to_string_lossy().starts_with("socket:"));
        }
        left = left.saturating_sub(examined);
        open.files += number.max(u64::try_from(examined).unwrap_or(u64::MAX));
    }
    open
}

/// Counts the threads of processes, for hosts without the pids controller.
pub(super) fn threads(processes: impl Iterator<Item = Process>) -> u64 {
    let count =
        |process: Process| list(&process, "task").map_or(0, |(_directory, tasks)| tasks.flatten().count());
    u64::try_from(processes.map(count).sum::<usize>()).unwrap_or(u64::MAX)
}

/// Opens a directory of a process and lists it. The directory must stay open while the entries are read: their paths
/// lead through its descriptor.
fn list(process: &Process, name: &str) -> Option<(File, fs::ReadDir)> {
    let directory = process.file(name, OFlag::O_RDONLY | OFlag::O_DIRECTORY).ok()?;
    let entries = fs::read_dir(format!("/proc/self/fd/{}", directory.as_raw_fd())).ok()?;
    Some((directory, entries))
}

/// The finite soft limits of a process, with cAdvisor's names, such as `max_open_files`.
pub(super) fn soft_limits(process: &Process) -> Vec<(String, u64)> {
    parse_limits(&process.read("limits").unwrap_or_default())
}

/// proc(5): columns of fixed width; the name has 26 characters.
fn parse_limits(text: &str) -> Vec<(String, u64)> {
    text.lines()
        .skip(1)
        .filter_map(|line| {
            let (name, rest) = line.split_at_checked(26)?;
            let soft = rest.split_whitespace().next()?.parse().ok()?;
            Some((name.trim().to_lowercase().replace(' ', "_"), soft))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_parsed_by_column_and_unlimited_resources_left_out() {
        let text = "\
Limit                     Soft Limit           Hard Limit           Units     
Max cpu time              unlimited            unlimited            seconds   
Max open files            1024                 1048576              files     
";
        assert_eq!(parse_limits(text), [("max_open_files".to_owned(), 1024)]);
    }

    /// Opens a process several times.
    fn opened<const N: usize>(pid: i32) -> [Process; N] {
        std::array::from_fn(|_| Process::open(pid).expect("the process is alive"))
    }

    fn own<const N: usize>() -> impl Iterator<Item = Process> {
        opened::<N>(std::process::id().cast_signed()).into_iter()
    }

    #[test]
    fn own_descriptors_are_counted() {
        let socket = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
        let open = open_files(own::<1>());
        assert!(open.files > 2 && open.sockets >= 1, "{open:?}");
        assert!(threads(own::<1>()) >= 1);
        let mut limits = own::<1>().flat_map(|process| soft_limits(&process));
        assert!(limits.any(|(name, _)| name == "max_open_files"));
        drop(socket);
    }

    #[test]
    fn a_process_with_a_reused_pid_counts_as_zero() {
        if !coracle_testing::has_own_pids() {
            let test = "metrics::process::tests::a_process_with_a_reused_pid_counts_as_zero";
            return coracle_testing::run_with_own_pids(test);
        }
        let ([files, tasks, limits], second) = coracle_testing::reuse_pid(opened::<3>);
        assert_eq!(open_files([files].into_iter()), Open::default());
        assert_eq!(threads([tasks].into_iter()), 0);
        assert!(soft_limits(&limits).is_empty());
        let [files, tasks, limits] = opened(second.pid());
        assert_ne!(open_files([files].into_iter()).files, 0);
        assert_eq!(threads([tasks].into_iter()), 1);
        assert!(!soft_limits(&limits).is_empty());
    }

    #[test]
    fn a_listed_process_that_is_not_in_the_cgroup_is_left_out() {
        // Its pid was reused after the processes of the cgroup were listed.
        let own = std::process::id().cast_signed();
        assert_eq!(in_group(&[own, -1], "/coracle-test/not-its-group").count(), 0);
    }

    #[test]
    fn a_limited_number_of_descriptors_is_examined() {
        let sockets: Vec<_> =
            (0..50).map(|_| std::os::unix::net::UnixDatagram::unbound().expect("a socket")).collect();
        assert!(count_open(own::<2>(), 20).sockets <= 20);
        assert!(count_open(own::<1>(), 1_000_000).sockets >= 50);
        drop(sockets);
    }
}
