//! Ownership of volume files: the pod's `fsGroup`, and modes.

use std::fs;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Pod;
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, chownat, fstat, openat};
use rustix::path::Arg;

/// The pod's fsGroup, if it has one.
pub(super) fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref()?.security_context.as_ref()?;
    context.fs_group.and_then(|group| u32::try_from(group).ok())
}

/// The owner of the pod's token files: the user of all its containers, if they run as the same user.
pub(super) fn fs_user(pod: &Pod) -> Option<u32> {
    let spec = pod.spec.as_ref()?;
    let of_pod = spec.security_context.as_ref().and_then(|context| context.run_as_user);
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let mut users =
        containers.map(|c| c.security_context.as_ref().and_then(|context| context.run_as_user).or(of_pod));
    let first = users.next()??;
    users.all(|user| user == Some(first)).then_some(first).and_then(|user| u32::try_from(user).ok())
}

/// Creates a directory and its parents for root and its group only, as the kubelet's pod directories. Directories
/// that containers see get their modes afterwards.
pub(crate) fn make_private(dir: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o750).create(dir)
}

/// Creates the parents of a path, as [`make_private`].
pub(super) fn make_parent(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), make_private)
}

/// Whether a directory belongs to the group and is writable for it.
pub(super) fn is_given(path: &Path, group: u32) -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::symlink_metadata(path)
        .is_ok_and(|found| found.gid() == group && found.mode() & GROUP_DIRECTORY == GROUP_DIRECTORY)
}

pub(super) fn chmod(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// Mode bits that a directory gets with its group.
pub(super) const GROUP_DIRECTORY: u32 = 0o2770;

/// Gives a tree to the group: readable, writable unless `read_only`, and setgid, so that new files get the group. The
/// pod may change the tree meanwhile.
pub(super) fn set_group(path: &Path, group: u32, read_only: bool) -> io::Result<()> {
    set_group_while(path, group, read_only, || true)
}

/// Like [`set_group`], but calls `continues` before each entry. If `continues` returns false, the rest of the tree
/// stays unchanged, and the error is `Interrupted`. As upstream (`walkDeep`), the top changes last: if [`is_given`] is
/// true for the top, the whole tree has the group.
pub(super) fn set_group_while(
    path: &Path,
    group: u32,
    read_only: bool,
    mut continues: impl FnMut() -> bool,
) -> io::Result<()> {
    let mut given = Ok(());
    coracle_tree::walk_while(path, |found| {
        if !continues() {
            given = Err(io::ErrorKind::Interrupted.into());
            return ControlFlow::Break(());
        }
        given = match set_entry_group(found.dir, found.name, group, read_only) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            given => given,
        };
        if given.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    given.and_then(|()| set_entry_group(CWD, path, group, read_only))
}

/// Gives a file of the node to the group, readable for it.
pub(super) fn set_file_group(path: &Path, group: u32) -> io::Result<()> {
    set_entry_group(CWD, path, group, true)
}

/// Opens the entry first and changes the opened file, because the name may refer to another file in the meantime.
fn set_entry_group(dir: BorrowedFd<'_>, name: impl Arg, group: u32, read_only: bool) -> io::Result<()> {
    let found = openat(dir, name, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let stat = fstat(&found)?;
    chownat(&found, c"", None, Some(Gid::from_raw(group)), AtFlags::EMPTY_PATH)?;
    let kind = FileType::from_raw_mode(stat.st_mode);
    if kind == FileType::Symlink {
        return Ok(());
    }
    let more = if read_only { 0o440 } else { 0o660 };
    let directory = if kind == FileType::Directory { 0o2110 } else { 0 };
    // fchmod does not accept an O_PATH descriptor; its path in /proc does.
    let found = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
    chmod(&found, (stat.st_mode & 0o7777) | more | directory)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_group_gets_the_tree_without_following_symlinks() {
        let dir = std::env::temp_dir().join(format!("coracle-ownership-{}", std::process::id()));
        let outside = dir.with_extension("outside");
        fs::create_dir_all(dir.join("inner")).expect("temp dir");
        fs::write(dir.join("inner/file"), "x").expect("file");
        fs::write(&outside, "x").expect("file");
        chmod(&dir.join("inner/file"), 0o600).expect("chmod");
        std::os::unix::fs::symlink(&outside, dir.join("link")).expect("symlink");
        set_group(&dir, 1234, true).expect("give");
        let at = |path: &Path| fs::metadata(path).map(|m| (m.gid(), m.mode() & 0o7777)).expect("metadata");
        assert_eq!(at(&dir.join("inner/file")), (1234, 0o640));
        assert_eq!(at(&dir.join("inner")).1 & 0o2550, 0o2550);
        assert_ne!(at(&outside).0, 1234);
        fs::remove_dir_all(&dir).expect("clean up");
        fs::remove_file(&outside).expect("clean up");
    }

    #[test]
    fn an_interrupted_change_leaves_the_top_and_the_next_one_continues() {
        let dir = tempfile::tempdir().expect("directory");
        for number in 0..4 {
            fs::write(dir.path().join(number.to_string()), "x").expect("file");
        }
        let given = || {
            let files =
                fs::read_dir(dir.path()).expect("directory").map(|entry| entry.expect("entry").metadata());
            files.filter(|found| found.as_ref().expect("metadata").gid() == 1234).count()
        };
        let mut left = 2;
        let interrupted = set_group_while(dir.path(), 1234, false, || {
            left -= 1;
            left >= 0
        });
        assert_eq!(interrupted.expect_err("interrupted").kind(), io::ErrorKind::Interrupted);
        assert_eq!((given(), is_given(dir.path(), 1234)), (2, false));
        set_group(dir.path(), 1234, false).expect("give");
        assert_eq!((given(), is_given(dir.path(), 1234)), (4, true));
    }

    #[test]
    fn a_tree_of_any_depth_is_given() {
        let dir = tempfile::tempdir().expect("directory");
        let mut chain = dir.path().join("0");
        fs::create_dir(&chain).expect("make");
        for number in 1..3000 {
            let above = dir.path().join(number.to_string());
            fs::create_dir(&above).expect("make");
            fs::rename(&chain, above.join("below")).expect("nest");
            chain = above;
        }
        set_group(dir.path(), 1234, false).expect("give");
        let mut groups = 0;
        coracle_tree::walk(dir.path(), |found| groups += usize::from(found.stat.st_gid == 1234))
            .expect("walk");
        assert_eq!(groups, 3000);
        coracle_tree::remove(dir.path()).expect("remove");
    }

    #[test]
    fn tokens_belong_to_the_one_user_that_all_containers_run_as() {
        let user =
            |spec: serde_json::Value| fs_user(&serde_json::from_value(json!({"spec": spec})).expect("pod"));
        assert_eq!(user(json!({"containers": [{"name": "a"}]})), None);
        assert_eq!(
            user(json!({"securityContext": {"runAsUser": 7}, "containers": [{"name": "a"}, {"name": "b"}]})),
            Some(7)
        );
        assert_eq!(
            user(
                json!({"securityContext": {"runAsUser": 7}, "containers": [{"name": "a", "securityContext": {"runAsUser": 8}}, {"name": "b"}]})
            ),
            None
        );
    }
}
