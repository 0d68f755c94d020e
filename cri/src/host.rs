//! What this machine lets us do, looked at once: capabilities, OOM score floor, hierarchies.

use crate::cgroup::Cgroups;
use crate::error::Error;

/// What bounds every container here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Host {
    /// The capabilities that we ourselves may give, as `CAP_…` names.
    pub(crate) capabilities: Vec<String>,
    /// The lowest OOM score adjustment that we may set; none when any.
    pub(crate) oom_floor: Option<i32>,
    /// Whether cgroups are v2.
    pub(crate) unified: bool,
    /// Whether huge pages can be limited.
    pub(crate) hugetlb: bool,
    /// The node's host name.
    pub(crate) hostname: String,
}

// === impl Host ===

impl Host {
    pub(crate) fn look(cgroups: &Cgroups) -> Result<Self, Error> {
        let bounding = caps::read(None, caps::CapSet::Bounding).map_err(|error| Error::Kernel {
            doing: "read our own capabilities",
            source: std::io::Error::other(error.to_string()),
        })?;
        let mut capabilities: Vec<String> = bounding.iter().map(ToString::to_string).collect();
        capabilities.sort_unstable();
        // proc(5): lowering one's own score needs CAP_SYS_RESOURCE.
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
        Ok(Self {
            capabilities,
            oom_floor,
            unified: cgroups.unified(),
            hugetlb: cgroups.has("hugetlb"),
            hostname,
        })
    }

    /// An OOM score adjustment as near to the wish as we may set.
    pub(crate) fn oom_score(&self, wish: i64) -> i32 {
        let wish = i32::try_from(wish.clamp(-1000, 1000)).unwrap_or(0);
        self.oom_floor.map_or(wish, |floor| wish.max(floor))
    }
}
