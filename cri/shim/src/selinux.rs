//! SELinux labels of container processes and of their mounts.

use std::fs::File;
use std::io::{self, Write as _};
use std::os::fd::AsFd;
use std::path::Path;

use libcontainer::oci_spec::runtime::Spec;
use nix::sys::stat::fstat;
use nix::sys::statfs::{PROC_SUPER_MAGIC, fstatfs};

use crate::kernel;

/// File systems that support the `context=` mount option, in a user namespace too.
const LABELLED: [&str; 4] = ["overlay", "tmpfs", "devpts", "ramfs"];
/// Inode number of the root directory of every proc file system.
const PROC_ROOT: u64 = 1;

/// The label of the container's mounts.
pub(crate) fn mount_label(spec: &Spec) -> Option<&str> {
    spec.linux().as_ref()?.mount_label().as_deref().filter(|label| !label.is_empty())
}

/// The label for a mount of this type of file system. `None` for types without the `context=` option: their files
/// are kernel objects, and the policy determines the labels.
pub(crate) fn context_of<'a>(kind: &str, label: Option<&'a str>) -> Option<&'a str> {
    label.filter(|_| LABELLED.contains(&kind))
}

/// Moves the mount label to the options of the mounts that support the label. The library would add the label to mounts
/// of every type, also to existing mounts of the pod. The kernel refuses such options.
pub(crate) fn prepare_for_library(spec: &mut Spec) {
    let Some(label) = mount_label(spec).map(str::to_owned) else { return };
    for entry in spec.mounts_mut().iter_mut().flatten() {
        if LABELLED.contains(&entry.typ().as_deref().unwrap_or_default()) {
            let mut options = entry.options().clone().unwrap_or_default();
            options.push(format!("context={label}"));
            entry.set_options(Some(options));
        }
    }
    if let Some(linux) = spec.linux_mut() {
        linux.set_mount_label(None);
    }
}

/// Adds a label to options of mount(2). The label is quoted, because commas separate options and a label may contain
/// commas.
pub(crate) fn with_context(options: &str, label: Option<&str>) -> String {
    match label {
        None => options.to_owned(),
        Some(label) if options.is_empty() => format!("context=\"{label}\""),
        Some(label) => format!("{options},context=\"{label}\""),
    }
}

/// Sets the label of the program that this process executes next.
///
/// # Errors
/// The policy forbids the label or does not contain it, or /proc is not a proc file system.
pub(crate) fn exec_as(label: &str) -> io::Result<()> {
    match set_exec(label) {
        // After `hide_from_proc` the process's files in /proc belong to the node's root. A process of another
        // user, or in a user namespace, cannot write them.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            kernel::show_in_proc()?;
            let set = set_exec(label);
            kernel::hide_from_proc()?;
            set
        }
        set => set,
    }
}

/// Writes the label. Does not write to a file that the container mounted over its /proc.
fn set_exec(label: &str) -> io::Result<()> {
    // An open with O_PATH has no side effect on a file that the container mounted at this path.
    let proc = kernel::open_without_magic(Path::new("/proc"), libc::O_PATH | libc::O_DIRECTORY)?;
    let is_proc = fstatfs(&proc)?.filesystem_type() == PROC_SUPER_MAGIC && fstat(&proc)?.st_ino == PROC_ROOT;
    if !is_proc {
        return Err(io::Error::other("/proc is not a proc file system"));
    }
    let file = kernel::open_same_mount(&proc, Path::new("thread-self/attr/exec"), libc::O_WRONLY)?;
    File::from(file).write_all(label.as_bytes())
}

/// Labels the root directory of a file system that does not support the mount option.
pub(crate) fn label_root(tree: impl AsFd, label: &str) -> io::Result<()> {
    let root = kernel::open_same_mount(tree, Path::new("."), libc::O_RDONLY | libc::O_DIRECTORY)?;
    match kernel::set_attribute(&root, c"security.selinux", label.as_bytes()) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTSUP) => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_file_systems_with_the_mount_option_are_labelled() {
        assert_eq!(context_of("tmpfs", Some("u:r:t")), Some("u:r:t"));
        for kind in ["proc", "sysfs", "mqueue", "cgroup2", "bind"] {
            assert_eq!(context_of(kind, Some("u:r:t")), None, "{kind}");
        }
        assert_eq!(context_of("tmpfs", None), None);
    }

    #[test]
    fn a_label_with_commas_is_one_option() {
        assert_eq!(with_context("mode=1777", Some("u:r:t:s0:c1,c2")), "mode=1777,context=\"u:r:t:s0:c1,c2\"");
        assert_eq!(with_context("", Some("u:r:t")), "context=\"u:r:t\"");
        assert_eq!(with_context("mode=755", None), "mode=755");
    }

    #[test]
    fn for_the_library_the_label_moves_to_mount_options() {
        let json = serde_json::json!({
            "ociVersion": "1.2.0",
            "linux": {"mountLabel": "u:r:t:s0:c1,c2"},
            "mounts": [
                {"destination": "/dev", "type": "tmpfs", "options": ["nosuid"]},
                {"destination": "/dev/mqueue", "type": "mqueue", "options": ["nosuid"]},
            ],
        });
        let mut spec: Spec = serde_json::from_value(json).unwrap();
        prepare_for_library(&mut spec);
        let options = |at: usize| spec.mounts().as_ref().unwrap()[at].options().clone().unwrap();
        assert_eq!(options(0), ["nosuid", "context=u:r:t:s0:c1,c2"]);
        assert_eq!(options(1), ["nosuid"]);
        assert_eq!(mount_label(&spec), None);
    }

    #[test]
    fn a_spec_without_a_label_has_none() {
        let spec = |label: &str| -> Spec {
            let json = serde_json::json!({"ociVersion": "1.2.0", "linux": {"mountLabel": label}});
            serde_json::from_value(json).unwrap()
        };
        assert_eq!(mount_label(&spec("u:r:t")), Some("u:r:t"));
        assert_eq!(mount_label(&spec("")), None);
    }
}
