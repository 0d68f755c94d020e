//! `mountOptions` of local volumes. Pure.
//!
//! A local volume is a bind mount. So it has the options of a mount point. The options of the file system cannot be
//! set.

use std::collections::BTreeSet;

use super::error::SetUpError;

/// Options of the mode of access time updates.
pub(crate) const TIMES: [&str; 4] = ["noatime", "nodiratime", "relatime", "strictatime"];

/// The options of a bind mount.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct MountOptions {
    pub(super) read_only: bool,
    /// Options for the container runtime, without `ro`.
    pub(super) flags: Vec<String>,
}

/// Reads the options of a volume. Of contradictory options the last option counts, as for mount(8).
///
/// # Errors
/// An option is not an option of a bind mount.
pub(super) fn parse(options: &[String]) -> Result<MountOptions, SetUpError> {
    let (mut read_only, mut flags, mut time) = (false, BTreeSet::new(), None);
    let options = options.iter().flat_map(|list| list.split(',')).map(str::trim);
    for option in options.filter(|option| !option.is_empty()) {
        match option {
            "ro" => read_only = true,
            "rw" => read_only = false,
            "nodev" | "noexec" | "nosuid" | "nodiratime" => {
                flags.insert(option);
            }
            "dev" => _ = flags.remove("nodev"),
            "exec" => _ = flags.remove("noexec"),
            "suid" => _ = flags.remove("nosuid"),
            "diratime" => _ = flags.remove("nodiratime"),
            "noatime" | "relatime" | "strictatime" => time = Some(option),
            "atime" => time = None,
            // mount(8) uses these options itself, or they are the default.
            "defaults" | "bind" | "rbind" | "auto" | "noauto" | "nofail" | "_netdev" => {}
            _ => {
                let why = "is not possible for a local volume, which is a bind mount";
                return Err(SetUpError::Local(format!("mount option {option:?} {why}")));
            }
        }
    }
    Ok(MountOptions { read_only, flags: flags.into_iter().chain(time).map(str::to_owned).collect() })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(options: &[&str]) -> Result<MountOptions, SetUpError> {
        parse(&options.iter().map(|option| (*option).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn options_of_a_mount_point_are_honoured() {
        let found = parsed(&["ro", "noexec, nosuid", "defaults", "nodev,relatime"]).expect("options");
        assert!(found.read_only);
        assert_eq!(found.flags, ["nodev", "noexec", "nosuid", "relatime"]);
        assert_eq!(parsed(&[]).expect("none"), MountOptions::default());
    }

    #[test]
    fn the_last_of_contradictory_options_counts() {
        let found = parsed(&["ro,noexec,noatime", "rw,exec", "nosuid", "strictatime"]).expect("options");
        assert!(!found.read_only);
        assert_eq!(found.flags, ["nosuid", "strictatime"]);
    }

    #[test]
    fn other_options_are_refused_by_name() {
        for option in ["size=1G", "data=journal", "sync", "noexec=1"] {
            let refused = parsed(&["ro", option]).expect_err(option).to_string();
            assert!(refused.contains(&format!("mount option {option:?} is not possible")), "{refused}");
        }
    }
}
