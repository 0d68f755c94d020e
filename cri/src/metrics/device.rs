//! Block devices: their names, and a cgroup's I/O.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Mutex;

use super::builder::MetricBuilder;
use super::descriptor as names;
use crate::lock::locked;

/// I/O of one device, by v1's names of operations: `Read`, `Write`, ….
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Io {
    /// `major:minor`.
    device: String,
    bytes: BTreeMap<String, u64>,
    counts: BTreeMap<String, u64>,
}

/// Names of devices, cached.
#[derive(Debug, Default)]
pub(super) struct Devices {
    names: Mutex<HashMap<String, String>>,
}

impl Devices {
    /// Adds the metrics of all devices.
    pub(super) fn put(&self, all: Vec<Io>, builder: &mut MetricBuilder) {
        for io in all {
            let device = self.name(&io.device);
            let label = [device.as_str()];
            for (descriptor, values, operation) in [
                (&names::FS_READ_BYTES, &io.bytes, "Read"),
                (&names::FS_WRITTEN_BYTES, &io.bytes, "Write"),
                (&names::FS_READS, &io.counts, "Read"),
                (&names::FS_WRITES, &io.counts, "Write"),
            ] {
                if let Some(value) = values.get(operation) {
                    builder.put(descriptor, &label, *value);
                }
            }
            let (major, minor) = io.device.split_once(':').unwrap_or_default();
            for (operation, bytes) in &io.bytes {
                builder.put(&names::BLKIO_USAGE, &[&device, major, minor, operation], *bytes);
            }
        }
    }

    fn name(&self, numbers: &str) -> String {
        locked(&self.names).entry(numbers.to_owned()).or_insert_with(|| name(numbers)).clone()
    }
}

/// The name of the device of a file. A device without a name, as for a tmpfs, is named by its numbers.
pub(super) fn of_file(path: &Path) -> String {
    let numbers = std::fs::metadata(path).map(|found| found.dev()).unwrap_or_default();
    name(&format!("{}:{}", nix::sys::stat::major(numbers), nix::sys::stat::minor(numbers)))
}

fn name(numbers: &str) -> String {
    let text = std::fs::read_to_string(format!("/sys/dev/block/{numbers}/uevent")).unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("DEVNAME="));
    name.map_or_else(|| numbers.to_owned(), |name| format!("/dev/{name}"))
}

/// Parses blkio files of cgroup v1: a line per device and operation, `8:0 Read 4096`, and a total.
pub(super) fn parse_v1(bytes: &str, counts: &str) -> Vec<Io> {
    let mut found: BTreeMap<String, Io> = BTreeMap::new();
    for (text, is_bytes) in [(bytes, true), (counts, false)] {
        for line in text.lines() {
            let mut words = line.split_whitespace();
            let (Some(device), Some(operation), Some(value)) = (words.next(), words.next(), words.next())
            else {
                continue;
            };
            let Ok(value) = value.parse() else { continue };
            let io = found.entry(device.to_owned()).or_default();
            let values = if is_bytes { &mut io.bytes } else { &mut io.counts };
            values.insert(operation.to_owned(), value);
        }
    }
    found.into_iter().map(|(device, io)| Io { device, ..io }).collect()
}

/// Parses `io.stat` of cgroup v2: a line per device, `8:0 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0`.
pub(super) fn parse_v2(text: &str) -> Vec<Io> {
    let mut found = Vec::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let Some(device) = words.next() else { continue };
        let mut io = Io { device: device.to_owned(), ..Io::default() };
        for (key, value) in words.filter_map(|word| word.split_once('=')) {
            let Ok(value) = value.parse() else { continue };
            let (values, operation) = match key {
                "rbytes" => (&mut io.bytes, "Read"),
                "wbytes" => (&mut io.bytes, "Write"),
                "dbytes" => (&mut io.bytes, "Discard"),
                "rios" => (&mut io.counts, "Read"),
                "wios" => (&mut io.counts, "Write"),
                _ => continue,
            };
            values.insert(operation.to_owned(), value);
        }
        found.push(io);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn io_of_both_cgroup_versions_is_parsed_to_the_same_values() {
        let bytes = "254:0 Read 4096\n254:0 Write 8192\n254:0 Total 12288\nTotal 12288\n";
        let counts = "254:0 Read 1\n254:0 Write 2\n254:0 Total 3\nTotal 3\n";
        let v1 = parse_v1(bytes, counts);
        let v2 = parse_v2("254:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n254:1 \n");
        assert_eq!((v1.len(), v2.len()), (1, 2));
        for (name, bytes, count) in [("Read", 4096, 1), ("Write", 8192, 2)] {
            assert_eq!((v1[0].bytes[name], v2[0].bytes[name]), (bytes, bytes));
            assert_eq!((v1[0].counts[name], v2[0].counts[name]), (count, count));
        }
        assert_eq!(v1[0].device, "254:0");
        assert_eq!(parse_v1("", ""), []);
    }
}
