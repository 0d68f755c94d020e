//! Features and limits of this machine, read once at the start: capabilities, OOM score floor, cgroups, kernel
//! features.

use crate::cgroup::Cgroups;
use crate::error::Error;

/// Features and limits of this machine that apply to every container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// The capabilities in the bounding set of this process, as sorted `CAP_…` names.
    pub(crate) capabilities: Vec<String>,
    /// Lowest OOM score adjustment that this process may set. `None` without a floor.
    pub(crate) oom_floor: Option<i32>,
    /// Whether cgroups are v2.
    pub(crate) unified: bool,
    /// Whether huge pages can be limited.
    pub(crate) hugetlb: bool,
    /// Features of the kernel.
    pub(crate) kernel: Kernel,
    /// The node's host name.
    pub(crate) hostname: String,
}

/// Features that older kernels lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kernel {
    /// User namespaces for pods: the kernel has them and can map the ids of image layers.
    pub(crate) user_namespaces: bool,
    /// Recursive read-only mounts.
    pub(crate) recursive_read_only: bool,
}

/// A version of the kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Release {
    major: u32,
    minor: u32,
}

// === impl Host ===

impl Host {
    pub(crate) fn detect(cgroups: &Cgroups) -> Result<Self, Error> {
        let bounding = caps::read(None, caps::CapSet::Bounding).map_err(|error| Error::Kernel {
            doing: "read the capabilities of this process",
            source: std::io::Error::other(error.to_string()),
        })?;
        let mut capabilities: Vec<String> = bounding.iter().map(ToString::to_string).collect();
        capabilities.sort_unstable();
        // proc(5): lowering the score of a process needs CAP_SYS_RESOURCE.
        let oom_floor = if bounding.contains(&caps::Capability::CAP_SYS_RESOURCE) {
            None
        } else {
            let path = "/proc/self/oom_score_adj";
            let text = std::fs::read_to_string(path).map_err(Error::file("read", path))?;
            Some(text.trim().parse().unwrap_or(0))
        };
        let hostname = nix::unistd::gethostname()
            .map_err(|errno| Error::Kernel { doing: "read the host name", source: errno.into() })?
            .to_string_lossy()
            .into_owned();
        let release = kernel_release()?;
        Ok(Self {
            kernel: Kernel::detect(release),
            capabilities,
            oom_floor,
            unified: cgroups.unified(),
            hugetlb: cgroups.has("hugetlb"),
            hostname,
        })
    }

    /// The OOM score adjustment that is nearest to the requested adjustment and that this process may set.
    pub(crate) fn oom_score(&self, requested: i64) -> i32 {
        let requested = i32::try_from(requested.clamp(-1000, 1000)).unwrap_or(0);
        self.oom_floor.map_or(requested, |floor| requested.max(floor))
    }
}

// === impl Kernel ===

impl Kernel {
    fn detect(release: Release) -> Self {
        Self {
            // Idmapped lower layers of an overlay need Linux 5.19.
            user_namespaces: release >= Release { major: 5, minor: 19 } && may_make_user_namespaces(),
            // mount_setattr(2) needs Linux 5.12.
            recursive_read_only: release >= Release { major: 5, minor: 12 },
        }
    }
}

/// The version of the running kernel.
fn kernel_release() -> Result<Release, Error> {
    let name = nix::sys::utsname::uname()
        .map_err(|errno| Error::Kernel { doing: "read the kernel's release", source: errno.into() })?;
    Ok(release(&name.release().to_string_lossy()))
}

fn release(text: &str) -> Release {
    let mut numbers = text.split(|c: char| !c.is_ascii_digit()).map(|part| part.parse().unwrap_or(0));
    Release { major: numbers.next().unwrap_or(0), minor: numbers.next().unwrap_or(0) }
}

/// False if the kernel has no user namespaces, or if an administrator set their maximum to 0.
fn may_make_user_namespaces() -> bool {
    let most = std::fs::read_to_string("/proc/sys/user/max_user_namespaces");
    most.is_ok_and(|most| most.trim() != "0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_compared_by_number() {
        assert_eq!(release("6.18.44-fly"), Release { major: 6, minor: 18 });
        assert_eq!(release("5.4.0-150-generic"), Release { major: 5, minor: 4 });
        assert_eq!(release("7"), Release { major: 7, minor: 0 });
        assert!(release("6.1.0") > release("5.19.3"));
    }
}
