//! Properties of the machine: capacity, versions, identities.

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use coracle_values::CollectMap;
use coracle_values::go::architecture;
use coracle_values::quantity::{millis_of, value_of};
use k8s_openapi::api::core::v1::{NodeSwapStatus, NodeSystemInfo};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use nix::unistd::{SysconfVar, sysconf};
use rustix::fs::statvfs;

use super::config::{NodeConfig, NodeError};
use super::eviction::{EvictionThresholds, Threshold};
use crate::own_address;
use crate::version::KUBELET_VERSION;

/// Properties of the machine and of its node, read once at the start.
#[derive(Clone, Debug)]
pub struct MachineProperties {
    /// Name in the API.
    pub name: String,
    /// Addresses, the primary one first.
    pub ips: Vec<IpAddr>,
    /// All resources of the node.
    pub capacity: BTreeMap<String, Quantity>,
    /// Resources for pods.
    pub allocatable: BTreeMap<String, Quantity>,
    /// Maximum bytes of memory of all pods together: the memory of the node without huge pages and reserved memory.
    pub memory_of_pods: i64,
    /// Size of the file system with the local volumes, in KiB. None if it is unknown.
    pub local_volume_kib: Option<u64>,
    /// Kernel, system and version.
    pub info: NodeSystemInfo,
}

// === impl MachineProperties ===

impl MachineProperties {
    /// The primary address.
    pub fn ip(&self) -> Option<IpAddr> {
        self.ips.first().copied()
    }

    /// Millicores of the node.
    pub fn cpu_millis(&self) -> i64 {
        self.capacity.get("cpu").map_or(0, millis_of)
    }

    /// Bytes of memory.
    pub fn memory(&self) -> i64 {
        self.capacity.get("memory").map_or(0, value_of)
    }

    /// Bytes of memory for pods.
    pub fn memory_allocatable(&self) -> i64 {
        self.allocatable.get("memory").map_or(0, value_of)
    }
}

pub(super) fn find(config: &NodeConfig) -> Result<MachineProperties, NodeError> {
    let meminfo = read("/proc/meminfo")?;
    let capacity = capacity(config, &meminfo)?;
    let held_back = eviction_reserve(&capacity, &config.eviction);
    let memory_of_pods = memory_of_pods(&capacity, &config.reserved)?;
    let allocatable = allocatable(&capacity, &config.reserved, &held_back)?;
    let ips = if config.ips.is_empty() { own_address::find() } else { config.ips.clone() };
    Ok(MachineProperties {
        name: config.name.clone(),
        ips,
        capacity,
        allocatable,
        memory_of_pods,
        local_volume_kib: known_kib(storage_kib(&config.local_volume_dir).ok()),
        info: info(config, &meminfo),
    })
}

fn read(path: &str) -> Result<String, NodeError> {
    fs::read_to_string(path).map_err(|source| NodeError::Read { path: path.into(), source })
}

fn capacity(config: &NodeConfig, meminfo: &str) -> Result<BTreeMap<String, Quantity>, NodeError> {
    let cpus = sysconf(SysconfVar::_NPROCESSORS_ONLN).ok().flatten().unwrap_or(1);
    let disk = storage_kib(&config.state_dir)
        .map_err(|source| NodeError::Read { path: config.state_dir.clone(), source: source.into() })?;
    let mut capacity = BTreeMap::from([
        ("cpu".to_owned(), Quantity(cpus.to_string())),
        ("memory".to_owned(), Quantity(format!("{}Ki", kib(meminfo, "MemTotal")))),
        ("ephemeral-storage".to_owned(), Quantity(format!("{disk}Ki"))),
        ("pods".to_owned(), Quantity(config.max_pods.to_string())),
    ]);
    capacity.extend(hugepages(Path::new("/sys/kernel/mm/hugepages")));
    Ok(capacity)
}

/// The size of a file system, in KiB. None if the file system reports no size: some network file systems have 0 blocks.
fn known_kib(size: Option<u64>) -> Option<u64> {
    size.filter(|kib| *kib > 0)
}

/// The directory, or its nearest ancestor that exists: this ancestor is on the same file system.
fn present(dir: &Path) -> &Path {
    dir.ancestors().find(|dir| dir.exists()).unwrap_or(Path::new("/"))
}

fn storage_kib(dir: &Path) -> rustix::io::Result<u64> {
    let found = statvfs(present(dir))?;
    Ok(found.f_blocks * found.f_frsize / 1024)
}

/// The value of a line of meminfo, in KiB.
pub(crate) fn kib(meminfo: &str, name: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok()).unwrap_or(0)
}

