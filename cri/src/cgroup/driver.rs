//! Cgroup drivers and the paths of cgroups: directories of the runtime, or slices and scopes of systemd. Pure.

use coracle_systemd::{Scope, unit};

/// The component that creates cgroups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CgroupDriver {
    /// The runtime creates directories.
    #[default]
    Cgroupfs,
    /// systemd creates slices for pods and scopes for containers.
    Systemd,
}

/// Prefix of the scope of a container, before its id.
const PREFIX: &str = "cri-coracle";

/// Paths of cgroups.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    driver: CgroupDriver,
    /// The directory that contains all cgroups, or the names of the slice.
    root: Vec<String>,
}

// === impl CgroupDriver ===

impl std::fmt::Display for CgroupDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Cgroupfs => "cgroupfs",
            Self::Systemd => "systemd",
        })
    }
}

// === impl Layout ===

impl Layout {
    /// The layout of the cgroups below `root`.
    ///
    /// # Errors
    /// If the path cannot be the root.
    pub(crate) fn new(driver: CgroupDriver, root: &str) -> Result<Self, String> {
        let inside = root.trim_matches('/');
        let parts = match (driver, inside) {
            (_, "") => Vec::new(),
            (CgroupDriver::Cgroupfs, _) => vec![inside.to_owned()],
            (CgroupDriver::Systemd, _) if unit::is_slice(inside) && inside != "-.slice" => {
                inside.trim_end_matches(".slice").split('-').map(str::to_owned).collect()
            }
            (CgroupDriver::Systemd, _) => {
                return Err(format!("{root:?} must be / or a slice with the systemd driver"));
            }
        };
        Ok(Self { driver, root: parts })
    }

    pub(crate) fn driver(&self) -> CgroupDriver {
        self.driver
    }

    /// Refuses a path that cannot be the cgroup of a pod.
    pub(crate) fn check_parent(&self, parent: &str) -> Result<(), String> {
        let last = parent.rsplit('/').next().unwrap_or_default();
        match self.driver {
            CgroupDriver::Cgroupfs if parent.ends_with(".slice") => {
                Err(format!("{parent:?} is a slice, but the cgroup driver is cgroupfs"))
            }
            CgroupDriver::Systemd if !parent.is_empty() && !unit::is_slice(last) => {
                Err(format!("{parent:?} is not a slice, but the cgroup driver is systemd"))
            }
            _ => Ok(()),
        }
    }

    /// The cgroup of a pod, with its configured parent if it has one.
    pub(crate) fn pod(&self, parent: &str, sandbox_id: &str) -> String {
        match (self.driver, parent) {
            (_, "") => self.own_pod(sandbox_id),
            (CgroupDriver::Cgroupfs, parent) => format!("/{}", parent.trim_matches('/')),
            // The kubelet passes the whole path, other clients only the name.
            (CgroupDriver::Systemd, parent) => {
                unit::slice_path(parent.rsplit('/').next().unwrap_or_default())
            }
        }
    }

    /// The cgroup of a pod without a configured parent.
    pub(crate) fn own_pod(&self, sandbox_id: &str) -> String {
        match self.driver {
            CgroupDriver::Cgroupfs => format!("{}/coracle/pods/{sandbox_id}", self.directory()),
            CgroupDriver::Systemd => unit::slice_path(&self.slice(&["coracle", "pods", sandbox_id])),
        }
    }

    /// The cgroup of a pod's container.
    pub(crate) fn container(&self, pod: &str, id: &str) -> String {
        match self.driver {
            CgroupDriver::Cgroupfs => format!("{pod}/{id}"),
            CgroupDriver::Systemd => format!("{pod}/{PREFIX}-{id}.scope"),
        }
    }

    /// The cgroup of a pod's shim, in the form that the shim expects.
    pub(crate) fn shim(&self, sandbox_id: &str) -> String {
        match self.driver {
            CgroupDriver::Cgroupfs => self.shims_directory(),
            CgroupDriver::Systemd => {
                Scope::new(&self.slice(&["coracle"]), "coracle-shim", sandbox_id).to_string()
            }
        }
    }

