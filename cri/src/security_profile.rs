//! Validation of requested security profiles, and reading of seccomp profile files.

pub(crate) mod seccomp;

use std::io::ErrorKind;
use std::path::Path;

use coracle_proto::cri::SecurityProfile;
use coracle_proto::cri::security_profile::ProfileType;
use oci_spec::runtime::LinuxSeccomp;

use crate::error::Error;
use crate::known::known;

/// The requested seccomp profile: in the current field, or in the deprecated field if the current field is empty.
///
/// # Errors
/// If the profile is invalid.
pub(crate) fn requested_seccomp(
    current: Option<&SecurityProfile>,
    old: &str,
) -> Result<Option<SecurityProfile>, Error> {
    let profile = match current {
        Some(profile) => Some(profile.clone()),
        None => seccomp::of_path(old).map_err(|why| Error::invalid("seccomp_profile_path", why))?,
    };
    if let Some(profile) = &profile {
        check("seccomp", profile)?;
        if profile.profile_type() == ProfileType::Localhost && !file(profile).is_absolute() {
            return Err(Error::invalid("seccomp.localhost_ref", "must be an absolute path"));
        }
    }
    Ok(profile)
}

/// Refuses an unknown kind, and a name for another kind than `Localhost`, as containerd does.
pub(crate) fn check(field: &'static str, profile: &SecurityProfile) -> Result<(), Error> {
    let named = !profile.localhost_ref.is_empty();
    match known(field, profile.profile_type)? {
        ProfileType::Localhost if !named => {
            Err(Error::invalid(field, "localhost_ref is empty, but the profile is a localhost profile"))
        }
        ProfileType::RuntimeDefault | ProfileType::Unconfined if named => {
            Err(Error::invalid(field, "localhost_ref is set, but the profile is not a localhost profile"))
        }
        _ => Ok(()),
    }
}

/// Maximum size of a seccomp profile in bytes.
const PROFILE_MAX: u64 = 4 << 20;

/// Reads a seccomp profile of this node.
///
/// # Errors
/// If the file is absent or invalid.
pub(crate) fn read_seccomp(profile: &SecurityProfile) -> Result<LinuxSeccomp, Error> {
    let path = file(profile);
    let bytes = coracle_tree::read(path, PROFILE_MAX).map_err(|source| match source.kind() {
        ErrorKind::NotFound => {
            Error::invalid("seccomp.localhost_ref", format!("file {} does not exist", path.display()))
        }
        _ => Error::file("read seccomp profile", path)(source),
    })?;
    serde_json::from_slice(&bytes).map_err(|source| Error::Format {
        doing: "read seccomp profile",
        path: path.to_owned(),
        source,
    })
}

fn file(profile: &SecurityProfile) -> &Path {
    Path::new(profile.localhost_ref.trim_start_matches("localhost/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn profile(kind: i32, name: &str) -> SecurityProfile {
        SecurityProfile { profile_type: kind, localhost_ref: name.to_owned() }
    }

    #[test]
    fn contradictory_profiles_are_refused() {
        let (default, unconfined, localhost) = (0, 1, 2);
        let right = [
            profile(default, ""),
            profile(unconfined, ""),
            profile(localhost, "/p.json"),
            profile(localhost, "localhost//p.json"),
        ];
        for right in right {
            assert_eq!(requested_seccomp(Some(&right), "unconfined").expect("right"), Some(right));
        }
        let wrong =
            [profile(default, "/p"), profile(unconfined, "/p"), profile(localhost, ""), profile(3, "")];
        for wrong in wrong {
            assert!(check("apparmor", &wrong).is_err(), "{wrong:?}");
            assert!(requested_seccomp(Some(&wrong), "").is_err(), "{wrong:?}");
        }
        assert!(check("apparmor", &profile(localhost, "p")).is_ok());
        assert!(requested_seccomp(Some(&profile(localhost, "p.json")), "").is_err(), "relative");
    }

    #[test]
    fn the_deprecated_field_is_used_if_the_current_field_is_empty() {
        let of = |old| requested_seccomp(None, old);
        assert_eq!(of("").expect("none"), None);
        assert_eq!(of("localhost//p.json").expect("right"), Some(profile(2, "/p.json")));
        assert!(of("localhost/p.json").is_err(), "relative");
        assert!(of("p.json").is_err());
    }

    #[test]
    fn an_absent_file_is_an_invalid_argument() {
        let absent = read_seccomp(&profile(2, "/nowhere/p.json")).expect_err("absent");
        assert!(matches!(absent, Error::Invalid { .. }), "{absent:?}");
        let file = tempfile::NamedTempFile::new().expect("file");
        let path = file.path().to_string_lossy();
        assert!(matches!(read_seccomp(&profile(2, &path)), Err(Error::Format { .. })), "empty");
        std::fs::write(file.path(), r#"{"defaultAction": "SCMP_ACT_ALLOW"}"#).expect("write");
        assert!(read_seccomp(&profile(2, &path)).is_ok());
    }

    #[test]
    fn a_seccomp_profile_that_is_too_large_or_not_regular_is_refused() {
        let dir = tempfile::tempdir().expect("directory");
        let file = dir.path().join("p.json");
        let text = format!(r#"{{"defaultAction": "SCMP_ACT_ALLOW"}}{}"#, " ".repeat(4 << 20));
        std::fs::write(&file, text).expect("write");
        for (path, kind) in [(file.as_path(), ErrorKind::FileTooLarge), (dir.path(), ErrorKind::InvalidInput)]
        {
            let refused = read_seccomp(&profile(2, &path.to_string_lossy()));
            assert!(
                matches!(&refused, Err(Error::File { source, .. }) if source.kind() == kind),
                "{refused:?}"
            );
        }
    }
}
