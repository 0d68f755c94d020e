//! `local` volumes: directories of this node. Those of the built-in provisioner are made and removed here.
//!
//! The directory of a provisioned volume is `<base>/<name of the volume>`. Only root can enter the base, so no user of
//! the node reaches a volume, although each volume is writable for all users of its containers. Containers see the
//! volume, never the base: no link that a container makes is ever followed here.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use k8s_openapi::api::core::v1::{PersistentVolume, Pod};
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, chmodat, fstat, mkdirat, openat, renameat_with, statat,
};
use rustix::io::Errno;

use super::error::SetUpError;
use super::ownership;

/// Name of the built-in provisioner.
pub(crate) const PROVISIONER: &str = "coracle.dev/local-path";
/// Label of provisioned volumes: the node that has the directory.
pub(crate) const NODE: &str = "coracle.dev/node";
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";

/// The directory of a volume. That of a provisioned volume is created.
pub(super) fn mount(base: &Path, node: &str, volume: &PersistentVolume) -> Result<PathBuf, SetUpError> {
    let source = volume.spec.as_ref().and_then(|spec| spec.local.as_ref());
    let path = source.map(|source| PathBuf::from(&source.path)).unwrap_or_default();
    if path.components().any(|part| part == std::path::Component::ParentDir) || !path.is_absolute() {
        return Err(SetUpError::Path(path.to_string_lossy().into_owned()));
    }
    if is_provisioned(volume) {
        let name = own_name(base, node, volume).map_err(SetUpError::Local)?;
        make(base, name).map_err(SetUpError::io("create the local volume", &path))?;
        return Ok(path);
    }
    match std::fs::metadata(&path) {
        Ok(found) if found.is_dir() => Ok(path),
        Ok(_) => Err(SetUpError::Local(format!("{} is not a directory", path.display()))),
        Err(error) => Err(SetUpError::io("open the local volume", &path)(error)),
    }
}

/// Whether the built-in provisioner made the volume.
pub(crate) fn is_provisioned(volume: &PersistentVolume) -> bool {
    let annotations = volume.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(PROVISIONED_BY)).is_some_and(|by| by == PROVISIONER)
}

/// The directory's name of a provisioned volume. The author of the object cannot choose another directory of the node.
pub(crate) fn own_name<'a>(base: &Path, node: &str, volume: &'a PersistentVolume) -> Result<&'a str, String> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let path = volume.spec.as_ref().and_then(|spec| spec.local.as_ref()).map(|source| source.path.as_str());
    let labels = volume.metadata.labels.as_ref();
    if labels.and_then(|labels| labels.get(NODE)).map(String::as_str) != Some(node) {
        return Err(format!("volume {name} is not on node {node}"));
    }
    if super::check_name(name).is_err() || path.map(Path::new) != Some(base.join(name).as_path()) {
        return Err(format!(
            "volume {name} is not in this node's directory of local volumes, {}",
            base.display()
        ));
    }
    Ok(name)
}