    /// The cgroup that the shim and the containers of a pod share in some hierarchies. In these hierarchies containers
    /// have no cgroup of their own, and systemd makes no cgroup. An example is the v2 hierarchy beside v1 hierarchies,
    /// which has no controllers.
    pub(crate) fn shim_of_pod(&self, sandbox_id: &str) -> String {
        match self.driver {
            CgroupDriver::Cgroupfs => format!("{}/{sandbox_id}", self.shims_directory()),
            CgroupDriver::Systemd => format!("{}/{sandbox_id}", unit::slice_path(&self.slice(&["coracle"]))),
        }
    }

    /// The parent of the cgroups of all shims. `None` with the systemd driver: there the parents also contain slices
    /// and scopes.
    pub(crate) fn shims(&self) -> Option<String> {
        match self.driver {
            CgroupDriver::Cgroupfs => Some(self.shims_directory()),
            CgroupDriver::Systemd => None,
        }
    }

    fn shims_directory(&self) -> String {
        format!("{}/coracle/shims", self.directory())
    }

    fn directory(&self) -> String {
        self.root.iter().map(|name| format!("/{name}")).collect()
    }

    fn slice(&self, names: &[&str]) -> String {
        unit::slice_of(self.root.iter().map(String::as_str).chain(names.iter().copied()))
    }
}

/// The cgroup path in the OCI runtime specification: `slice:prefix:name` for a scope, else the path.
pub(crate) fn cgroups_path(group: &str) -> String {
    Scope::of_path(group).map_or_else(|| group.to_owned(), |scope| scope.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_are_named_by_path() {
        let layout = Layout::new(CgroupDriver::Cgroupfs, "/node/").unwrap();
        assert_eq!(layout.own_pod("p"), "/node/coracle/pods/p");
        assert_eq!(layout.shim("p"), "/node/coracle/shims");
        assert_eq!(layout.shim_of_pod("p"), "/node/coracle/shims/p");
        let pod = layout.pod("kubepods/pod1/", "p");
        assert_eq!(layout.container(&pod, "c"), "/kubepods/pod1/c");
        assert_eq!(cgroups_path("/kubepods/pod1/c"), "/kubepods/pod1/c");
        assert_eq!(Layout::new(CgroupDriver::Cgroupfs, "/").unwrap().own_pod("p"), "/coracle/pods/p");
        assert!(layout.check_parent("/a/b.slice").is_err() && layout.check_parent("/a/b").is_ok());
    }

    #[test]
    fn slices_and_scopes_are_named_as_in_systemd() {
        let layout = Layout::new(CgroupDriver::Systemd, "/").unwrap();
        let whole = "/kubepods.slice/kubepods-pod1_2.slice";
        for parent in [whole, "kubepods-pod1_2.slice"] {
            assert!(layout.check_parent(parent).is_ok());
            assert_eq!(layout.pod(parent, "p"), whole);
        }
        let container = layout.container(whole, "c");
        assert_eq!(container, "/kubepods.slice/kubepods-pod1_2.slice/cri-coracle-c.scope");
        assert_eq!(cgroups_path(&container), "kubepods-pod1_2.slice:cri-coracle:c");
        assert_eq!(layout.own_pod("p"), "/coracle.slice/coracle-pods.slice/coracle-pods-p.slice");
        assert_eq!(layout.shim("p"), "coracle.slice:coracle-shim:p");
        assert_eq!(layout.shim_of_pod("p"), "/coracle.slice/p");
        assert!(layout.check_parent("/kubepods/pod1").unwrap_err().contains("not a slice"));
        let below = Layout::new(CgroupDriver::Systemd, "edge-a.slice").unwrap();
        assert_eq!(below.shim("p"), "edge-a-coracle.slice:coracle-shim:p");
        assert!(Layout::new(CgroupDriver::Systemd, "/node").is_err());
    }
}
