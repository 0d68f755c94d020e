//! Process metrics from /proc. A process that ends before it is read counts as zero.

use std::fs;
use std::path::PathBuf;

/// Maximum descriptors of a container that are examined. A container can have millions of them, and one response has the
/// metrics of all containers of the node.
const MAX_EXAMINED: usize = 20_000;

/// Open file descriptors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Open {
    pub(super) files: u64,
    pub(super) sockets: u64,
}

/// Counts the file descriptors of a container's processes. Only the first 20,000 descriptors are examined for sockets.
/// Before Linux 6.2, further descriptors are not counted.
pub(super) fn open_files(pids: &[i32]) -> Open {
    count_open(pids, MAX_EXAMINED)
}

fn count_open(pids: &[i32], most: usize) -> Open {
    let (mut open, mut left) = (Open::default(), most);
    for pid in pids {
        let dir = PathBuf::from(format!("/proc/{pid}/fd"));
        // Since Linux 6.2 the size of the directory is the number of descriptors. Before, it is 0.
        let number = fs::metadata(&dir).map_or(0, |found| found.len());
        let Ok(entries) = fs::read_dir(&dir) else { continue };
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
pub(super) fn threads(pids: &[i32]) -> u64 {
    let count = |pid| fs::read_dir(format!("/proc/{pid}/task")).map_or(0, |tasks| tasks.flatten().count());
    u64::try_from(pids.iter().map(count).sum::<usize>()).unwrap_or(u64::MAX)
}

/// The finite soft limits of a process, with cAdvisor's names, such as `max_open_files`.
pub(super) fn soft_limits(pid: i32) -> Vec<(String, u64)> {
    parse_limits(&fs::read_to_string(format!("/proc/{pid}/limits")).unwrap_or_default())
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

    #[test]
    fn own_descriptors_are_counted() {
        let socket = std::os::unix::net::UnixDatagram::unbound().expect("a socket");
        let pid = i32::try_from(std::process::id()).expect("a pid");
        let open = open_files(&[pid]);
        assert!(open.files > 2 && open.sockets >= 1, "{open:?}");
        assert!(threads(&[pid]) >= 1);
        assert!(soft_limits(pid).iter().any(|(name, _)| name == "max_open_files"));
        drop(socket);
        assert_eq!(open_files(&[-1]), Open::default());
    }

    #[test]
    fn a_limited_number_of_descriptors_is_examined() {
        let sockets: Vec<_> =
            (0..50).map(|_| std::os::unix::net::UnixDatagram::unbound().expect("a socket")).collect();
        let pid = i32::try_from(std::process::id()).expect("a pid");
        assert!(count_open(&[pid, pid], 20).sockets <= 20);
        assert!(count_open(&[pid], 1_000_000).sockets >= 50);
        drop(sockets);
    }
}
