//! The first process of a pod: who it is, and under which seccomp profile. Pure.
//!
//! There is one where containers share a pid namespace, the init that the shim forks. Elsewhere the shim holds the pod,
//! which is no process of the pod's and can be neither of them, for it makes the containers; what is asked for is
//! checked all the same. Its root directory is an empty one that nobody can write to, read-only or not.

use coracle_proto::cri::{LinuxSandboxSecurityContext, SecurityProfile};

use crate::container::profile;
use crate::container::user::{User, id};
use crate::error::Error;

/// Root, unless somebody else is asked for. There are no account files, so that all groups are those that are named,
/// by either policy.
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

/// None in a pod for privileged containers, as with containerd.
pub(crate) fn seccomp(security: &LinuxSandboxSecurityContext) -> Result<Option<SecurityProfile>, Error> {
    #[allow(deprecated, reason = "older kubelets set it")]
    let old = security.seccomp_profile_path.as_str();
    let wanted = profile::requested_seccomp(security.seccomp.as_ref(), old)?;
    Ok(wanted.filter(|_| !security.privileged))
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::Int64Value;

    use super::*;

    #[test]
    fn it_is_whom_the_pod_names_and_root_otherwise() {
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
    fn its_profile_is_the_one_of_today_or_of_old_and_none_beside_privileged_containers() {
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