/// Creates the directory of a volume, unless it exists. Its files stay as they are.
///
/// The directory is created under another name and renamed. So after a crash it is absent or complete.
fn make(base: &Path, name: &str) -> io::Result<()> {
    /// No volume has this name: names of volumes begin with a letter or a digit.
    const NEW: &str = ".new";
    static MAKING: Mutex<()> = Mutex::new(());
    let base = open_base(base)?;
    let _one_at_a_time = MAKING.lock().unwrap_or_else(PoisonError::into_inner);
    if matches!(statat(&base, name, AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT)) {
        match mkdirat(&base, NEW, Mode::from_raw_mode(0o700)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        // Containers run as any user. The base keeps the node's users out.
        chmodat(&base, NEW, Mode::from_raw_mode(0o777), AtFlags::empty())?;
        renameat_with(&base, NEW, &base, name, RenameFlags::NOREPLACE)?;
    }
    let found = statat(&base, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
        Ok(())
    } else {
        Err(io::ErrorKind::NotADirectory.into())
    }
}

/// Opens the directory of local volumes, created for root only.
fn open_base(base: &Path) -> io::Result<OwnedFd> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(base)?;
    let opened = openat(CWD, base, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mode = fstat(&opened)?.st_mode & 0o7777;
    if mode & 0o077 != 0 {
        rustix::fs::fchmod(&opened, Mode::from_raw_mode(mode & 0o700))?;
    }
    Ok(opened)
}

/// Removes the directory of a volume with its files. Succeeds if there is none. Follows no links.
pub(crate) fn remove(base: &Path, name: &str) -> io::Result<()> {
    if !base.exists() {
        return Ok(());
    }
    let base = open_base(base)?;
    match coracle_tree::remove_at(&base, Path::new(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Gives the volume to the pod's fsGroup, by the pod's fsGroupChangePolicy. Off the async workers: a container can make
/// the tree as large as the disk allows.
pub(super) async fn give_to_group(pod: &Pod, path: &Path) -> Result<(), SetUpError> {
    let Some(group) = ownership::fs_group(pod) else { return Ok(()) };
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let policy = context.and_then(|context| context.fs_group_change_policy.as_deref());
    if policy == Some("OnRootMismatch") && ownership::is_given(path, group) {
        return Ok(());
    }
    let tree = path.to_owned();
    let given = tokio::task::spawn_blocking(move || ownership::give(&tree, group, false)).await;
    given
        .unwrap_or_else(|error| Err(io::Error::other(error)))
        .map_err(SetUpError::io("set the owner of", path))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use serde_json::json;

    use super::*;

    fn volume(name: &str, path: &Path, node: &str) -> PersistentVolume {
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {NODE: node},
            "annotations": {PROVISIONED_BY: PROVISIONER}}, "spec": {"local": {"path": path}}}))
        .expect("volume")
    }

    #[test]
    fn a_provisioned_volume_is_made_once_below_a_private_base() {
        let dir = tempfile::tempdir().expect("directory");
        let base = dir.path().join("base");
        let path = mount(&base, "n", &volume("v", &base.join("v"), "n")).expect("mount");
        std::fs::write(path.join("file"), "data").expect("write");
        mount(&base, "n", &volume("v", &base.join("v"), "n")).expect("mount again");
        assert_eq!(std::fs::read_to_string(path.join("file")).expect("read"), "data");
        let mode = |path: &Path| std::fs::metadata(path).expect("metadata").permissions().mode() & 0o777;
        assert_eq!((mode(&base), mode(&path)), (0o700, 0o777));
        remove(&base, "v").expect("remove");
        remove(&base, "v").expect("remove again");
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_that_a_crash_left_unfinished_is_made_anew_with_its_mode() {
        let dir = tempfile::tempdir().expect("directory");
        let base = dir.path().join("base");
        std::fs::create_dir_all(base.join(".new")).expect("left by a crash");
        std::fs::set_permissions(base.join(".new"), PermissionsExt::from_mode(0o700)).expect("chmod");
        let path = mount(&base, "n", &volume("v", &base.join("v"), "n")).expect("mount");
        assert_eq!(std::fs::metadata(path).expect("metadata").permissions().mode() & 0o777, 0o777);
        assert!(!base.join(".new").exists());
    }

    #[test]
    fn an_object_cannot_lead_to_another_directory_or_node() {
        let dir = tempfile::tempdir().expect("directory");
        let base = dir.path().join("base");
        for (name, path, node) in [
            ("v", base.join("other"), "n"),
            ("v", PathBuf::from("/etc"), "n"),
            ("..", base.join(".."), "n"),
            ("v", base.join("v"), "m"),
        ] {
            assert!(mount(&base, "n", &volume(name, &path, node)).is_err(), "{name} {path:?} {node}");
        }
    }

    #[test]
    fn links_are_never_followed() {
        let dir = tempfile::tempdir().expect("directory");
        let (base, outside) = (dir.path().join("base"), dir.path().join("outside"));
        std::fs::create_dir_all(&base).expect("base");
        std::fs::create_dir(&outside).expect("outside");
        std::fs::write(outside.join("file"), "x").expect("file");
        symlink(&outside, base.join("v")).expect("link");
        assert!(mount(&base, "n", &volume("v", &base.join("v"), "n")).is_err());
        remove(&base, "v").expect("remove the link");
        std::fs::create_dir(base.join("w")).expect("volume");
        symlink(&outside, base.join("w/link")).expect("link");
        remove(&base, "w").expect("remove");
        assert!(outside.join("file").exists() && !base.join("w").exists());
    }

    #[test]
    fn a_volume_of_an_administrator_must_exist() {
        let dir = tempfile::tempdir().expect("directory");
        let plain = |path: &Path| -> PersistentVolume {
            serde_json::from_value(json!({"metadata": {"name": "v"}, "spec": {"local": {"path": path}}}))
                .expect("volume")
        };
        assert!(mount(Path::new("/base"), "n", &plain(dir.path())).is_ok());
        assert!(mount(Path::new("/base"), "n", &plain(&dir.path().join("absent"))).is_err());
    }
}
