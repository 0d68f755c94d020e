//! Converts a cgroup's limits to properties of its unit (systemd.resource-control(5)): from v2 files here,
//! from v1 files in [`v1`]. Pure, except [`current_limits`].

pub mod v1;

use std::path::Path;

use crate::message::Value;

/// A property of a unit.
pub type Property = (&'static str, Value);

/// The v2 files of limits. If the unit has another value, systemd overwrites the file, for example at a daemon-reload.
const FILES: [&str; 11] = [
    "cpu.weight",
    "cpu.max",
    "cpuset.cpus",
    "cpuset.mems",
    "io.weight",
    "memory.min",
    "memory.low",
    "memory.high",
    "memory.max",
    "memory.swap.max",
    "pids.max",
];

/// Microseconds per second in one percent of a processor: the resolution of systemd's CPU quota.
const PERCENT: u64 = 10_000;
const SECOND: u64 = 1_000_000;

/// Devices that a unit may use: a single one, all of a driver, or all of a type.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Device {
    /// Block device if true, character device if false.
    pub block: bool,
    /// `None` matches every number.
    pub major: Option<u32>,
    /// `None` matches every number.
    pub minor: Option<u32>,
    /// Letters of `rwm`.
    pub access: String,
}

/// Properties that enable accounting of a v2 unit's resources.
pub fn accounting() -> Vec<Property> {
    let names = ["CPUAccounting", "MemoryAccounting", "IOAccounting", "TasksAccounting"];
    names.map(|name| (name, Value::Flag(true))).to_vec()
}

/// Properties that allow only these devices; without a list all are allowed. systemd identifies drivers by
/// their names in `/proc/devices`. If a driver has no name, systemd cannot express the rule, and all devices
/// are allowed so that none is wrongly denied.
pub fn devices(allowed: Option<&[Device]>, drivers: &str) -> Vec<Property> {
    let patterns: Option<Vec<(String, String)>> =
        allowed.and_then(|allowed| allowed.iter().map(|device| pattern(device, drivers)).collect());
    let policy = if patterns.is_some() { "strict" } else { "auto" };
    let list = Value::Pairs(patterns.unwrap_or_default());
    vec![("DevicePolicy", Value::Text(policy.to_owned())), ("DeviceAllow", list)]
}

/// A pattern of `DeviceAllow`, see systemd.resource-control(5).
fn pattern(device: &Device, drivers: &str) -> Option<(String, String)> {
    let kind = if device.block { "block" } else { "char" };
    let name = match (device.major, device.minor) {
        (None, None) => format!("{kind}-*"),
        (Some(major), Some(minor)) => format!("/dev/{kind}/{major}:{minor}"),
        (Some(major), None) => format!("{kind}-{}", driver(device.block, major, drivers)?),
        (None, Some(_)) => return None,
    };
    Some((name, device.access.clone()))
}

/// The name of a driver in `/proc/devices`.
fn driver(block: bool, major: u32, drivers: &str) -> Option<&str> {
    let title = if block { "Block devices:" } else { "Character devices:" };
    let lines = drivers.lines().skip_while(|line| *line != title).skip(1);
    let listed = lines.map_while(|line| line.trim().split_once(' '));
    listed.filter(|(number, _)| number.parse() == Ok(major)).map(|(_, name)| name).next()
}

/// The current limits of a v2 cgroup. Without a controller its files are absent.
pub fn current_limits(cgroup: &Path) -> Vec<Property> {
    let text = |file: &&str| std::fs::read_to_string(cgroup.join(file)).ok();
    FILES.iter().filter_map(|file| text(file).map(|text| of_file(file, &text))).flatten().collect()
}

/// The property for a file's content. Empty for unknown files and invalid contents.
pub fn of_file(file: &str, text: &str) -> Vec<Property> {
    let text = text.trim();
    let one = |name| number(text).map(|number| vec![(name, Value::Number(number))]).unwrap_or_default();
    match file {
        "cpu.weight" => one("CPUWeight"),
        "cpu.max" => quota(text).unwrap_or_default(),
        "cpuset.cpus" => set("AllowedCPUs", text),
        "cpuset.mems" => set("AllowedMemoryNodes", text),
        "io.weight" => text.strip_prefix("default ").map_or(Vec::new(), |rest| {
            let first = rest.lines().next().and_then(number);
            first.map(|weight| vec![("IOWeight", Value::Number(weight))]).unwrap_or_default()
        }),
        "memory.min" => one("MemoryMin"),
        "memory.low" => one("MemoryLow"),
        "memory.high" => one("MemoryHigh"),
        "memory.max" => one("MemoryMax"),
        "memory.swap.max" => one("MemorySwapMax"),
        "pids.max" => one("TasksMax"),
        _ => Vec::new(),
    }
}

/// Parses a number. systemd's value for no limit is the greatest number.
fn number(text: &str) -> Option<u64> {
    if text == "max" { Some(u64::MAX) } else { text.parse().ok() }
}

