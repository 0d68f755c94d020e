//! `subPath` and `subPathExpr`: a part of a volume, resolved without leaving the volume.
//!
//! The kernel opens the path inside the volume (`openat2` with `RESOLVE_BENEATH`). The opened file or directory is
//! bind-mounted at a path of the pod's directory. No name is resolved twice. So a container gains no access if it
//! replaces a directory by a symlink while another container starts.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, SFlag, fstat, mkdirat, umask};

use coracle_cri::blocking::{self, Abandoned, Blocked};
use coracle_tree::remove_file;

use super::{VolumeContext, mounts};

/// The reason why a part of a volume is not available.
#[derive(Debug, thiserror::Error)]
pub enum SubPathError {
    /// The path is absolute or contains `..`.
    #[error("subPath {0:?} must be relative and must not contain \"..\"")]
    Path(String),
    /// The path leads out of the volume.
    #[error("subPath {0:?} leads out of its volume")]
    Escape(String),
    /// The path does not exist in a volume that the pod uses read-only.
    #[error("subPath {0:?} does not exist, and the volume is read-only")]
    Missing(String),
    /// The volume's file system does not respond.
    #[error("failed to prepare subPath {path:?}")]
    Blocked {
        /// Path in the volume.
        path: String,
        /// Cause.
        #[source]
        source: Blocked,
    },
    /// A system call failed.
    #[error("failed to prepare subPath {path:?}")]
    Io {
        /// Path in the volume.
        path: String,
        /// Cause.
        #[source]
        source: io::Error,
    },
}

/// Replacement for a part that a volume does not have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MissingPart {
    /// A directory that is made in the volume.
    NewDirectory,
    /// An empty directory outside of the volume: the node writes the volume, into memory that all pods share.
    EmptyDirectory,
    /// Nothing: the pod uses the volume read-only.
    Nothing,
}

/// A part of a volume, for one mount of a container.
#[derive(Clone, Copy, Debug)]
pub struct SubPath<'a> {
    /// Uid of the pod.
    pub uid: &'a str,
    /// Name of the volume.
    pub volume: &'a str,
    /// Path of the volume on the host.
    pub host_path: &'a Path,
    /// Name of the container.
    pub container: &'a str,
    /// Index of the mount in the container's list.
    pub index: usize,
    /// Path in the volume, with expressions expanded.
    pub path: &'a str,
    /// Replacement if the volume does not have the path.
    pub missing: MissingPart,
    /// Whether mounts that the container makes in the part appear in the volume: `mountPropagation: Bidirectional`.
    pub is_bidirectional: bool,
}

/// Creates the part as a directory if it is missing and may be created, and returns the host path to mount in a
/// container.
///
/// The part stays mounted until [`super::unmount_all`]. For a restarted container it is mounted again, because the path
/// may lead to another file by then.
///
/// The work runs in a blocking thread, because the volume's server may never respond.
///
/// # Errors
/// When the path leads out of the volume, a component is not a directory, or the volume's file system does not respond.
pub async fn mount(ctx: &VolumeContext, part: &SubPath<'_>) -> Result<PathBuf, SubPathError> {
    let dir = ctx.pod_dir(part.uid).join(mounts::PARTS).join(part.volume).join(part.container);
    let at = dir.join(part.index.to_string());
    let (root, path, place) = (part.host_path.to_owned(), part.path.to_owned(), at.clone());
    let (missing, is_bidirectional) = (part.missing, part.is_bidirectional);
    let mounted = blocking::run(&at, move |abandoned| {
        let found = match missing {
            MissingPart::NewDirectory => Some(open_beneath(&root, &path)?),
            MissingPart::EmptyDirectory => open_existing(&root, &path)?,
            MissingPart::Nothing => {
                let found = open_existing(&root, &path)?;
                Some(found.ok_or_else(|| SubPathError::Missing(path.clone()))?)
            }
        };
        let place = MountPoint { at: &place, is_bidirectional };
        mount_at(found, &path, place, abandoned)
    });
    mounted.await.map_err(|source| SubPathError::Blocked { path: part.path.to_owned(), source })??;
    Ok(at)
}

