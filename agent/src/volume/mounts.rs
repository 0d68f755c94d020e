//! Mounts on the host, and removal of directory trees with mounts in them.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use coracle_tree::mountinfo::unescaped;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::statfs::{TMPFS_MAGIC, statfs};
use rustix::fs::{Mode, OFlags, ResolveFlags, open, openat2};
use rustix::io::Errno;

const NONE: Option<&str> = None;
/// The mounts of the calling thread, because each thread can have its own mount namespace.
const MOUNTINFO: &str = "/proc/thread-self/mountinfo";
/// Directory of the parts of volumes that are mounted for `subPath`, in the directory of a pod.
pub(super) const PARTS: &str = "volume-subpaths";

/// Makes a directory a mount point with shared propagation, so that copies of the agent's mount namespace receive later
/// mounts.
///
/// Propagation is a property of mounts, so a mount point is needed. If the parent mount is shared already, as systemd
/// sets it up, nothing is done.
pub(super) fn ensure_shared(dir: &Path) -> io::Result<()> {
    super::make_private(dir)?;
    let dir = dir.canonicalize()?;
    if is_shared(&coracle_tree::read_lossy(MOUNTINFO)?, &dir) {
        return Ok(());
    }
    // A further mount of the directory would hide the mounts in it, and the pods that have them could not be removed.
    let points = mount_points(&dir)?;
    if points.is_empty() {
        mount(Some(&dir), &dir, NONE, MsFlags::MS_BIND, NONE)?;
    } else if !points.contains(&dir) {
        tracing::warn!(dir = %dir.display(), "cannot share mounts with other mount namespaces while pods have volumes");
        return Ok(());
    }
    mount(NONE, &dir, NONE, MsFlags::MS_SHARED, NONE)?;
    Ok(())
}

/// Whether the mount that contains the path has shared propagation.
fn is_shared(mountinfo: &str, path: &Path) -> bool {
    let lines = mountinfo.lines().filter_map(|line| Some((mount_point(line)?, line)));
    // Of two mounts on one path the later line is the upper mount; max_by_key returns the last maximum.
    let over =
        lines.filter(|(point, _)| path.starts_with(point)).max_by_key(|(point, _)| point.as_os_str().len());
    over.is_some_and(|(_, line)| {
        line.split(' ').skip(6).take_while(|f| *f != "-").any(|field| field.starts_with("shared:"))
    })
}

/// Mounts a tmpfs on a directory whose content must not reach a disk. The tmpfs is separate from the `/run` of the
/// machine, because pods determine how much it contains and must not fill `/run`. Its limit is the kernel's default,
/// half of the memory.
///
/// Files that an earlier version has put on another tmpfs stay there: a mount would hide them.
pub(super) fn ensure_memory(dir: &Path) -> io::Result<()> {
    super::make_private(dir)?;
    let canonical = dir.canonicalize()?;
    let is_mounted = mount_points(&canonical)?.contains(&canonical);
    if !is_mounted && (!is_tmpfs(dir)? || names(dir).is_empty()) {
        mount_tmpfs(dir, "mode=0750")?;
    }
    super::ownership::chmod(dir, 0o750)
}

/// Mounts a tmpfs on the directory, unless a tmpfs is mounted there.
///
/// A mounted tmpfs has another device number than its parent directory. The mount table is not read, because that takes
/// long: pods can have tens of thousands of mounts.
pub(super) fn ensure_tmpfs(dir: &Path, options: &str) -> io::Result<()> {
    let parent = dir.parent().ok_or(io::ErrorKind::InvalidInput)?;
    if fs::metadata(dir)?.dev() != fs::metadata(parent)?.dev() {
        return Ok(());
    }
    mount_tmpfs(dir, options)
}

/// Mounts a tmpfs whose files are not written to the swap space. The option exists since Linux 6.4. Older kernels
/// refuse it, and the files may be swapped out.
fn mount_tmpfs(dir: &Path, options: &str) -> io::Result<()> {
    let attempt = |options: &str| mount(Some("tmpfs"), dir, Some("tmpfs"), MsFlags::empty(), Some(options));
    attempt(&format!("{options},noswap")).or_else(|_unknown| attempt(options))?;
    Ok(())
}

pub(super) fn is_tmpfs(dir: &Path) -> io::Result<bool> {
    Ok(statfs(dir)?.filesystem_type() == TMPFS_MAGIC)
}

