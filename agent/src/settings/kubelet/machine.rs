//! Fields that require a property of the machine. The node does not start on a machine without the property.

use std::path::Path;

/// Kernel parameters below /proc/sys that `protectKernelDefaults` requires. Source: `setupKernelTunables` of upstream's
/// `pkg/kubelet/cm`.
const KERNEL: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// A property of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Demand {
    /// `failCgroupV1`: only cgroup v2.
    CgroupV2,
    /// `failSwapOn`: no swap.
    NoSwap,
    /// `protectKernelDefaults`: the values of [`KERNEL`].
    KernelDefaults,
}

// === impl Demand ===

impl Demand {
    /// The error text if the machine does not have the property. `proc` is /proc, `cgroup` is the directory of cgroups.
    pub(super) fn unmet(self, proc: &Path, cgroup: &Path) -> Option<String> {
        match self {
            Self::CgroupV2 => (!cgroup.join("cgroup.controllers").exists()).then(|| {
                "this machine has cgroup v1; boot it with cgroup v2, or set the field to false".to_owned()
            }),
            Self::NoSwap => has_swap(&proc.join("swaps")).then(|| {
                "this machine has swap; switch it off (swapoff -a), or set the field to false".to_owned()
            }),
            Self::KernelDefaults => {
                let other = KERNEL.iter().filter_map(|(name, value)| {
                    let found = std::fs::read_to_string(proc.join("sys").join(name)).unwrap_or_default();
                    let found = found.trim();
                    let name = name.replace('/', ".");
                    (found != *value).then(|| format!("{name} must be {value} and is {found:?}"))
                });
                let other: Vec<String> = other.collect();
                (!other.is_empty())
                    .then(|| format!("set the kernel parameters with sysctl: {}", other.join(", ")))
            }
        }
    }

    /// The values of the field that are accepted, for the reference page.
    #[cfg(test)]
    pub(super) fn accepted(self) -> &'static str {
        match self {
            Self::CgroupV2 => "unset, `false`, `true` on a machine with cgroup v2",
            Self::NoSwap => "unset, `false`, `true` on a machine without swap",
            Self::KernelDefaults => {
                "unset, `true` on a machine with the kernel parameters that the kubelet demands"
            }
        }
    }
}

/// Whether swap is on. The file has a header line, and a line for each swap area.
fn has_swap(swaps: &Path) -> bool {
    std::fs::read_to_string(swaps).is_ok_and(|text| text.lines().skip(1).any(|line| !line.trim().is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_is_refused_if_it_lacks_the_demanded_property() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        let unmet = |demand: Demand| demand.unmet(dir.path(), dir.path());
        assert!(unmet(Demand::CgroupV2).unwrap().contains("cgroup v1"));
        write("cgroup.controllers", "");
        assert_eq!(unmet(Demand::CgroupV2), None);
        write("swaps", "Filename\tType\tSize\tUsed\tPriority\n");
        assert_eq!(unmet(Demand::NoSwap), None);
        write("swaps", "Filename\tType\tSize\tUsed\tPriority\n/dev/sda2 partition 1 0 -2\n");
        assert!(unmet(Demand::NoSwap).unwrap().contains("swapoff"));
        for (name, value) in KERNEL {
            write(&format!("sys/{name}"), &format!("{value}\n"));
        }
        assert_eq!(unmet(Demand::KernelDefaults), None);
        write("sys/kernel/panic", "0\n");
        write("sys/vm/panic_on_oom", "1\n");
        let error = unmet(Demand::KernelDefaults).unwrap();
        assert!(error.contains("kernel.panic must be 10 and is \"0\""), "{error}");
        assert!(error.contains("vm.panic_on_oom must be 0 and is \"1\""), "{error}");
    }
}