/// The mount point of a part, and whether mounts below it propagate to the volume.
struct MountPoint<'a> {
    at: &'a Path,
    is_bidirectional: bool,
}

/// Mounts the opened part of a volume. If `found` is None, the mount point itself is the part.
fn mount_at(
    found: Option<OwnedFd>,
    path: &str,
    MountPoint { at, is_bidirectional }: MountPoint<'_>,
    abandoned: &Abandoned,
) -> Result<(), SubPathError> {
    let failed = |source: io::Error| SubPathError::Io { path: path.to_owned(), source };
    mounts::unmount_below(at).map_err(failed)?;
    // The pod and its directory may be gone.
    if abandoned.is_set() {
        return Err(failed(io::ErrorKind::TimedOut.into()));
    }
    at.parent().map_or(Ok(()), super::make_private).map_err(failed)?;
    let kind =
        |found: &OwnedFd| fstat(found).map(|found| SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT);
    let kind = found.as_ref().map_or(Ok(SFlag::S_IFDIR), kind).map_err(|errno| failed(errno.into()))?;
    let made = match (kind == SFlag::S_IFDIR, at.symlink_metadata().is_ok_and(|m| m.is_dir())) {
        (true, true) => Ok(()),
        // At an earlier start, the part may have been a file.
        (true, false) => remove_file(at).and_then(|()| fs::create_dir_all(at)),
        (false, true) => fs::remove_dir(at).and_then(|()| fs::write(at, "")),
        (false, false) => fs::write(at, ""),
    };
    let mounted = made.and_then(|()| match &found {
        Some(found) => mounts::bind_fd(found, at, is_bidirectional),
        // Containers run as any user.
        None => super::ownership::chmod(at, 0o755),
    });
    mounted.map_err(failed)
}

/// Opens a path below a directory, and creates missing directories.
fn open_beneath(root: &Path, path: &str) -> Result<OwnedFd, SubPathError> {
    let failed = |errno| error_of(path, errno);
    let parts = parts(path)?;
    let base = open_volume(root).map_err(failed)?;
    let mode = Mode::from_bits_truncate(fstat(&base).map_err(failed)?.st_mode & 0o7777);
    match beneath(&base, &relative(&parts)) {
        Err(Errno::ENOENT) => without_umask(|| make_beneath(&base, &parts, mode)).map_err(failed),
        found => found.map_err(failed),
    }
}

/// Opens a path below a directory. None if the path does not exist.
pub(super) fn open_existing(root: &Path, path: &str) -> Result<Option<OwnedFd>, SubPathError> {
    let parts = parts(path)?;
    match open_volume(root).and_then(|base| beneath(&base, &relative(&parts))) {
        Err(Errno::ENOENT) => Ok(None),
        found => found.map(Some).map_err(|errno| error_of(path, errno)),
    }
}

/// Opens the directory of a volume. Its own path belongs to the node and may contain a symlink.
fn open_volume(root: &Path) -> nix::Result<OwnedFd> {
    open(root, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())
}

/// The names in a path.
fn parts(path: &str) -> Result<Vec<&OsStr>, SubPathError> {
    let mut parts = Vec::new();
    for part in Path::new(path).components() {
        match part {
            Component::Normal(part) => parts.push(part),
            Component::CurDir => {}
            _ => return Err(SubPathError::Path(path.to_owned())),
        }
    }
    Ok(parts)
}

/// The path of these names.
fn relative(parts: &[&OsStr]) -> PathBuf {
    if parts.is_empty() { PathBuf::from(".") } else { parts.iter().collect() }
}

fn error_of(path: &str, errno: Errno) -> SubPathError {
    match errno {
        Errno::EXDEV | Errno::ELOOP => SubPathError::Escape(path.to_owned()),
        other => SubPathError::Io { path: path.to_owned(), source: other.into() },
    }
}