/// Bind-mounts an open file or directory and the mounts in it. A descriptor, unlike a path, cannot be replaced
/// meanwhile.
///
/// Later mounts and unmounts in the source appear at the new place, too. Mounts and unmounts at the new place appear in
/// the source only if `is_bidirectional`.
pub(super) fn bind_fd(fd: &impl std::os::fd::AsRawFd, at: &Path, is_bidirectional: bool) -> io::Result<()> {
    let source = format!("/proc/self/fd/{}", fd.as_raw_fd());
    mount(Some(source.as_str()), at, NONE, MsFlags::MS_BIND | MsFlags::MS_REC, NONE)?;
    if !is_bidirectional {
        mount(NONE, at, NONE, MsFlags::MS_SLAVE | MsFlags::MS_REC, NONE)?;
    }
    Ok(())
}

/// Ends the propagation from the mounted parts of volumes at or below a path to their volumes.
///
/// A mounted part contains copies of the mounts in its volume, such as mounts in a directory of the host. While a copy
/// is in the peer group of its original, the kernel applies an unmount of the copy to the original as well.
///
/// # Errors
/// As mount(2).
pub fn isolate_parts(path: &Path) -> io::Result<()> {
    let Ok(path) = path.canonicalize() else { return Ok(()) };
    let mountinfo = coracle_tree::read_lossy(MOUNTINFO)?;
    let mut parts = HashSet::new();
    for line in mountinfo.lines() {
        let point = mount_point(line).filter(|point| point.starts_with(&path));
        let Some(part) = point.as_deref().and_then(part_of) else { continue };
        // The call for a part includes the mounts in it, which are later in the table. Changing a mount of a network
        // file system waits for its server. A path through such a mount also waits.
        if !parts.insert(part.clone()) || is_network(line) {
            continue;
        }
        match mount(NONE, &part, NONE, MsFlags::MS_SLAVE | MsFlags::MS_REC, NONE) {
            Ok(()) | Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// The mounted part of a volume that has a mount point: the directory of parts, then volume, container and number.
fn part_of(point: &Path) -> Option<PathBuf> {
    let names: Vec<_> = point.components().collect();
    let parts = names.iter().position(|name| name.as_os_str() == PARTS)?;
    Some(names.get(..parts + 4)?.iter().collect())
}

/// Unmounts all mounts at or below the path, the innermost first.
pub(super) fn unmount_below(path: &Path) -> io::Result<()> {
    isolate_parts(path)?;
    let Ok(path) = path.canonicalize() else { return Ok(()) };
    for point in mount_points(&path)?.into_iter().rev() {
        match umount2(&point, MntFlags::UMOUNT_NOFOLLOW) {
            // A process has an open file there. A detached mount ends with that process.
            Err(nix::errno::Errno::EBUSY) => {
                umount2(&point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW)?
            }
            Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => {}
            other => other?,
        }
    }
    Ok(())
}

/// Whether a file system is mounted on this path. Does not access that file system: its server may hang.
pub(super) fn is_mount_point(path: &Path) -> io::Result<bool> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Ok(false) };
    let path = parent.canonicalize()?.join(name);
    Ok(mount_points(&path)?.contains(&path))
}

/// Detaches the NFS mounts at or below the path. A server that does not answer must not block the removal of a pod.
fn detach_network(path: &Path) -> io::Result<()> {
    if let Err(error) = isolate_parts(path) {
        // The later unmount of the volume reports this error. Here only servers that do not respond matter.
        tracing::debug!(%error, path = %path.display(), "cannot isolate parts of volumes");
    }
    let Ok(path) = path.canonicalize() else { return Ok(()) };
    let mountinfo = coracle_tree::read_lossy(MOUNTINFO)?;
    let network = mountinfo.lines().filter(|line| is_network(line));
    let points: Vec<PathBuf> = network.filter_map(mount_point).filter(|at| at.starts_with(&path)).collect();
    for point in points.iter().rev() {
        match umount2(point, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            Ok(()) | Err(nix::errno::Errno::EINVAL | nix::errno::Errno::ENOENT) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

/// Whether a line of mountinfo is of an NFS mount.
fn is_network(line: &str) -> bool {
    let kind = line.split(" - ").nth(1).unwrap_or_default();
    kind.starts_with("nfs ") || kind.starts_with("nfs4 ")
}

/// Unmounts all mounts in the tree and removes the tree. Succeeds if the tree does not exist. Never enters a directory
/// that is mounted.
pub(super) fn remove_tree(path: &Path) -> io::Result<()> {
    unmount_below(path)?;
    coracle_tree::remove(path)
}

/// Removes the tree of a pod. A tree without mounts is removed without reading the mount table, which has the mounts of
/// all pods. Otherwise NFS mounts are detached, the other mounts are unmounted, and the tree is removed.
pub(super) fn remove_pod_tree(path: &Path) -> io::Result<()> {
    match remove_without_mounts(path) {
        Ok(()) => Ok(()),
        Err(error) => {
            tracing::debug!(%error, path = %path.display(), "a pod's directory may have mounts");
            detach_network(path)?;
            remove_tree(path)
        }
    }
}

/// Removes a tree that has no mounts and is not a mount point. A mount is an error, and stays with its content. Does
/// not access the file systems of the mounts: an NFS server may hang.
fn remove_without_mounts(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let how = OFlags::PATH | OFlags::CLOEXEC;
    let parent = match open(parent, how | OFlags::DIRECTORY, Mode::empty()) {
        Err(Errno::NOENT) => return Ok(()),
        opened => opened?,
    };
    // The removal itself enters the directory even if it is a mount point. Only root can mount here in the meantime.
    match openat2(&parent, name, how | OFlags::NOFOLLOW, Mode::empty(), ResolveFlags::NO_XDEV) {
        Err(Errno::NOENT) => Ok(()),
        Err(errno) => Err(errno.into()),
        Ok(_same_mount) => coracle_tree::remove_at(&parent, Path::new(name)),
    }
}

/// Names of the subdirectories of a directory.
pub(super) fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .filter_map(|entry| entry.file_name().into_string().ok())
        .collect()
}

/// Mount points at or below a path, in the order of mounting.
fn mount_points(path: &Path) -> io::Result<Vec<PathBuf>> {
    let mountinfo = coracle_tree::read_lossy(MOUNTINFO)?;
    Ok(mountinfo.lines().filter_map(mount_point).filter(|point| point.starts_with(path)).collect())
}

/// The mount point in a line of mountinfo.
fn mount_point(line: &str) -> Option<PathBuf> {
    line.split(' ').nth(4).map(unescaped)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mount_points_are_unescaped() {
        let line = r"36 35 98:0 /mnt1 /mnt\0402/a\134b rw,noatime master:1 - ext3 /dev/root rw";
        assert_eq!(mount_point(line), Some(PathBuf::from(r"/mnt 2/a\b")));
    }

    /// Runs in a mount namespace of its own.
    fn apart<T: Send>(run: impl FnOnce() -> T + Send) -> T {
        std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("root");
                mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE).expect("private mounts");
                run()
            });
            thread.join().expect("the thread")
        })
    }

    #[test]
    fn a_directory_on_a_tmpfs_gets_a_file_system_of_its_own_unless_it_has_files() {
        let place = tempfile::tempdir().expect("directory");
        let outcome = apart(|| {
            mount_tmpfs(place.path(), "mode=0755").expect("mount");
            let (new, old) = (place.path().join("new"), place.path().join("old"));
            fs::create_dir_all(old.join("pod")).expect("files of an earlier version");
            for dir in [&new, &new, &old] {
                ensure_memory(dir).expect("prepare");
            }
            let count = |dir: &Path| mount_points(&dir.canonicalize().expect("path")).expect("mounts").len();
            (count(&new), count(&old), old.join("pod").exists())
        });
        assert_eq!(outcome, (1, 0, true));
    }

    #[test]
    fn a_tmpfs_is_not_swapped_out_if_the_kernel_has_the_option() {
        let place = tempfile::tempdir().expect("directory");
        let (is_set, has_option, mode) = apart(|| {
            let dir = place.path().canonicalize().expect("path");
            ensure_tmpfs(&dir, "mode=0700,size=65536").expect("mount");
            let table = coracle_tree::read_lossy(MOUNTINFO).expect("mounts");
            let line =
                table.lines().find(|line| mount_point(line).as_ref() == Some(&dir)).expect("the mount");
            let attempt = mount(Some("tmpfs"), &dir, Some("tmpfs"), MsFlags::empty(), Some("noswap"));
            (line.contains("noswap"), attempt.is_ok(), line.contains("size=64k") && line.contains("mode=700"))
        });
        assert_eq!(is_set, has_option);
        assert!(mode, "the other options are applied");
    }

    #[test]
    fn a_tmpfs_is_mounted_once_without_reading_the_table_of_mounts() {
        let place = tempfile::tempdir().expect("directory");
        let outcome = apart(|| {
            let dir = place.path().canonicalize().expect("path");
            mount_tmpfs(Path::new("/proc"), "mode=0555").expect("hide the table");
            let mounted = [(); 2].map(|()| ensure_tmpfs(&dir, "mode=0700").is_ok());
            umount2("/proc", MntFlags::MNT_DETACH).expect("show the table");
            (mounted, mount_points(&dir).expect("mounts").len())
        });
        assert_eq!(outcome, ([true; 2], 1));
    }

    #[test]
    fn a_tree_without_mounts_is_removed_without_reading_the_table_of_mounts() {
        let place = tempfile::tempdir().expect("directory");
        let (removed, is_left) = apart(|| {
            let dir = place.path().canonicalize().expect("path").join("pod");
            fs::create_dir_all(dir.join("volumes/x")).expect("directories");
            fs::write(dir.join("volumes/x/file"), "x").expect("file");
            mount_tmpfs(Path::new("/proc"), "mode=0555").expect("hide the table");
            let removed =
                [dir.clone(), dir.clone(), dir.join("none/none")].map(|at| remove_pod_tree(&at).is_ok());
            umount2("/proc", MntFlags::MNT_DETACH).expect("show the table");
            (removed, dir.exists())
        });
        assert_eq!((removed, is_left), ([true; 3], false));
    }

    #[test]
    fn the_removal_of_a_pod_keeps_the_content_of_its_mounts() {
        let place = tempfile::tempdir().expect("directory");
        let outside = tempfile::tempdir().expect("directory");
        fs::write(outside.path().join("file"), "x").expect("file");
        let mounted = ["", "a", "a/b/c", "file"].map(|at| {
            apart(|| {
                let dir = place.path().canonicalize().expect("path").join("pod");
                let (at, is_file) = (dir.join(at), at == "file");
                let source = if is_file { outside.path().join("file") } else { outside.path().to_owned() };
                fs::create_dir_all(if is_file { &dir } else { &at }).expect("directory");
                if is_file {
                    fs::write(&at, "").expect("file");
                }
                // The mount is of the same file system as the directory.
                mount(Some(&source), &at, NONE, MsFlags::MS_BIND, NONE).expect("mount");
                let refused = remove_without_mounts(&dir).is_err() && at.exists();
                remove_pod_tree(&dir).expect("removed");
                (refused, dir.exists(), outside.path().join("file").exists())
            })
        });
        assert_eq!(mounted, [(true, false, true); 4]);
    }

    #[test]
    fn mounts_of_pods_stay_visible_after_their_directory_became_private() {
        let place = tempfile::tempdir().expect("directory");
        let (shared, mounts) = apart(|| {
            let dir = place.path().canonicalize().expect("path").join("pods");
            ensure_shared(&dir).expect("prepare");
            fs::create_dir(dir.join("pod")).expect("directory");
            mount_tmpfs(&dir.join("pod"), "mode=0755").expect("mount");
            mount(NONE, "/", NONE, MsFlags::MS_REC | MsFlags::MS_PRIVATE, NONE).expect("private mounts");
            ensure_shared(&dir).expect("prepare again");
            let shared = is_shared(&coracle_tree::read_lossy(MOUNTINFO).expect("mounts"), &dir);
            let mounts = mount_points(&dir).expect("mounts").len();
            remove_tree(&dir.join("pod")).expect("removed");
            (shared, mounts)
        });
        assert_eq!((shared, mounts), (true, 2));
    }

    #[test]
    fn the_nearest_mount_determines_the_propagation() {
        let table = "1 0 8:0 / / rw shared:1 - ext4 /dev/sda rw\n2 1 8:0 / /var rw - ext4 /dev/sdb rw\n";
        assert!(is_shared(table, Path::new("/home/x")));
        assert!(!is_shared(table, Path::new("/var/lib")));
    }
}
