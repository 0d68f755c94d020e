//! Limits of cgroup v1 as properties of systemd, for v1 alone or beside v2. Pure.

use super::{Device, Property, Value, number, quota};

/// The controllers whose hierarchies systemd manages (`CGROUP_MASK_V1` in its src/basic/cgroup-util.h). systemd
/// supports no other controllers.
const MANAGED: [&str; 6] = ["blkio", "cpu", "cpuacct", "devices", "memory", "pids"];

/// Values above this mean "no limit": the kernel reports the greatest number of whole pages.
const UNLIMITED: u64 = 1 << 62;

/// The range of weights that systemd accepts.
const BLOCK_WEIGHTS: std::ops::RangeInclusive<u64> = 10..=1000;

/// Whether systemd manages the cgroups of a hierarchy. `controllers` has the comma-separated controllers of the
/// hierarchy or its name. It is empty for v2. systemd always manages v2: it finds a unit's processes there, even beside
/// v1.
pub fn manages(controllers: &str) -> bool {
    let is_its_own = |name: &str| MANAGED.contains(&name) || name == "name=systemd";
    controllers.is_empty() || controllers.split(',').any(is_its_own)
}

/// Properties that enable accounting. Without these properties, systemd moves a unit's processes out of a controller's
/// hierarchy as soon as neither a limit nor a sibling needs the hierarchy.
pub fn accounting() -> Vec<Property> {
    let names = ["CPUAccounting", "MemoryAccounting", "BlockIOAccounting", "TasksAccounting"];
    names.map(|name| (name, Value::Flag(true))).to_vec()
}

/// Properties that allow only these devices. On v1 systemd writes the rules to the kernel, so devices that it
/// cannot express are omitted, such as "minor number 3 of every driver". Drivers are identified by number,
/// because some have no name.
///
/// There is always a list, even if the list contains all devices. Without a list, systemd does not use the hierarchy,
/// and removes the unit's cgroup from the hierarchy.
pub fn devices(allowed: &[Device]) -> Vec<Property> {
    let list = allowed.iter().filter_map(|device| {
        let kind = if device.block { "block" } else { "char" };
        let name = match (device.major, device.minor) {
            (None, None) => format!("{kind}-*"),
            (Some(major), None) => format!("{kind}-{major}"),
            (Some(major), Some(minor)) => format!("/dev/{kind}/{major}:{minor}"),
            (None, Some(_)) => return None,
        };
        Some((name, device.access.clone()))
    });
    let list = Value::Pairs(list.collect());
    vec![("DevicePolicy", Value::Text("strict".to_owned())), ("DeviceAllow", list)]
}

/// The limits of a cgroup. `read` returns the content of a controller's file. Limits that systemd does not
/// manage are omitted, because it does not reset them.
pub fn limits(read: impl Fn(&'static str, &'static str) -> Option<String>) -> Vec<Property> {
    let read_number = |controller, file| number(read(controller, file)?.trim());
    let one = |name, value: Option<u64>| value.map(|value| (name, Value::Number(value)));
    let memory = read_number("memory", "memory.limit_in_bytes");
    let memory = memory.map(|bytes| if bytes < UNLIMITED { bytes } else { u64::MAX });
    // The weight of the scheduler BFQ, or of CFQ before Linux 5.0.
    let block = ["blkio.bfq.weight", "blkio.weight"].into_iter();
    let block = block.filter_map(|file| read_number("blkio", file)).find(|one| BLOCK_WEIGHTS.contains(one));
    let mut found: Vec<Property> = Vec::new();
    found.extend(one("CPUShares", read_number("cpu", "cpu.shares")));
    found.extend(bandwidth(read("cpu", "cpu.cfs_quota_us"), read("cpu", "cpu.cfs_period_us")));
    found.extend(one("MemoryLimit", memory));
    found.extend(one("BlockIOWeight", block));
    found.extend(one("TasksMax", read_number("pids", "pids.max")));
    found
}

/// Converts v1's two files for the quota. A negative number means no limit.
fn bandwidth(microseconds: Option<String>, period: Option<String>) -> Vec<Property> {
    let (Some(microseconds), Some(period)) = (microseconds, period) else { return Vec::new() };
    let microseconds = microseconds.trim();
    let microseconds = if microseconds.starts_with('-') { "max" } else { microseconds };
    quota(&format!("{microseconds} {}", period.trim())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn properties(files: &[(&str, &str)]) -> Vec<(&'static str, u64)> {
        let read = |_: &str, file: &str| {
            files.iter().find(|(name, _)| *name == file).map(|(_, text)| (*text).to_owned())
        };
        let number = |(name, value)| match value {
            Value::Number(number) => (name, number),
            other => panic!("{other:?}"),
        };
        limits(read).into_iter().map(number).collect()
    }

    #[test]
    fn limits_of_v1_become_properties_of_systemd() {
        let found = properties(&[
            ("cpu.shares", "512\n"),
            ("cpu.cfs_quota_us", "20500\n"),
            ("cpu.cfs_period_us", "100000\n"),
            ("memory.limit_in_bytes", "67108864\n"),
            ("blkio.bfq.weight", "200\n"),
            ("pids.max", "7\n"),
        ]);
        let expected = [
            ("CPUShares", 512),
            ("CPUQuotaPeriodUSec", 100_000),
            ("CPUQuotaPerSecUSec", 210_000),
            ("MemoryLimit", 67_108_864),
            ("BlockIOWeight", 200),
            ("TasksMax", 7),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn no_limit_becomes_infinity_and_absent_files_are_omitted() {
        let found = properties(&[
            ("cpu.cfs_quota_us", "-1\n"),
            ("cpu.cfs_period_us", "100000\n"),
            ("memory.limit_in_bytes", "9223372036854771712\n"),
            ("pids.max", "max\n"),
        ]);
        let expected = [
            ("CPUQuotaPeriodUSec", 100_000),
            ("CPUQuotaPerSecUSec", u64::MAX),
            ("MemoryLimit", u64::MAX),
            ("TasksMax", u64::MAX),
        ];
        assert_eq!(found, expected);
    }

    #[test]
    fn a_weight_that_systemd_would_refuse_is_omitted() {
        assert_eq!(properties(&[("blkio.bfq.weight", "1\n"), ("pids.max", "7\n")]), [("TasksMax", 7)]);
        assert_eq!(properties(&[("blkio.weight", "500\n")]), [("BlockIOWeight", 500)]);
    }

    #[test]
    fn devices_are_passed_by_number_and_never_without_a_list() {
        let device = |block, major, minor| Device { block, major, minor, access: "rw".into() };
        let all = [
            device(false, None, None),
            device(true, Some(9), None),
            device(false, Some(1), Some(3)),
            device(true, None, Some(3)),
        ];
        let list = ["char-*", "block-9", "/dev/char/1:3"].map(|name| (name.to_owned(), "rw".to_owned()));
        let strict = ("DevicePolicy", Value::Text("strict".into()));
        assert_eq!(devices(&all), [strict.clone(), ("DeviceAllow", Value::Pairs(list.into()))]);
        assert_eq!(devices(&[]), [strict, ("DeviceAllow", Value::Pairs(vec![]))]);
    }

    #[test]
    fn hierarchies_of_other_controllers_are_not_managed() {
        for its_own in ["", "name=systemd", "cpu,cpuacct", "memory", "devices", "blkio", "pids"] {
            assert!(manages(its_own), "{its_own}");
        }
        for ours in ["cpuset", "freezer", "hugetlb", "net_cls,net_prio", "perf_event", "rdma", "name=other"] {
            assert!(!manages(ours), "{ours}");
        }
    }
}
