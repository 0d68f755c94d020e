//! Disk usage of directories and traffic of network interfaces.

use std::path::Path;

use rustix::fs::FileType;
use tracing::debug;

/// Fixed-point 1.0 for parts of files.
const WHOLE: u128 = 1 << 60;

/// A network interface and its traffic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Interface {
    pub(crate) name: String,
    pub(crate) received: Traffic,
    pub(crate) sent: Traffic,
}

/// Traffic in one direction since the interface was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Traffic {
    pub(crate) bytes: u64,
    pub(crate) packets: u64,
    pub(crate) errors: u64,
    pub(crate) dropped: u64,
}

/// Bytes and inodes below a directory. A file with several names counts once: each name counts as a part of the file, so that
/// no list of seen inodes is needed, which could have millions of entries. If a file also has names elsewhere, only the parts
/// of the names here count. A container cannot create such names in its writable layer.
pub(super) fn disk(dir: &Path) -> (u64, u64) {
    let (mut bytes, mut inodes) = (0, 0);
    let counted = coracle_tree::walk(dir, |found| {
        let stat = found.stat;
        // The link count of a directory includes `..` of its subdirectories.
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let names = if is_directory { 1 } else { u128::from(stat.st_nlink).max(1) };
        let part = WHOLE / names;
        inodes += part;
        bytes += u128::from(stat.st_blocks.unsigned_abs()) * 512 * part;
    });
    if let Err(error) = counted {
        debug!(dir = %dir.display(), %error, "could not count the whole disk usage of a directory");
    }
    (whole(bytes), whole(inodes))
}

/// Rounds to the nearest integer: the parts of a file can add up to slightly less than 1.
fn whole(parts: u128) -> u64 {
    u64::try_from((parts + WHOLE / 2) / WHOLE).unwrap_or(u64::MAX)
}

/// The interfaces in the network namespace of a process, without the loopback interface.
pub(crate) fn interfaces(pid: i32) -> Option<Vec<Interface>> {
    let table = std::fs::read_to_string(format!("/proc/{pid}/net/dev")).ok()?;
    Some(parse(&table))
}

/// Parses the kernel's table. Columns for received traffic: bytes, packets, errs, drop, fifo, frame, compressed, multicast.
/// Columns for sent traffic: bytes, packets, errs, drop, fifo, colls, carrier, compressed.
fn parse(table: &str) -> Vec<Interface> {
    let traffic = |fields: &[u64]| match fields {
        [bytes, packets, errors, dropped, ..] => {
            Some(Traffic { bytes: *bytes, packets: *packets, errors: *errors, dropped: *dropped })
        }
        _ => None,
    };
    table
        .lines()
        .filter_map(|line| line.split_once(':'))
        .filter(|(name, _)| name.trim() != "lo")
        .filter_map(|(name, rest)| {
            let fields: Vec<u64> = rest.split_whitespace().filter_map(|field| field.parse().ok()).collect();
            Some(Interface {
                name: name.trim().to_owned(),
                received: traffic(&fields)?,
                sent: traffic(fields.get(8..)?)?,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_table_is_parsed_by_column() {
        let table = "Inter-|   Receive\n face |bytes packets errs\n    lo: 1 1 1 0 0 0 0 0 1 1 1 0 0 0 0 0\n\
                     eth0: 100 2 3 9 0 0 0 0 200 4 5 6 0 0 0 0\n";
        let found = parse(table);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].received, Traffic { bytes: 100, packets: 2, errors: 3, dropped: 9 });
        assert_eq!(found[0].sent, Traffic { bytes: 200, packets: 4, errors: 5, dropped: 6 });
    }

    #[test]
    fn a_file_with_several_names_counts_once() {
        let dir = tempfile::tempdir().expect("directory");
        for (file, names) in [("a", 1), ("b", 3), ("c", 7), ("d", 1001)] {
            std::fs::write(dir.path().join(file), vec![1; 10_000]).expect("write");
            for name in 1..names {
                let name = dir.path().join(format!("{file}{name}"));
                std::fs::hard_link(dir.path().join(file), name).expect("link");
            }
        }
        let one = std::os::unix::fs::MetadataExt::blocks(&dir.path().join("a").metadata().expect("there"));
        assert_eq!(disk(dir.path()), (4 * 512 * one, 4));
    }

    #[test]
    fn directories_deeper_than_a_path_are_counted() {
        let dir = tempfile::tempdir().expect("directory");
        let (down, next) = (dir.path().join("down"), dir.path().join("next"));
        std::fs::create_dir(&down).expect("make");
        std::fs::write(down.join("file"), vec![1; 100_000]).expect("write");
        for _ in 0..30 {
            std::fs::create_dir(&next).expect("make");
            std::fs::rename(&down, next.join("d".repeat(200))).expect("rename");
            std::fs::rename(&next, &down).expect("rename");
        }
        let (bytes, inodes) = disk(dir.path());
        assert_eq!(inodes, 32);
        assert!(bytes >= 100_000, "{bytes}");
    }
}
