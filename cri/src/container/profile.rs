//! The profiles that a pod or a container asks for: whether they can be meant, and the file of one of the machine's own.

use std::io::ErrorKind;
use std::path::Path;

use coracle_proto::cri::SecurityProfile;
use coracle_proto::cri::security_profile::ProfileType;
use oci_spec::runtime::LinuxSeccomp;

use super::seccomp;
use crate::error::Error;
use crate::known::known;

/// The seccomp profile that is asked for: in the field of today, or in that of old where it is empty.
///
/// # Errors
/// It is none.
pub(crate) fn wanted_seccomp(
    today: Option<&SecurityProfile>,
    old: &str,
) -> Result<Option<SecurityProfile>, Error> {
    let profile = match today {
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

/// Refuses a profile of no kind, or one that is named where none is meant, as containerd does.
pub(crate) fn check(field: &'static str, profile: &SecurityProfile) -> Result<(), Error> {
    let named = !profile.localhost_ref.is_empty();
    match known(field, profile.profile_type)? {
        ProfileType::Localhost if !named => Err(Error::invalid(field, "a localhost profile needs a name")),
        ProfileType::RuntimeDefault | ProfileType::Unconfined if named => {
            Err(Error::invalid(field, "localhost_ref is set, and the profile is none of the machine's own"))
        }
        _ => Ok(()),
    }
}

/// Largest seccomp profile in bytes.
const PROFILE_MAX: u64 = 4 << 20;

/// A seccomp profile of the machine's own.
///
/// # Errors
/// Its file is absent, or no profile.
pub(crate) fn read_seccomp(profile: &SecurityProfile) -> Result<LinuxSeccomp, Error> {
    let path = file(profile);
    let bytes = coracle_tree::read(path, PROFILE_MAX).map_err(|source| match source.kind() {
        ErrorKind::NotFound => {
            Error::invalid("seccomp.localhost_ref", format!("there is no file {}", path.display()))
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
    fn a_profile_says_one_thing_only() {
        let (default, unconfined, localhost) = (0, 1, 2);
        let right = [
            profile(default, ""),
            profile(unconfined, ""),
            profile(localhost, "/p.json"),
            profile(localhost, "localhost//p.json"),
        ];
        for right in right {
            assert_eq!(wanted_seccomp(Some(&right), "unconfined").expect("right"), Some(right));
        }
        let wrong =
            [profile(default, "/p"), profile(unconfined, "/p"), profile(localhost, ""), profile(3, "")];
        for wrong in wrong {
            assert!(check("apparmor", &wrong).is_err(), "{wrong:?}");
            assert!(wanted_seccomp(Some(&wrong), "").is_err(), "{wrong:?}");
        }
        assert!(check("apparmor", &profile(localhost, "p")).is_ok());
        assert!(wanted_seccomp(Some(&profile(localhost, "p.json")), "").is_err(), "relative");
    }

    #[test]
    fn the_field_of_old_counts_where_that_of_today_is_empty() {
        let of = |old| wanted_seccomp(None, old);
        assert_eq!(of("").expect("none"), None);
        assert_eq!(of("localhost//p.json").expect("right"), Some(profile(2, "/p.json")));
        assert!(of("localhost/p.json").is_err(), "relative");
        assert!(of("p.json").is_err());
    }

    #[test]
    fn a_file_that_is_absent_is_the_clients_mistake() {
        let absent = read_seccomp(&profile(2, "/nowhere/p.json")).expect_err("absent");
        assert!(matches!(absent, Error::Invalid { .. }), "{absent:?}");
        let file = tempfile::NamedTempFile::new().expect("file");
        let path = file.path().to_string_lossy();
        assert!(matches!(read_seccomp(&profile(2, &path)), Err(Error::Format { .. })), "empty");
        std::fs::write(file.path(), r#"{"defaultAction": "SCMP_ACT_ALLOW"}"#).expect("write");
        assert!(read_seccomp(&profile(2, &path)).is_ok());
    }
}
