//! Disk usage of directories and traffic of network interfaces.

pub(crate) mod meter;

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use coracle_tree::Usage;
use tracing::debug;

/// Maximum bytes that are read of the kernel's table of interfaces: about 8,000 interfaces. A container with NET_ADMIN
/// can make any number of interfaces.
const TABLE_MAX: u64 = 1 << 20;

/// The pod's interface that the CRI calls the default interface.
pub(crate) const DEFAULT_INTERFACE: &str = "eth0";

/// Maximum number of reported interfaces of a pod. Each one has eight time series.
const INTERFACES_MAX: usize = 64;

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

/// Bytes and inodes below a container's layer. All hard links of a file are in the layer, so each file counts once.
/// `None` if `goes_on` ended the count.
fn disk(dir: &Path, goes_on: impl FnMut() -> bool) -> Option<Usage> {
    coracle_tree::usage_while(dir, goes_on).unwrap_or_else(|error| {
        debug!(dir = %dir.display(), %error, "cannot measure the disk usage of a directory");
        Some(Usage::default())
    })
}

/// The interfaces in the network namespace of a process, without the loopback interface: at most [`INTERFACES_MAX`].
pub(crate) fn interfaces(pid: i32) -> Option<Vec<Interface>> {
    let table = File::open(format!("/proc/{pid}/net/dev")).ok()?;
    whole_lines(table).ok().map(|table| reported(parse(&table)))
}

/// The first [`INTERFACES_MAX`] interfaces. The default interface comes first.
fn reported(mut found: Vec<Interface>) -> Vec<Interface> {
    // A stable sort: the other interfaces keep their order.
    found.sort_by_key(|interface| interface.name != DEFAULT_INTERFACE);
    found.truncate(INTERFACES_MAX);
    found
}

/// The lines in the first [`TABLE_MAX`] bytes, without an incomplete line at the end.
fn whole_lines(table: impl io::Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    table.take(TABLE_MAX).read_to_end(&mut bytes)?;
    let text = String::from_utf8_lossy(&bytes);
    Ok(text.rsplit_once('\n').map(|(lines, _rest)| lines.to_owned()).unwrap_or_default())
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

/// Fuzz target: the kernel's table of interfaces, whose names a container chooses.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(table: &[u8]) {
    let Ok(lines) = whole_lines(table) else { return };
    let found = parse(&lines);
    assert!(found.len() <= lines.lines().count(), "{} interfaces", found.len());
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
    fn of_many_interfaces_the_default_one_and_the_first_ones_are_reported() {
        let line = |name: &str| format!("{name}: 100 2 3 9 0 0 0 0 200 4 5 6 0 0 0 0\n");
        let many = (0..1000).map(|number| line(&format!("dummy{number}")));
        let table: String = many.chain([line(DEFAULT_INTERFACE)]).collect();
        let found = reported(parse(&table));
        let names: Vec<&str> = found.iter().take(3).map(|interface| interface.name.as_str()).collect();
        assert_eq!((found.len(), names), (INTERFACES_MAX, vec!["eth0", "dummy0", "dummy1"]));
    }

    #[test]
    fn of_a_table_without_end_the_first_lines_are_read() {
        let line = "eth0: 100 2 3 9 0 0 0 0 200 4 5 6 0 0 0 0\n";
        let table = whole_lines(line.as_bytes().repeat(1 << 15).as_slice()).unwrap();
        assert_eq!(parse(&table).len(), (1 << 20) / line.len());
        assert!(table.ends_with('0'), "the last line is complete");
        assert_eq!(parse(&whole_lines(line.as_bytes()).unwrap()).len(), 1);
    }
}