/// Reserved huge pages of each size: `hugepages-2Mi`.
fn hugepages(dir: &Path) -> BTreeMap<String, Quantity> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let sizes = entries.filter_map(|entry| {
        let name = entry.file_name().into_string().ok()?;
        let size: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let pages: u64 = fs::read_to_string(entry.path().join("nr_hugepages")).ok()?.trim().parse().ok()?;
        Some((
            format!("hugepages-{}", binary(size)),
            Quantity(if pages == 0 { "0".to_owned() } else { binary(pages * size) }),
        ))
    });
    sizes.collect_map()
}

pub(crate) fn binary(kib: u64) -> String {
    match kib {
        k if k % (1 << 20) == 0 => format!("{}Gi", k >> 20),
        k if k % (1 << 10) == 0 => format!("{}Mi", k >> 10),
        k => format!("{k}Ki"),
    }
}

/// Amounts that pods cannot use: the thresholds of hard evictions, below which the node has memory or disk pressure.
/// The kubelet subtracts these amounts in the same way.
fn eviction_reserve(
    capacity: &BTreeMap<String, Quantity>,
    eviction: &EvictionThresholds,
) -> [(&'static str, i64); 2] {
    let amount = |name: &str, threshold: Threshold| {
        let kib = capacity.get(name).map_or(0, value_of) / 1024;
        // The result is in whole kibibytes, the unit of capacity.
        let held = threshold.of(u64::try_from(kib).unwrap_or(0) * 1024).div_ceil(1024);
        i64::try_from(held.saturating_mul(1024)).unwrap_or(i64::MAX)
    };
    [
        ("memory", amount("memory", eviction.memory_available)),
        ("ephemeral-storage", amount("ephemeral-storage", eviction.nodefs_available)),
    ]
}

/// Capacity minus the reserved and held back amounts. Huge pages are subtracted from memory.
fn allocatable(
    capacity: &BTreeMap<String, Quantity>,
    reserved: &[BTreeMap<String, String>],
    held_back: &[(&'static str, i64)],
) -> Result<BTreeMap<String, Quantity>, NodeError> {
    let mut left = capacity.clone();
    let huge: i64 = capacity
        .iter()
        .filter(|(name, _)| name.starts_with("hugepages-"))
        .map(|(_, quantity)| value_of(quantity))
        .sum();
    let mut taken: Vec<(&str, i64)> = vec![("memory", huge)];
    taken.extend(held_back);
    for (name, value) in reserved.iter().flatten() {
        let quantity = coracle_values::Quantity::parse(value)
            .map_err(|_error| NodeError::Reserved { name: name.clone(), value: value.clone() })?;
        taken.push((name, if name == "cpu" { quantity.millis() } else { quantity.value() }));
    }
    for (name, amount) in taken.into_iter().filter(|(_, amount)| *amount > 0) {
        if let Some(quantity) = left.get_mut(name) {
            *quantity = minus(name, quantity, amount);
        }
    }
    Ok(left)
}

/// Memory that all pods together can use. As upstream, the threshold of evictions is not subtracted: pods can use that
/// memory, too, although no pod can request it. Source: `getNodeAllocatableAbsolute` of the kubelet's container
/// manager.
fn memory_of_pods(
    capacity: &BTreeMap<String, Quantity>,
    reserved: &[BTreeMap<String, String>],
) -> Result<i64, NodeError> {
    Ok(allocatable(capacity, reserved, &[])?.get("memory").map_or(0, value_of))
}

fn minus(name: &str, from: &Quantity, amount: i64) -> Quantity {
    let from = if name == "cpu" { millis_of(from) } else { value_of(from) };
    let left = from.saturating_sub(amount).max(0);
    Quantity(match name {
        "cpu" if left % 1000 == 0 => (left / 1000).to_string(),
        "cpu" => format!("{left}m"),
        _ if left % 1024 == 0 && left > 0 && name != "pods" => format!("{}Ki", left / 1024),
        _ => left.to_string(),
    })
}

fn info(config: &NodeConfig, meminfo: &str) -> NodeSystemInfo {
    let trimmed =
        |path: &str| fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let machine_id = trimmed("/etc/machine-id");
    let firmware = trimmed("/sys/class/dmi/id/product_uuid").to_lowercase();
    let kernel = nix::sys::utsname::uname().ok().map(|name| name.release().to_string_lossy().into_owned());
    let swap = i64::try_from(kib(meminfo, "SwapTotal") * 1024).ok().filter(|bytes| *bytes > 0);
    NodeSystemInfo {
        architecture: architecture().to_owned(),
        boot_id: trimmed("/proc/sys/kernel/random/boot_id"),
        container_runtime_version: config.runtime_version.clone(),
        kernel_version: kernel.unwrap_or_default(),
        kubelet_version: KUBELET_VERSION.to_owned(),
        system_uuid: if firmware.is_empty() { machine_id.clone() } else { firmware },
        machine_id,
        operating_system: "linux".to_owned(),
        os_image: os_image(&fs::read_to_string("/etc/os-release").unwrap_or_default()),
        swap: swap.map(|capacity| NodeSwapStatus { capacity: Some(capacity) }),
        ..NodeSystemInfo::default()
    }
}

fn os_image(os_release: &str) -> String {
    let value = |name: &str| {
        os_release.lines().find_map(|line| Some(line.strip_prefix(name)?.trim_matches('"').to_owned()))
    };
    value("PRETTY_NAME=").or_else(|| value("NAME=")).unwrap_or_else(|| "Linux".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reserved_resources_are_subtracted_from_allocatable() {
        let quantity = |text: &str| Quantity(text.to_owned());
        let capacity = BTreeMap::from([
            ("cpu".to_owned(), quantity("2")),
            ("memory".to_owned(), quantity("2048Ki")),
            ("hugepages-2Mi".to_owned(), quantity("1Mi")),
            ("pods".to_owned(), quantity("110")),
        ]);
        let reserved = |name: &str, value: &str| [BTreeMap::from([(name.to_owned(), value.to_owned())])];
        let allocatable = |capacity: &_, reserved: &[_]| allocatable(capacity, reserved, &[]);
        let left = allocatable(&capacity, &reserved("cpu", "100m")).expect("allocatable");
        assert_eq!((&*left["cpu"].0, &*left["memory"].0, &*left["pods"].0), ("1900m", "1024Ki", "110"));
        assert_eq!(allocatable(&capacity, &reserved("memory", "1Gi")).expect("none left")["memory"].0, "0");
        let both = [reserved("cpu", "100m"), reserved("cpu", "0.4")].concat();
        assert_eq!(
            allocatable(&capacity, &both).expect("allocatable")["cpu"].0,
            "1500m",
            "both are subtracted"
        );
        assert!(matches!(allocatable(&capacity, &reserved("cpu", "much")), Err(NodeError::Reserved { .. })));
    }

    #[test]
    fn eviction_thresholds_are_subtracted_from_allocatable() {
        let capacity =
            [("cpu", "2"), ("memory", "1048576Ki"), ("ephemeral-storage", "1001Ki"), ("pods", "110")]
                .map(|(name, value)| (name.to_owned(), Quantity(value.to_owned())));
        let capacity = BTreeMap::from(capacity);
        let left = |percent| {
            let eviction =
                EvictionThresholds { nodefs_available: Threshold::percent(percent), ..Default::default() };
            let left =
                allocatable(&capacity, &[], &eviction_reserve(&capacity, &eviction)).expect("allocatable");
            left.into_values().map(|quantity| quantity.0).collect::<Vec<_>>()
        };
        let reserved = BTreeMap::from([("memory".to_owned(), "24Mi".to_owned())]);
        assert_eq!(memory_of_pods(&capacity, &[reserved]).expect("memory"), 1000 << 20);
        assert_eq!(left(10), ["2", "900Ki", "946176Ki", "110"]);
        assert_eq!(left(0), ["2", "1001Ki", "946176Ki", "110"]);
    }

    #[test]
    fn properties_of_this_machine_are_found() {
        let config = NodeConfig::for_test(Path::new("/var/lib/coracle-is-not-there"));
        let properties = find(&config).expect("properties");
        assert!(properties.cpu_millis() >= 1000 && properties.memory() > 1 << 20);
        assert!(!properties.info.kernel_version.is_empty() && !properties.info.boot_id.is_empty());
        assert!(properties.ip().is_some());
        let size = storage_kib(Path::new("/var/lib")).ok();
        assert_eq!(storage_kib(&config.local_volume_dir).ok(), size, "of an ancestor");
        assert_eq!(properties.local_volume_kib, known_kib(size), "also without project quotas");
        assert_eq!((known_kib(Some(0)), known_kib(Some(1)), known_kib(None)), (None, Some(1), None));
        assert_eq!(os_image("NAME=Debian\nPRETTY_NAME=\"Debian GNU/Linux 12\"\n"), "Debian GNU/Linux 12");
    }
}
