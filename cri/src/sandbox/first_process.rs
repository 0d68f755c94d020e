//! The user and seccomp profile of a pod's first process. Pure.
//!
//! A pod with a shared pid namespace has a first process: the init that the shim forks. Other pods have no first
//! process: the shim holds their namespaces, and it cannot drop its privileges because it creates containers. Their
//! configuration is still validated. The root directory of the first process is an empty directory without write
//! access, independent of `readonly_rootfs`.

use coracle_proto::cri::{LinuxSandboxSecurityContext, SecurityProfile};

use crate::error::Error;
use crate::security_profile;
use crate::user::{User, id};

/// The user of the first process: root by default. There are no account files, so the groups are the listed groups,
/// independent of the `supplemental_groups_policy`.
pub(crate) fn user(security: &LinuxSandboxSecurityContext) -> Result<User, Error> {
    if security.run_as_user.is_none() && security.run_as_group.is_some() {
        return Err(Error::invalid("run_as_group", "is set without run_as_user"));
    }
    let one = |field, number| id(number).map_err(|why| Error::invalid(field, why));
    let uid = security.run_as_user.map_or(Ok(0), |uid| one("run_as_user", uid.value))?;
    let gid = security.run_as_group.map_or(Ok(0), |gid| one("run_as_group", gid.value))?;
    let mut groups = vec![gid];
    for gid in &security.supplemental_groups {
        let gid = one("supplemental_groups", *gid)?;
        if !groups.contains(&gid) {
            groups.push(gid);
        }
    }
    Ok(User { uid, gid, groups })
}

/// The seccomp profile. A pod that allows privileged containers has no profile, as in containerd.
pub(crate) fn seccomp(security: &LinuxSandboxSecurityContext) -> Result<Option<SecurityProfile>, Error> {
    #[allow(deprecated, reason = "older kubelets set it")]
    let old = security.seccomp_profile_path.as_str();
    let wanted = security_profile::requested_seccomp(security.seccomp.as_ref(), old)?;
    Ok(wanted.filter(|_| !security.privileged))
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::Int64Value;

    use super::*;

    #[test]
    fn the_user_is_the_requested_user_or_root() {
        let mut security = LinuxSandboxSecurityContext::default();
        let root = User { uid: 0, gid: 0, groups: vec![0] };
        assert_eq!(user(&security).expect("root"), root);
        security.run_as_user = Some(Int64Value { value: 1000 });
        security.supplemental_groups = vec![7, 0, 7];
        let found = user(&security).expect("a user");
        assert_eq!(found, User { uid: 1000, gid: 0, groups: vec![0, 7] });
        security.run_as_group = Some(Int64Value { value: 7 });
        assert_eq!(user(&security).expect("a user").groups, [7, 0]);
        security.run_as_user = None;
        assert!(user(&security).is_err(), "a group without a user");
    }

    #[test]
    #[allow(deprecated, reason = "older kubelets set it")]
    fn the_profile_is_of_the_current_or_deprecated_field_and_none_if_privileged() {
        let mut security = LinuxSandboxSecurityContext::default();
        assert_eq!(seccomp(&security).expect("none"), None);
        security.seccomp_profile_path = "runtime/default".into();
        assert_eq!(seccomp(&security).expect("default"), Some(SecurityProfile::default()));
        security.privileged = true;
        assert_eq!(seccomp(&security).expect("none"), None);
        security.seccomp_profile_path = "p.json".into();
        assert!(seccomp(&security).is_err());
    }
}