fn beneath(base: &impl AsFd, path: &Path) -> nix::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    match coracle_tree::open_despite_renames(|| openat2(base, path, how)) {
        // Linux before 5.6 does not have openat2. On such a kernel no symlink is followed.
        Err(Errno::ENOSYS) => no_links(base, path),
        found => found,
    }
}

fn no_links(base: &impl AsFd, path: &Path) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    let mut at = openat(base, ".", flags, Mode::empty())?;
    for part in path.components() {
        at = openat(&at, part.as_os_str(), flags, Mode::empty())?;
        if SFlag::from_bits_truncate(fstat(&at)?.st_mode) & SFlag::S_IFMT == SFlag::S_IFLNK {
            return Err(Errno::ELOOP);
        }
    }
    Ok(at)
}

/// Runs `make` on a thread of its own with umask 0. Changing the mode afterwards would be a race: a container can
/// replace the directory meanwhile.
fn without_umask<T: Send>(make: impl FnOnce() -> nix::Result<T> + Send) -> nix::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("sub-path".to_owned());
        let made = thread.spawn_scoped(scope, || {
            unshare(CloneFlags::CLONE_FS)?;
            umask(Mode::empty());
            make()
        });
        // The kernel starts no thread above a limit of processes; the caller tries again.
        let made = made.map_err(|_refused| Errno::EAGAIN)?;
        made.join().unwrap_or(Err(Errno::EAGAIN))
    })
}

