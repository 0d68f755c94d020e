//! AppArmor: which profile a container gets, and what is refused. Pure.
//!
//! A profile by name is applied where the kernel has AppArmor and the profile is loaded, and refused
//! everywhere else: a container must not run with less than it asks for. `RuntimeDefault` means our own, which
//! is loaded first, or another default that is there; on a machine without AppArmor there is none.

use coracle_proto::cri::LinuxContainerSecurityContext;
use coracle_proto::cri::security_profile::ProfileType;

use super::apparmor::NAME;

/// Profiles for containers, ours and those that distributions and other runtimes load; the first one that is there
/// counts.
const DEFAULTS: [&str; 3] = [NAME, "cri-containerd.apparmor.d", "containers-default"];

/// What the kernel confines with.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Modules {
    /// The loaded AppArmor profiles; none without AppArmor.
    pub(crate) apparmor: Option<Vec<String>>,
}

// === impl Modules ===

impl Modules {
    /// Looks at the kernel. The list of profiles changes, so it is read for each container that cares.
    pub(crate) fn look() -> Self {
        let enabled = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled");
        let apparmor = enabled.is_ok_and(|text| text.trim() == "Y").then(|| {
            let list = std::fs::read_to_string("/sys/kernel/security/apparmor/profiles").unwrap_or_default();
            list.lines().map(|line| profile_name(line).to_owned()).collect()
        });
        Self { apparmor }
    }
}

/// A line is `name (mode)`.
fn profile_name(line: &str) -> &str {
    line.rsplit_once(" (").map_or(line, |(name, _)| name)
}

/// The AppArmor profile that the container runs under.
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
                    Err(format!("no default profile is loaded, none of {}", DEFAULTS.join(", ")))
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

/// Whether the container runs under the default profile, where there is one.
pub(crate) fn wants_default(security: &LinuxContainerSecurityContext) -> bool {
    !security.privileged && matches!(wanted(security), Ok((None | Some(ProfileType::RuntimeDefault), _)))
}

/// What is asked for, in the field of today or that of old.
fn wanted(security: &LinuxContainerSecurityContext) -> Result<(Option<ProfileType>, String), String> {
    let trim = |name: &str| name.trim_start_matches("localhost/").to_owned();
    if let Some(profile) = &security.apparmor {
        let kind = profile.profile_type();
        if kind == ProfileType::Localhost && profile.localhost_ref.is_empty() {
            return Err("a localhost profile needs a name".to_owned());
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
        other => Err(format!("{other:?} is no AppArmor profile")),
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
    fn a_named_profile_is_applied_or_refused_and_never_left_out() {
        let named = asked(ProfileType::Localhost, "mine");
        assert_eq!(apparmor(&named, &loaded(&["mine"])), Ok(Some("mine".into())));
        assert!(apparmor(&named, &loaded(&["other"])).expect_err("absent").contains("not loaded"));
        assert!(apparmor(&named, &Modules::default()).expect_err("no module").contains("no AppArmor"));
        assert!(apparmor(&asked(ProfileType::Localhost, ""), &loaded(&[])).is_err());
    }

    #[test]
    fn the_default_is_what_the_machine_has() {
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
    fn a_loaded_profiles_name_is_all_but_its_mode() {
        assert_eq!(profile_name("a (b) (enforce)"), "a (b)");
    }
}
