//! What lies on disk and what went over the network.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use coracle_proto::cri;

/// Bytes and inodes below a directory. A file with several names counts once.
pub(super) fn disk(dir: &Path) -> (u64, u64) {
    let (mut bytes, mut inodes) = (0, 0);
    let mut linked = HashSet::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(dir) = todo.pop() {
        let Ok(entries) = std::fs::read_dir(&dir) else { continue };
        for entry in entries.flatten() {
            // Not following links: an entry's own metadata.
            let Ok(metadata) = entry.metadata() else { continue };
            if metadata.is_dir() {
                todo.push(entry.path());
            } else if metadata.nlink() > 1 && !linked.insert((metadata.dev(), metadata.ino())) {
                continue;
            }
            bytes += metadata.blocks() * 512;
            inodes += 1;
        }
    }
    (bytes, inodes)
}

/// The traffic of the network namespace that a process is in.
pub(super) fn network(pid: i32, timestamp: i64) -> Option<cri::NetworkUsage> {
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).ok()?;
    let mut interfaces = parse(&table);
    let default = interfaces.iter().position(|interface| interface.name == "eth0");
    let default_interface = default.map(|place| interfaces.remove(place));
    Some(cri::NetworkUsage { timestamp, default_interface, interfaces })
}

fn parse(table: &str) -> Vec<cri::NetworkInterfaceUsage> {
    let value =
        |fields: &[u64], place: usize| fields.get(place).map(|value| cri::UInt64Value { value: *value });
    table
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(name, rest)| {
            let fields: Vec<u64> = rest.split_whitespace().filter_map(|field| field.parse().ok()).collect();
            cri::NetworkInterfaceUsage {
                name: name.trim().to_owned(),
                rx_bytes: value(&fields, 0),
                rx_errors: value(&fields, 2),
                tx_bytes: value(&fields, 8),
                tx_errors: value(&fields, 10),
            }
        })
        .filter(|interface| interface.name != "lo")
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_read_by_column() {
        let table = "Inter-|   Receive\n face |bytes packets errs\n    lo: 1 1 1 0 0 0 0 0 1 1 1 0 0 0 0 0\n\
                     eth0: 100 2 3 0 0 0 0 0 200 4 5 0 0 0 0 0\n";
        let found = parse(table);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].tx_bytes, Some(cri::UInt64Value { value: 200 }));
        assert_eq!(found[0].tx_errors, Some(cri::UInt64Value { value: 5 }));
    }

    #[test]
    fn hard_links_count_once() {
        let dir = tempfile::tempdir().expect("directory");
        std::fs::write(dir.path().join("a"), vec![1; 10_000]).expect("write");
        std::fs::hard_link(dir.path().join("a"), dir.path().join("b")).expect("link");
        assert_eq!(disk(dir.path()).1, 1);
    }
}
