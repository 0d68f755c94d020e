//! What a pod's first process becomes: the profiles found and compiled, before anything of the pod is made.

use coracle_proto::{cri, shim};
use oci_spec::runtime::LinuxSeccomp;

use crate::container::confinement::{self, Modules};
use crate::container::profile::read_seccomp;
use crate::container::seccomp;
use crate::error::{self, Error};
use crate::runtime::Runtime;
use crate::sandbox::user_namespace::Mapping;
use crate::sandbox::{first_process, namespaces};
use cri::security_profile::ProfileType;

impl Runtime {
    /// Looks for all that is asked for, also where no process is to be anything: a pod must not seem to have what this
    /// machine lacks. What needs no looking costs nothing there.
    pub(super) async fn first_process(
        &self,
        config: &cri::PodSandboxConfig,
    ) -> Result<Option<shim::InitProcess>, Error> {
        let none = cri::LinuxSandboxSecurityContext::default();
        let security = namespaces::security(config).unwrap_or(&none);
        let there = namespaces::share_pid(config);
        let user = first_process::user(security)?;
        if let Ok(Some(mapping)) = Mapping::of(Some(&namespaces::options(config))) {
            mapping.check_ids(user.uid, &user.groups).map_err(|why| Error::invalid("run_as_user", why))?;
        }
        let apparmor_profile = self.first_apparmor(security).await?.unwrap_or_default();
        let profile = match first_process::seccomp(security)? {
            Some(asked) => match asked.profile_type() {
                ProfileType::Localhost => Some(read_seccomp(&asked)?),
                ProfileType::RuntimeDefault if there => Some(default_profile()?),
                ProfileType::RuntimeDefault | ProfileType::Unconfined => None,
            },
            None => None,
        };
        let seccomp_program = match &profile {
            Some(profile) => {
                let program = self.inner.filters.program(profile).await;
                program.map_err(|why| Error::invalid("seccomp", error::chain(&why)))?.to_vec()
            }
            None => Vec::new(),
        };
        Ok(there.then(|| shim::InitProcess {
            uid: user.uid,
            gid: user.gid,
            groups: user.groups,
            apparmor_profile,
            seccomp_program,
            seccomp_flags: profile.as_ref().map(flags).unwrap_or_default(),
        }))
    }

    /// As a container's, but for pods that ask for none: the init has none then, as with containerd and CRI-O.
    async fn first_apparmor(
        &self,
        security: &cri::LinuxSandboxSecurityContext,
    ) -> Result<Option<String>, Error> {
        if security.apparmor.is_none() {
            return Ok(None);
        }
        let asked = cri::LinuxContainerSecurityContext {
            apparmor: security.apparmor.clone(),
            privileged: security.privileged,
            ..Default::default()
        };
        self.load_default_profile(&asked).await?;
        confinement::apparmor(&asked, &Modules::look()).map_err(|why| Error::invalid("apparmor", why))
    }
}

/// It has no capability that would widen the profile.
fn default_profile() -> Result<LinuxSeccomp, Error> {
    seccomp::default_profile(&[]).map_err(|error| Error::invalid("seccomp", error.to_string()))
}

/// By the names that they have in a profile.
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
