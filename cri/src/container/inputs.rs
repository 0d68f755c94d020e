//! The inputs of a container's OCI spec.

use std::path::{Path, PathBuf};

use coracle_images::Image;
use coracle_proto::cri::{ContainerConfig, LinuxContainerSecurityContext, PodSandboxConfig};
use oci_spec::runtime::LinuxSeccomp;

use super::devices::Node;
use crate::host::Host;
use crate::namespaces;
use crate::sandbox::user_namespace::Mapping;
use crate::selinux::Labels;
use crate::user::User;

/// The inputs of a spec.
#[derive(Debug, Clone)]
pub(crate) struct SpecInputs<'a> {
    pub(crate) config: &'a ContainerConfig,
    pub(crate) image: &'a Image,
    pub(crate) host: &'a Host,
    pub(crate) user: &'a User,
    pub(crate) sandbox: SandboxInputs<'a>,
    /// Mount point of the root file system.
    pub(crate) rootfs: &'a Path,
    /// The cgroup of the container.
    pub(crate) cgroup: &'a str,
    /// The device nodes to create.
    pub(crate) devices: &'a [Node],
    /// The profile file of a `Localhost` seccomp profile.
    pub(crate) seccomp_file: Option<LinuxSeccomp>,
    /// The name of a loaded AppArmor profile.
    pub(crate) apparmor: Option<String>,
    /// The SELinux labels of its processes and mounts.
    pub(crate) selinux: Option<&'a Labels>,
}

/// The sandbox's inputs of a spec.
#[derive(Debug, Clone)]
pub(crate) struct SandboxInputs<'a> {
    pub(crate) config: &'a PodSandboxConfig,
    pub(crate) hostname: String,
    /// Directory with `hosts`, `hostname` and `resolv.conf`.
    pub(crate) dir: PathBuf,
    pub(crate) shm_dir: PathBuf,
    /// Pid of the shim that holds the pod's namespaces.
    pub(crate) shim_pid: i32,
    /// Pid of the process with the pod's shared pid namespace, or 0.
    pub(crate) init_pid: i32,
    /// Pid of the target container's process for `TARGET`, or 0.
    pub(crate) target_pid: i32,
}

// === impl SpecInputs ===

impl SpecInputs<'_> {
    pub(super) fn security(&self) -> Option<&LinuxContainerSecurityContext> {
        self.config.linux.as_ref()?.security_context.as_ref()
    }

    /// The pod's user namespace, unless it is the node's. The mapping was validated before.
    pub(super) fn mapping(&self) -> Option<Mapping> {
        Mapping::of(Some(&namespaces::options(self.sandbox.config))).ok().flatten()
    }

    pub(super) fn privileged(&self) -> bool {
        self.security().is_some_and(|security| security.privileged)
    }
}
