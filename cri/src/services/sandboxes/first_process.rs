//! The security profiles of a pod's first process: found and compiled before the pod is created.

use coracle_proto::{cri, shim};
use oci_spec::runtime::LinuxSeccomp;

use super::SandboxService;
use crate::container::confinement::{self, Modules};
use crate::error::Error;
use crate::namespaces;
use crate::sandbox::first_process;
use crate::sandbox::user_namespace::Mapping;
use crate::security_profile::read_seccomp;
use crate::security_profile::seccomp;
use cri::security_profile::ProfileType;

impl SandboxService {
    /// The first process of a pod with a shared pid namespace. `None` for other pods. The requested profiles are
    /// checked for every pod: a pod must not run with a profile that this machine lacks.
    pub(super) async fn first_process(
        &self,
        config: &cri::PodSandboxConfig,
    ) -> Result<Option<shim::InitProcess>, Error> {
        let none = cri::LinuxSandboxSecurityContext::default();
        let security = namespaces::security(config).unwrap_or(&none);
        let has_process = namespaces::share_pid(config);
        let user = first_process::user(security)?;
        if let Ok(Some(mapping)) = Mapping::of(Some(&namespaces::options(config))) {
            mapping.check_ids(user.uid, &user.groups).map_err(|why| Error::invalid("run_as_user", why))?;
        }
        let apparmor_profile = self.first_apparmor(security).await?.unwrap_or_default();
        let profile = match first_process::seccomp(security)? {
            Some(requested) => match requested.profile_type() {
                ProfileType::Localhost => Some(read_seccomp(&requested)?),
                ProfileType::RuntimeDefault if has_process => Some(default_profile()?),
                ProfileType::RuntimeDefault | ProfileType::Unconfined => None,
            },
            None => None,
        };
        let seccomp_program = self.machine.profiles.seccomp_program(profile.as_ref()).await?;
        Ok(has_process.then(|| shim::InitProcess {
            uid: user.uid,
            gid: user.gid,
            groups: user.groups,
            apparmor_profile,
            seccomp_program,
            seccomp_flags: profile.as_ref().map(flags).unwrap_or_default(),
        }))
    }

    /// The AppArmor profile of the first process. Without a request it has no profile, as in containerd and CRI-O.
    async fn first_apparmor(
        &self,
        security: &cri::LinuxSandboxSecurityContext,
    ) -> Result<Option<String>, Error> {
        if security.apparmor.is_none() {
            return Ok(None);
        }
        let requested = cri::LinuxContainerSecurityContext {
            apparmor: security.apparmor.clone(),
            privileged: security.privileged,
            ..Default::default()
        };
        self.machine.profiles.load_default_apparmor(&requested).await?;
        confinement::apparmor(&requested, &Modules::detect()).map_err(|why| Error::invalid("apparmor", why))
    }
}

/// The default seccomp profile of a process without capabilities.
fn default_profile() -> Result<LinuxSeccomp, Error> {
    seccomp::default_profile(&[]).map_err(|error| Error::invalid("seccomp", error.to_string()))
}

/// Names of the flags, as in the profile.
fn flags(profile: &LinuxSeccomp) -> Vec<String> {
    let names = profile.flags().iter().flatten().filter_map(|flag| serde_json::to_value(flag).ok());
    names.filter_map(|name| name.as_str().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_keep_their_names() {
        let text = r#"{"defaultAction": "SCMP_ACT_ALLOW", "flags": ["SECCOMP_FILTER_FLAG_LOG"]}"#;
        assert_eq!(flags(&serde_json::from_str(text).expect("profile")), ["SECCOMP_FILTER_FLAG_LOG"]);
    }
}
