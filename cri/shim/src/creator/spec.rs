//! Adjusts a container's spec to this machine and to the container library's limits.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, IntoRawFd as _};
use std::path::Path;

use libcontainer::capabilities::CapabilityExt as _;
use libcontainer::oci_spec::OciSpecError;
use libcontainer::oci_spec::runtime::{
    Capabilities, LinuxNamespace, LinuxNamespaceType, PosixRlimit, PosixRlimitBuilder, Process, Spec,
};

use super::CreateError;
use crate::process::{self, PidNamespace};
use crate::rlimits;
use crate::user_namespace::UserNamespace;

/// The rights of this process and the features of this machine.
#[derive(Clone, Debug)]
pub(crate) struct Host {
    /// The lowest out-of-memory score that may be set without CAP_SYS_RESOURCE. `None` means any.
    pub(crate) least_oom_score: Option<i32>,
    pub(crate) may_raise_limits: bool,
    /// Capabilities of this process, which it can pass on.
    pub(crate) capabilities: HashSet<caps::Capability>,
    pub(crate) apparmor: bool,
}

// === impl Host ===

impl Host {
    pub(crate) fn detect() -> Self {
        let capabilities = caps::read(None, caps::CapSet::Permitted).unwrap_or_default();
        let has_sys_resource = capabilities.contains(&caps::Capability::CAP_SYS_RESOURCE);
        let own_score =
            fs::read_to_string("/proc/self/oom_score_adj").ok().and_then(|text| text.trim().parse().ok());
        Self {
            least_oom_score: if has_sys_resource { None } else { Some(own_score.unwrap_or(0)) },
            may_raise_limits: has_sys_resource,
            capabilities,
            apparmor: Path::new("/sys/kernel/security/apparmor").exists(),
        }
    }
}

/// Clamps values that this process is not permitted to grant, as containerd's `restrict_oom_score_adj` does. Removes
/// fields that the library handles wrongly.
pub(crate) fn adjust(spec: &mut Spec, host: &Host) {
    if joins_uts(spec) {
        // The host name is the pod's host name. The library does not set a host name in a namespace that it joins.
        spec.set_hostname(None);
        spec.set_domainname(None);
    }
    if let Some(process) = spec.process_mut() {
        adjust_process(process, host);
    }
}

/// Replaces each namespace path of the form `/proc/PID/ns/NAME`. Since the spec was written, that process may have
/// ended, and its pid may be reused. Paths of pid namespaces become the descriptors that the shim holds. Paths of the
/// shim's own namespaces become paths of the namespaces of this process.
pub(super) fn hold_namespaces(spec: &mut Spec, shim: i32, held: &[&PidNamespace]) -> Result<(), CreateError> {
    let namespaces = spec.linux_mut().as_mut().and_then(|linux| linux.namespaces_mut().as_mut());
    for namespace in namespaces.into_iter().flatten() {
        let Some(path) = namespace.path().clone() else { continue };
        let Some((pid, name)) = process::parse_namespace_path(&path) else { continue };
        if name == "pid" {
            let found = held.iter().find(|held| held.pid == pid);
            let held = found.ok_or(CreateError::NotOfThePod { path, pid })?;
            namespace.set_path(Some(held.path().into()));
        } else if pid == shim {
            // Paths of other processes come from a plugin and stay as they are.
            namespace.set_path(Some(format!("/proc/self/ns/{name}").into()));
        }
    }
    Ok(())
}

/// Makes the container join the pod's user namespace. The other namespaces are opened now: inside the user
/// namespace, /proc of the node's processes is not accessible. The creator and its forks inherit the
/// descriptors.
pub(super) fn join_user_namespace(spec: &mut Spec, user: &UserNamespace) -> io::Result<()> {
    let Some(linux) = spec.linux_mut() else { return Ok(()) };
    let mut namespaces = linux.namespaces().clone().unwrap_or_default();
    namespaces.retain(|namespace| namespace.typ() != LinuxNamespaceType::User);
    for namespace in &mut namespaces {
        if let Some(path) = namespace.path() {
            // The descriptor stays open until this short-lived process ends.
            let open = fs::File::open(path)?.into_raw_fd();
            namespace.set_path(Some(format!("/proc/self/fd/{open}").into()));
        }
    }
    let mut joined = LinuxNamespace::default();
    joined.set_typ(LinuxNamespaceType::User);
    joined.set_path(Some(format!("/proc/self/fd/{}", user.fd.as_raw_fd()).into()));
    namespaces.push(joined);
    linux.set_namespaces(Some(namespaces));
    Ok(())
}

/// The node's uid of a user of the container.
pub(crate) fn host_uid(spec: &Spec, uid: u32) -> u32 {
    let mappings =
        spec.linux().as_ref().and_then(|linux| linux.uid_mappings().as_deref()).unwrap_or_default();
    let found = mappings.iter().find(|m| uid >= m.container_id() && uid - m.container_id() < m.size());
    found.map_or(uid, |m| m.host_id() + (uid - m.container_id()))
}