/// Converts the content of `cpu.max`. The quota is rounded up to systemd's resolution, so that the container does not
/// get less than it requested.
fn quota(text: &str) -> Option<Vec<Property>> {
    let (quota, period) = text.split_once(' ')?;
    let (quota, period) = (number(quota)?, number(period)?);
    let second = match quota {
        u64::MAX => u64::MAX,
        quota => quota.checked_mul(SECOND)?.checked_div(period)?.checked_next_multiple_of(PERCENT)?,
    };
    Some(vec![("CPUQuotaPeriodUSec", Value::Number(period)), ("CPUQuotaPerSecUSec", Value::Number(second))])
}

/// Converts a list such as `0-2,5` to a bit mask. Bits 0 to 7 are in the first byte.
fn set(name: &'static str, list: &str) -> Vec<Property> {
    let mut mask: Vec<u8> = Vec::new();
    for range in list.split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (Ok(first), Ok(last)) = (first.parse::<u16>(), last.parse::<u16>()) else { return Vec::new() };
        for number in first..=last {
            let byte = usize::from(number / 8);
            if mask.len() <= byte {
                mask.resize(byte + 1, 0);
            }
            if let Some(bits) = mask.get_mut(byte) {
                *bits |= 1 << (number % 8);
            }
        }
    }
    if mask.is_empty() { Vec::new() } else { vec![(name, Value::Bytes(mask))] }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn numbers(file: &str, text: &str) -> Vec<(&'static str, u64)> {
        let number = |(name, value)| match value {
            Value::Number(number) => (name, number),
            other => panic!("{other:?}"),
        };
        of_file(file, text).into_iter().map(number).collect()
    }

    #[test]
    fn limits_of_the_kernel_become_properties_of_systemd() {
        assert_eq!(numbers("cpu.weight", "39\n"), [("CPUWeight", 39)]);
        assert_eq!(numbers("memory.max", "max\n"), [("MemoryMax", u64::MAX)]);
        assert_eq!(numbers("memory.swap.max", "0"), [("MemorySwapMax", 0)]);
        assert_eq!(numbers("pids.max", "100"), [("TasksMax", 100)]);
        assert_eq!(numbers("io.weight", "default 200\n8:0 300\n"), [("IOWeight", 200)]);
        assert_eq!(numbers("memory.oom.group", "1"), []);
        assert_eq!(numbers("memory.max", ""), []);
    }

    const DRIVERS: &str = "\
Character devices:
  1 mem
136 pts

Block devices:
  8 sd
136 other
";

    #[test]
    fn devices_become_patterns_of_systemd() {
        let device = |block, major, minor| Device { block, major, minor, access: "r".into() };
        let all = [
            device(false, None, None),
            device(true, None, None),
            device(false, Some(1), Some(3)),
            device(true, Some(8), None),
            device(false, Some(136), None),
        ];
        let [(_, policy), (_, Value::Pairs(list))] = &devices(Some(&all), DRIVERS)[..] else { panic!() };
        assert_eq!(*policy, Value::Text("strict".into()));
        let names: Vec<&str> = list.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["char-*", "block-*", "/dev/char/1:3", "block-sd", "char-pts"]);
        assert!(list.iter().all(|(_, access)| access == "r"));
    }

    #[test]
    fn devices_without_a_driver_name_are_not_denied() {
        let free = vec![("DevicePolicy", Value::Text("auto".into())), ("DeviceAllow", Value::Pairs(vec![]))];
        assert_eq!(devices(None, DRIVERS), free);
        let nameless = |major, minor| [Device { block: true, major, minor, access: "r".into() }];
        assert_eq!(devices(Some(&nameless(Some(9), None)), DRIVERS), free);
        assert_eq!(devices(Some(&nameless(None, Some(9))), DRIVERS), free);
    }

    #[test]
    fn a_quota_is_rounded_up_to_whole_percents() {
        let quota = |text| numbers("cpu.max", text);
        let expected = |second, period| vec![("CPUQuotaPeriodUSec", period), ("CPUQuotaPerSecUSec", second)];
        assert_eq!(quota("50000 100000"), expected(500_000, 100_000));
        assert_eq!(quota("1234 100000"), expected(20_000, 100_000));
        assert_eq!(quota("max 100000"), expected(u64::MAX, 100_000));
        assert_eq!(quota("5 0"), []);
    }

    #[test]
    fn a_list_of_processors_becomes_a_mask() {
        let mask = |text| of_file("cpuset.cpus", text);
        assert_eq!(mask("0-2,9\n"), [("AllowedCPUs", Value::Bytes(vec![0b111, 0b10]))]);
        assert_eq!(mask("\n"), []);
        assert_eq!(mask("x"), []);
    }

    #[test]
    fn the_limits_of_a_cgroup_are_read_from_its_files() {
        let dir = std::env::temp_dir().join(format!("coracle-systemd-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        std::fs::write(dir.join("pids.max"), "7\n").unwrap();
        let found = current_limits(&dir);
        std::fs::remove_dir_all(&dir).unwrap();
        assert_eq!(found, [("TasksMax", Value::Number(7))]);
    }
}