/// Creates the missing directories with the volume's mode.
fn make_beneath(base: &OwnedFd, parts: &[&OsStr], mode: Mode) -> nix::Result<OwnedFd> {
    let mut at = openat(base, ".", OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty())?;
    let mut walked = PathBuf::new();
    for part in parts {
        walked.push(part);
        match beneath(base, &walked) {
            Err(Errno::ENOENT) => {
                match mkdirat(&at, *part, mode) {
                    Err(Errno::EEXIST) | Ok(()) => {}
                    Err(errno) => return Err(errno),
                }
                at = beneath(base, &walked)?;
            }
            found => at = found?,
        }
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{CWD, RenameFlags, renameat_with};

    use super::*;

    fn volume(name: &str) -> PathBuf {
        let dir = std::env::temp_dir().join(format!("coracle-subpath-{}-{name}", std::process::id()));
        fs::create_dir_all(dir.join("inner")).expect("temp dir");
        fs::write(dir.join("inner/file"), "x").expect("file");
        dir
    }

    fn target(fd: &OwnedFd) -> PathBuf {
        use std::os::fd::AsRawFd;
        fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("an open file")
    }

    #[test]
    fn a_part_is_found_or_made() {
        let dir = volume("made");
        assert_eq!(target(&open_beneath(&dir, "inner/file").expect("file")), dir.join("inner/file"));
        assert_eq!(target(&open_beneath(&dir, "new/deep").expect("made")), dir.join("new/deep"));
        assert!(dir.join("new/deep").is_dir());
        assert_eq!(target(&open_beneath(&dir, "./").expect("itself")), dir);
        fs::remove_dir_all(dir).expect("clean up");
    }

    #[test]
    fn created_directories_have_the_volumes_mode_whatever_the_umask() {
        let dir = volume("mode");
        for mode in [0o777, 0o2770, 0o1777, 0o700] {
            nix::sys::stat::fchmodat(
                nix::fcntl::AT_FDCWD,
                &dir,
                Mode::from_bits_truncate(mode),
                nix::sys::stat::FchmodatFlags::FollowSymlink,
            )
            .expect("chmod");
            let path = format!("of-{mode:o}/deep");
            open_beneath(&dir, &path).expect("made");
            for made in [dir.join(&path), dir.join(&path).parent().expect("parent").to_owned()] {
                use std::os::unix::fs::MetadataExt;
                let found = fs::metadata(&made).expect("made").mode() & 0o7777;
                assert_eq!(found, mode, "{found:o} for {mode:o}");
            }
        }
        fs::remove_dir_all(dir).expect("clean up");
    }

    #[test]
    fn links_inside_are_followed_and_links_outside_are_not() {
        let dir = volume("links");
        symlink("inner", dir.join("in")).expect("symlink");
        symlink("/etc", dir.join("absolute")).expect("symlink");
        symlink("../../../etc", dir.join("relative")).expect("symlink");
        assert_eq!(target(&open_beneath(&dir, "in/file").expect("inside")), dir.join("inner/file"));
        for bad in ["absolute/passwd", "relative/passwd", "absolute/new", "relative"] {
            assert!(matches!(open_beneath(&dir, bad), Err(SubPathError::Escape(_))), "{bad}");
        }
        for bad in ["../x", "/etc", "inner/../../x"] {
            assert!(matches!(open_beneath(&dir, bad), Err(SubPathError::Path(_))), "{bad}");
        }
        assert!(matches!(open_beneath(&dir, "inner/file/x"), Err(SubPathError::Io { .. })));
        fs::remove_dir_all(dir).expect("clean up");
    }

    /// CVE-2021-25741: a container replaced a directory by a link while the kubelet opened a part of the volume.
    #[test]
    fn cve_2021_25741_a_directory_that_becomes_a_link_meanwhile_does_not_lead_outside() {
        let (dir, outside) = (volume("race"), volume("race-outside"));
        let (swapped, link) = (dir.join("swapped"), dir.join("link"));
        fs::create_dir(&swapped).expect("directory");
        symlink(&outside, &link).expect("symlink");
        let (done, mut opened) = (AtomicBool::new(false), Vec::new());
        let exchange = || renameat_with(CWD, &swapped, CWD, &link, RenameFlags::EXCHANGE);
        let exchanged = std::thread::scope(|scope| {
            let container = scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    exchange()?;
                }
                rustix::io::Result::Ok(())
            });
            let begun = std::time::Instant::now();
            // On a busy machine the directory can be a link for a whole time slice of this thread.
            for number in 0.. {
                let is_enough = number >= 2_000 && !opened.is_empty();
                if is_enough || begun.elapsed() > std::time::Duration::from_secs(60) {
                    break;
                }
                let made = open_beneath(&dir, &format!("swapped/new-{number}")).ok();
                let found = open_existing(&dir, "swapped/inner/file").ok().flatten();
                opened.extend(made.iter().chain(&found).map(target));
            }
            done.store(true, Ordering::Relaxed);
            container.join()
        });
        exchanged.expect("no panic").expect("exchange");
        let of_host: Vec<_> = fs::read_dir(&outside).expect("directory").flatten().collect();
        assert_eq!(of_host.len(), 1, "made outside of the volume: {of_host:?}");
        assert!(!opened.is_empty(), "all were refused");
        for path in opened {
            assert!(path.starts_with(&dir), "{} is outside of the volume", path.display());
        }
        fs::remove_dir_all(dir).expect("clean up");
        fs::remove_dir_all(outside).expect("clean up");
    }

    #[test]
    fn a_part_is_opened_while_other_files_are_renamed() {
        let dir = volume("renamed");
        symlink("../inner/".repeat(10).trim_end_matches('/'), dir.join("inner/in")).expect("symlink");
        let (a, b) = (dir.join("a"), dir.join("b"));
        fs::write(&a, "x").expect("file");
        std::thread::scope(|scope| {
            let renaming = scope.spawn(|| {
                for _ in 0..50_000 {
                    fs::rename(&a, &b).and_then(|()| fs::rename(&b, &a)).expect("rename");
                }
            });
            while !renaming.is_finished() {
                open_beneath(&dir, "inner/in/file").expect("it exists");
            }
        });
        fs::remove_dir_all(dir).expect("clean up");
    }

    #[test]
    fn without_openat2_no_link_is_followed() {
        let dir = volume("old");
        symlink("inner", dir.join("in")).expect("symlink");
        let base = open(&dir, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).expect("volume");
        assert!(no_links(&base, Path::new("inner/file")).is_ok());
        assert_eq!(no_links(&base, Path::new("in/file")).err(), Some(Errno::ELOOP));
        fs::remove_dir_all(dir).expect("clean up");
    }
}