/// Whether the container has a pid namespace of its own, which ends with its first process.
pub(super) fn has_own_pids(spec: &Spec) -> bool {
    has_own(spec, LinuxNamespaceType::Pid)
}

fn joins_uts(spec: &Spec) -> bool {
    !has_own(spec, LinuxNamespaceType::Uts)
}

fn has_own(spec: &Spec, kind: LinuxNamespaceType) -> bool {
    let mut namespaces =
        spec.linux().as_ref().and_then(|linux| linux.namespaces().as_deref()).unwrap_or_default().iter();
    namespaces.any(|namespace| namespace.typ() == kind && namespace.path().is_none())
}

/// Reads a spec. The library's own function is not used: it reads byte by byte, which takes several times as long.
pub(crate) fn load(path: &Path) -> Result<Spec, OciSpecError> {
    Ok(serde_json::from_slice(&fs::read(path)?)?)
}

/// Adjustments that apply to a container's first process and to an exec.
pub(crate) fn adjust_process(process: &mut Process, host: &Host) {
    if let (Some(wanted), Some(least)) = (process.oom_score_adj(), host.least_oom_score) {
        process.set_oom_score_adj(Some(wanted.max(least)));
    }
    // An explicit false is removed, because the library would not load a seccomp profile with it.
    if process.no_new_privileges() == Some(false) {
        process.set_no_new_privileges(None);
    }
    if !host.apparmor {
        process.set_apparmor_profile(None);
    }
    if !host.may_raise_limits
        && let Some(rlimits) = process.rlimits().clone()
    {
        process.set_rlimits(Some(rlimits.into_iter().map(clamp_limit).collect()));
    }
    adjust_capabilities(process, host);
}

fn clamp_limit(limit: PosixRlimit) -> PosixRlimit {
    let Some(resource) = rlimits::resource(limit.typ()) else { return limit };
    let hard = limit.hard().min(rlimits::hard(resource));
    let clamped =
        PosixRlimitBuilder::default().typ(limit.typ()).hard(hard).soft(limit.soft().min(hard)).build();
    clamped.unwrap_or(limit)
}

fn adjust_capabilities(process: &mut Process, host: &Host) {
    let Some(mut sets) = process.capabilities().clone() else { return };
    let have = |set: &Option<Capabilities>| {
        set.as_ref()
            .map(|set| set.iter().copied().filter(|c| host.capabilities.contains(&c.to_cap())).collect())
    };
    let (bounding, effective) = (have(sets.bounding()), have(sets.effective()));
    let (permitted, inheritable, ambient) =
        (have(sets.permitted()), have(sets.inheritable()), have(sets.ambient()));
    sets.set_bounding(bounding);
    sets.set_effective(effective);
    sets.set_permitted(permitted);
    sets.set_inheritable(inheritable);
    sets.set_ambient(ambient);
    process.set_capabilities(Some(sets));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weak() -> Host {
        Host {
            least_oom_score: Some(0),
            may_raise_limits: false,
            capabilities: HashSet::from([caps::Capability::CAP_CHOWN]),
            apparmor: false,
        }
    }

    fn spec() -> Spec {
        serde_json::from_value(serde_json::json!({
            "ociVersion": "1.2.0",
            "hostname": "pod",
            "process": {
                "user": { "uid": 0, "gid": 0 },
                "cwd": "/",
                "oomScoreAdj": -998,
                "noNewPrivileges": false,
                "apparmorProfile": "some",
                "capabilities": { "bounding": ["CAP_CHOWN", "CAP_SYS_RESOURCE"] },
            },
            "linux": { "namespaces": [{ "type": "uts", "path": "/proc/1/ns/uts" }] },
        }))
        .unwrap()
    }

    #[test]
    fn fields_are_clamped_to_the_rights_of_the_creator() {
        let mut spec = spec();
        adjust(&mut spec, &weak());
        let process = spec.process().as_ref().unwrap();
        assert_eq!(process.oom_score_adj(), Some(0));
        assert_eq!(process.no_new_privileges(), None);
        assert_eq!(process.apparmor_profile(), &None);
        assert_eq!(process.capabilities().as_ref().unwrap().bounding().as_ref().unwrap().len(), 1);
        assert_eq!(spec.hostname(), &None);
    }

    #[test]
    fn with_all_rights_the_spec_is_unchanged() {
        let mut spec = spec();
        let host =
            Host { least_oom_score: None, may_raise_limits: true, capabilities: caps::all(), apparmor: true };
        adjust(&mut spec, &host);
        let process = spec.process().as_ref().unwrap();
        assert_eq!(process.oom_score_adj(), Some(-998));
        assert!(process.apparmor_profile().is_some());
        assert_eq!(process.capabilities().as_ref().unwrap().bounding().as_ref().unwrap().len(), 2);
    }
}
