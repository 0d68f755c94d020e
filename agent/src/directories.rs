//! The state and run directories: their modes.
//!
//! The directories hold secrets, records with environment variables, and layers with set-user-id programs. A local user
//! could run such a program by its path (CVE-2021-41103). Every directory directly below the state and run directories
//! is private. So no deeper file is reachable by a path, independent of the file's mode. Containers reach layers and
//! volumes through mounts.

use std::fs::{self, DirBuilder, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::Path;

use anyhow::Context;
use nix::sys::stat::{Mode, umask};

/// Mode of the state and run directories: users may pass through them to a socket, but cannot list them.
const TRAVERSABLE: u32 = 0o711;
const PRIVATE: u32 = 0o700;
/// Mode of the kubelet's root directory.
const GROUP: u32 = 0o750;

#[cfg(feature = "controlplane")]
/// Directories directly below the state directory, with their modes.
pub(crate) const PLANE_STATE: &[(&str, u32)] = &[("store", PRIVATE), ("pki", PRIVATE)];
/// Directories of a node below the state directory.
pub(crate) const NODE_STATE: &[(&str, u32)] =
    &[("agent", PRIVATE), ("cni", PRIVATE), ("join", PRIVATE), ("pods", GROUP)];
/// Directories of the runtime below the state directory.
pub(crate) const RUNTIME_STATE: &[(&str, u32)] =
    &[("cni", PRIVATE), ("containers", PRIVATE), ("images", PRIVATE), ("parts", PRIVATE)];
/// Directories of the runtime below the run directory.
pub(crate) const RUNTIME_RUN: &[(&str, u32)] =
    &[("cni", PRIVATE), ("containers", PRIVATE), ("removed", PRIVATE), ("sandboxes", PRIVATE)];
/// Directories of a node below the run directory.
pub(crate) const NODE_RUN: &[(&str, u32)] = &[("volumes", GROUP)];

/// Makes the modes of new files independent of the starting shell. CNI plugins, hooks and containers inherit the mask.
///
/// Must be called before the first thread starts.
pub(crate) fn set_umask() {
    umask(Mode::from_bits_truncate(0o022));
}

/// Makes the directory and the named directories below it, and removes permissions that an earlier version gave.
///
/// A file in place of a directory is not an error here: the code that uses the directory reports it.
///
/// # Errors
/// A directory cannot be made or its mode cannot be changed.
pub(crate) fn prepare(top: &Path, below: &[&[(&str, u32)]]) -> anyhow::Result<()> {
    let context = || format!("cannot prepare the directory {}", top.display());
    if let Some(parent) = top.parent() {
        fs::create_dir_all(parent).with_context(context)?;
    }
    make(top, TRAVERSABLE).and_then(|()| restrict(top, TRAVERSABLE)).with_context(context)?;
    for (name, mode) in below.iter().copied().flatten() {
        let path = top.join(name);
        let made = make(&path, *mode).and_then(|()| restrict(&path, *mode));
        made.with_context(|| format!("cannot prepare the directory {}", path.display()))?;
    }
    Ok(())
}

/// Removes permissions that an earlier version gave to the directory and to the named directories below it. Makes no
/// directory.
///
/// # Errors
/// A mode cannot be changed.
pub(crate) fn repair(top: &Path, below: &[&[(&str, u32)]]) -> anyhow::Result<()> {
    let named = below.iter().copied().flatten().map(|(name, mode)| (top.join(name), *mode));
    for (path, mode) in std::iter::once((top.to_owned(), TRAVERSABLE)).chain(named) {
        match restrict(&path, mode) {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            other => other.with_context(|| format!("cannot repair the directory {}", path.display()))?,
        }
    }
    Ok(())
}

/// Makes the directory for container logs, as the kubelet does. An existing directory keeps its mode: other programs
/// share it.
///
/// # Errors
/// The directory cannot be made.
pub(crate) fn make_logs(path: &Path) -> anyhow::Result<()> {
    let made = DirBuilder::new().recursive(true).mode(GROUP).create(path);
    made.with_context(|| format!("cannot make the directory {}", path.display()))
}

fn make(path: &Path, mode: u32) -> io::Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn restrict(path: &Path, mode: u32) -> io::Result<()> {
    let found = fs::metadata(path)?;
    let now = found.mode() & 0o7777;
    // A sticky directory, such as /tmp, belongs to all users: only directories below it are the node's.
    if !found.is_dir() || now & 0o1000 != 0 || now & !mode == 0 {
        return Ok(());
    }
    fs::set_permissions(path, Permissions::from_mode(now & mode))?;
    tracing::info!(path = %path.display(), from = format!("{now:04o}"), to = format!("{:04o}", now & mode),
        "directory made private");
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test panics")]

    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn directories_of_an_earlier_version_are_made_private() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path().join("deep/state");
        fs::create_dir_all(top.join("store")).unwrap();
        for path in [top.clone(), top.join("store")] {
            fs::set_permissions(path, Permissions::from_mode(0o777)).unwrap();
        }
        prepare(&top, &[PLANE_STATE, NODE_STATE]).unwrap();
        assert_eq!([mode(&top), mode(&top.join("store")), mode(&top.join("pods"))], [0o711, 0o700, 0o750]);
        fs::set_permissions(&top, Permissions::from_mode(0o700)).unwrap();
        prepare(&top, &[PLANE_STATE]).unwrap();
        assert_eq!(mode(&top), 0o700, "permissions are added");
    }

    /// docs/security.md names these directories.
    #[test]
    fn only_the_directories_of_pods_and_volumes_are_open_to_the_group() {
        let all = [PLANE_STATE, NODE_STATE, RUNTIME_STATE, RUNTIME_RUN, NODE_RUN];
        let open = all.into_iter().flatten().filter(|(_, mode)| *mode != PRIVATE);
        assert_eq!(open.copied().collect::<Vec<_>>(), [("pods", 0o750), ("volumes", 0o750)]);
    }

    #[test]
    fn a_directory_of_all_users_keeps_its_mode() {
        let directory = tempfile::tempdir().unwrap();
        fs::set_permissions(directory.path(), Permissions::from_mode(0o1777)).unwrap();
        prepare(directory.path(), &[PLANE_STATE]).unwrap();
        assert_eq!([mode(directory.path()), mode(&directory.path().join("store"))], [0o1777, 0o700]);
    }
}
