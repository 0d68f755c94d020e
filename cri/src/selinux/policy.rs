//! Whether SELinux is enabled, and its policy's default labels for containers.

use std::fs;
use std::io;
use std::path::Path;

use nix::sys::statfs::{FsType, statfs};
use nix::sys::statvfs::{FsFlags, statvfs};
use tracing::{info, warn};

use super::label::{Defaults, Label};

/// Mount point of selinuxfs, fixed by selinux(8) and all tools.
const MOUNT: &str = "/sys/fs/selinux";
/// `SELINUX_MAGIC` of statfs(2).
// The type of the field depends on the architecture and the C library.
const MAGIC: FsType = FsType(0xf97c_ff8c_u32 as _);
/// File with the name of the policy.
const CONFIG: &str = "/etc/selinux/config";
/// File with the labels of containers, from the package container-selinux. Without it, the policy's own file
/// [`OWN_CONTEXTS`] is read.
const SHARED_CONTEXTS: &str = "/usr/share/containers/selinux/contexts";
const OWN_CONTEXTS: &str = "contexts/lxc_contexts";

/// A policy with labels for containers.
#[derive(Debug)]
pub(super) struct Policy {
    pub(super) defaults: Defaults,
}

// === impl Policy ===

impl Policy {
    /// Reads the policy. `None` without SELinux, or if the policy has no labels for containers. The latter is logged.
    pub(super) fn detect() -> Option<Self> {
        match read()? {
            Ok(defaults) => {
                let (process, file) = (&defaults.process, &defaults.file);
                info!(%process, %file, "selinux is enabled; containers are labelled");
                Some(Self { defaults })
            }
            Err(error) => {
                warn!(
                    error,
                    "selinux is enabled, but its policy has no labels for containers; they are not labelled"
                );
                None
            }
        }
    }

    /// The mode of SELinux and the label of containers, for people.
    pub(super) fn describe(&self) -> String {
        let enforcing = fs::read_to_string(Path::new(MOUNT).join("enforce"));
        let mode = if enforcing.is_ok_and(|text| text.trim() == "1") { "enforcing" } else { "permissive" };
        format!("on, {mode}, containers are {}", self.defaults.process)
    }

    /// Checks that the kernel's policy has a label.
    pub(super) fn check(&self, label: &Label) -> io::Result<()> {
        fs::write(Path::new(MOUNT).join("context"), label.to_string())
    }
}

/// Whether containers are labelled on this machine: SELinux is enabled, and its policy has labels for containers.
#[must_use]
pub fn labels_containers() -> bool {
    matches!(read(), Some(Ok(_)))
}

/// The policy's labels for containers. `None` without SELinux.
fn read() -> Option<Result<Defaults, String>> {
    if !is_enabled() {
        return None;
    }
    let text = fs::read_to_string(SHARED_CONTEXTS).or_else(|_none| {
        let config = fs::read_to_string(CONFIG)?;
        let name = setting(&config, "SELINUXTYPE").unwrap_or_default().to_owned();
        fs::read_to_string(Path::new("/etc/selinux").join(name).join(OWN_CONTEXTS))
    });
    Some(text.map_err(|error| error.to_string()).and_then(|text| defaults(&text)))
}

/// Whether SELinux is enabled with a policy, and selinuxfs is writable.
pub(super) fn is_enabled() -> bool {
    let is_there = statfs(MOUNT).is_ok_and(|found| found.filesystem_type() == MAGIC)
        && statvfs(MOUNT).is_ok_and(|found| !found.flags().contains(FsFlags::ST_RDONLY));
    // Before a policy is loaded, every process has the label `kernel`.
    is_there
        && fs::read_to_string("/proc/self/attr/current")
            .is_ok_and(|label| label.trim_end_matches('\0') != "kernel")
}

fn defaults(text: &str) -> Result<Defaults, String> {
    let named = |name: &str| -> Result<Label, String> {
        let label = setting(text, name).filter(|label| !label.is_empty());
        label.ok_or_else(|| format!("{name} is missing"))?.parse()
    };
    let file: Label = named("file")?;
    let read_only = named("ro_file").unwrap_or_else(|_none| file.clone());
    Ok(Defaults { process: named("process")?, file, read_only })
}

/// The value of a line `name = "value"`.
fn setting<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let lines = text.lines().map(str::trim).filter(|line| !line.starts_with(['#', ';']));
    let mut pairs = lines.filter_map(|line| line.split_once('='));
    pairs.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().trim_matches('"'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_labels_are_read_from_the_policys_file() {
        let text = "# of containers\nprocess = \"system_u:system_r:container_t:s0\"\n\
            content = \"system_u:object_r:virt_var_lib_t:s0\"\nfile = \"system_u:object_r:container_file_t:s0\"\n";
        let found = defaults(text).expect("labels");
        assert_eq!(found.process.to_string(), "system_u:system_r:container_t:s0");
        assert_eq!(found.file.to_string(), "system_u:object_r:container_file_t:s0");
        assert_eq!(found.read_only, found.file);
        let named = defaults(&format!("{text}ro_file = \"u:r:ro_t\"")).expect("labels");
        assert_eq!(named.read_only.to_string(), "u:r:ro_t");
        assert!(defaults("process = \"u:r:t\"").expect_err("no file").contains("file"));
        assert!(defaults("process = \"\"\nfile = \"u:r:t\"").is_err());
    }

    #[test]
    fn settings_are_read_and_comments_skipped() {
        let config = "# SELINUXTYPE=old\nSELINUX=enforcing\nSELINUXTYPE=default\n";
        assert_eq!(setting(config, "SELINUXTYPE"), Some("default"));
        assert_eq!(setting(config, "SELINUX"), Some("enforcing"));
        assert_eq!(setting("", "SELINUX"), None);
    }
}
