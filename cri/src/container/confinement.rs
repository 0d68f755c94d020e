//! Selection of a container's AppArmor profile. Pure.
//!
//! A profile by name is applied if the kernel has AppArmor and the profile is loaded. Otherwise the container is
//! refused, because a container must not run with less confinement than requested. `RuntimeDefault` means Coracle's own
//! profile, which is loaded first, or another known default profile. A container without a request gets the default
//! profile if one is loaded. A privileged container, and a machine without AppArmor, has no default profile.

use coracle_proto::cri::LinuxContainerSecurityContext;
use coracle_proto::cri::security_profile::ProfileType;

/// Name of Coracle's own default profile.
pub(crate) const OWN_PROFILE: &str = "coracle-default";
/// Default profiles: Coracle's own, and profiles that distributions and other runtimes load. The first loaded profile
/// is used.
const DEFAULTS: [&str; 3] = [OWN_PROFILE, "cri-containerd.apparmor.d", "containers-default"];

/// The security modules of the kernel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Modules {
    /// The loaded AppArmor profiles. `None` without AppArmor.
    pub(crate) apparmor: Option<Vec<String>>,
}

// === impl Modules ===

impl Modules {
    /// Reads the state of the kernel. The list of profiles can change, so it is read for each container.
    pub(crate) fn detect() -> Self {
        let enabled = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled");
        let apparmor = enabled.is_ok_and(|text| text.trim() == "Y").then(|| {
            let list = std::fs::read_to_string("/sys/kernel/security/apparmor/profiles").unwrap_or_default();
            list.lines().map(|line| profile_name(line).to_owned()).collect()
        });
        Self { apparmor }
    }
}

/// The name in a line `name (mode)`.
fn profile_name(line: &str) -> &str {
    line.rsplit_once(" (").map_or(line, |(name, _)| name)
}

/// The AppArmor profile of a container.
pub(crate) fn apparmor(
    security: &LinuxContainerSecurityContext,
    modules: &Modules,
) -> Result<Option<String>, String> {
    let (kind, name) = wanted(security)?;
    match (kind, &modules.apparmor) {
        (None | Some(ProfileType::RuntimeDefault), _) if security.privileged => Ok(None),
        (Some(ProfileType::Unconfined), _) | (None | Some(ProfileType::RuntimeDefault), None) => Ok(None),
        (None | Some(ProfileType::RuntimeDefault), Some(loaded)) => {
            let found = DEFAULTS.iter().find(|name| loaded.iter().any(|one| one == *name));
            match (found, kind) {
                (Some(name), _) => Ok(Some((*name).to_owned())),
                (None, None) => Ok(None),
                (None, Some(_)) => {
                    Err(format!("no default profile is loaded; expected one of {}", DEFAULTS.join(", ")))
                }
            }
        }
        (Some(ProfileType::Localhost), None) => {
            Err(format!("profile {name:?} cannot be applied: this kernel has no AppArmor"))
        }
        (Some(ProfileType::Localhost), Some(loaded)) if loaded.contains(&name) => Ok(Some(name)),
        (Some(ProfileType::Localhost), Some(_)) => Err(format!("profile {name:?} is not loaded")),
    }
}

/// Whether the container uses the default profile.
pub(crate) fn wants_default(security: &LinuxContainerSecurityContext) -> bool {
    !security.privileged && matches!(wanted(security), Ok((None | Some(ProfileType::RuntimeDefault), _)))
}

/// The requested profile, in the current field or in the deprecated field.
fn wanted(security: &LinuxContainerSecurityContext) -> Result<(Option<ProfileType>, String), String> {
    let trim = |name: &str| name.trim_start_matches("localhost/").to_owned();
    if let Some(profile) = &security.apparmor {
        let kind = profile.profile_type();
        if kind == ProfileType::Localhost && profile.localhost_ref.is_empty() {
            return Err("localhost_ref is empty, but the profile is a localhost profile".to_owned());
        }
        return Ok((Some(kind), trim(&profile.localhost_ref)));
    }
    #[allow(deprecated, reason = "older kubelets set it")]
    let old = security.apparmor_profile.as_str();
    match old {
        "" => Ok((None, String::new())),
        "runtime/default" => Ok((Some(ProfileType::RuntimeDefault), String::new())),
        "unconfined" => Ok((Some(ProfileType::Unconfined), String::new())),
        name if name.starts_with("localhost/") => Ok((Some(ProfileType::Localhost), trim(name))),
        other => Err(format!("{other:?} is not an AppArmor profile")),
    }
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::SecurityProfile;

    use super::*;

    fn asked(kind: ProfileType, name: &str) -> LinuxContainerSecurityContext {
        let profile = SecurityProfile { profile_type: kind.into(), localhost_ref: name.into() };
        LinuxContainerSecurityContext { apparmor: Some(profile), ..Default::default() }
    }

    fn loaded(names: &[&str]) -> Modules {
        Modules { apparmor: Some(names.iter().map(|name| (*name).to_owned()).collect()) }
    }

    #[test]
    fn a_named_profile_is_applied_or_refused() {
        let named = asked(ProfileType::Localhost, "mine");
        assert_eq!(apparmor(&named, &loaded(&["mine"])), Ok(Some("mine".into())));
        assert!(apparmor(&named, &loaded(&["other"])).expect_err("absent").contains("not loaded"));
        assert!(apparmor(&named, &Modules::default()).expect_err("no module").contains("no AppArmor"));
        assert!(apparmor(&asked(ProfileType::Localhost, ""), &loaded(&[])).is_err());
    }

    #[test]
    fn the_default_is_a_loaded_profile() {
        let default = asked(ProfileType::RuntimeDefault, "");
        let silent = LinuxContainerSecurityContext::default();
        assert_eq!(apparmor(&default, &Modules::default()), Ok(None));
        assert_eq!(apparmor(&silent, &Modules::default()), Ok(None));
        let with = loaded(&["cri-containerd.apparmor.d"]);
        assert_eq!(apparmor(&default, &with), Ok(Some("cri-containerd.apparmor.d".into())));
        assert_eq!(apparmor(&silent, &with), Ok(Some("cri-containerd.apparmor.d".into())));
        assert_eq!(apparmor(&silent, &loaded(&[])), Ok(None));
        assert!(apparmor(&default, &loaded(&[])).is_err());
        let privileged = LinuxContainerSecurityContext { privileged: true, ..Default::default() };
        assert_eq!(apparmor(&privileged, &with), Ok(None));
        assert!(wants_default(&default) && wants_default(&silent) && !wants_default(&privileged));
        let ours = loaded(&["cri-containerd.apparmor.d", "coracle-default"]);
        assert_eq!(apparmor(&silent, &ours), Ok(Some("coracle-default".into())));
        assert_eq!(apparmor(&asked(ProfileType::Unconfined, ""), &with), Ok(None));
    }

    #[test]
    fn the_name_of_a_loaded_profile_excludes_its_mode() {
        assert_eq!(profile_name("a (b) (enforce)"), "a (b)");
    }
}
