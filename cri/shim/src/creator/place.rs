//! Opens and makes files and directories in a container's root file system. Paths resolve as inside the
//! container: no link leads out of the root.

use std::ffi::{OsStr, OsString};
use std::io::{self, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use nix::fcntl::{OFlag, openat, readlinkat};
use nix::sys::stat::{Mode, fstat, mkdirat};

use crate::kernel;

const DIRECTORY: libc::c_int = libc::O_PATH | libc::O_DIRECTORY;
/// Maximum number of symbolic links in a path, as in the kernel (MAXSYMLINKS).
const LINKS_MAX: usize = 40;

/// Type of a mount point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Directory,
    /// A file of any type except a directory.
    File,
}

/// Opens the path, and makes the missing components.
///
/// # Errors
/// Missing paths with `..` are refused: their meaning depends on links that do not exist yet.
pub(super) fn make(root: BorrowedFd<'_>, path: &Path, kind: Kind) -> io::Result<OwnedFd> {
    match kernel::open_in_root(root, path, libc::O_PATH) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        found => return found,
    }
    if make_in_plain_directory(root, path, kind).is_some() {
        return kernel::open_in_root(root, path, libc::O_PATH);
    }
    let place = without_links(root, path)?;
    match kind {
        Kind::Directory => make_plain_directories(root, &place),
        Kind::File => {
            let name = place.file_name().ok_or(ErrorKind::InvalidInput)?;
            let directory = make_plain_directories(root, place.parent().unwrap_or(Path::new("/")))?;
            match make_file(&directory, name) {
                // Another process that shares the volume may have made the file first.
                Ok(()) | Err(nix::Error::EEXIST) => kernel::open_in_root(root, path, libc::O_PATH),
                Err(errno) => Err(errno.into()),
            }
        }
    }
}

/// Makes the last component of a path. `None` if another component is missing, or if a directory above it is a link.
/// Most mount points of an image have only the last component missing. Then this function takes a third of the system
/// calls that a resolution of each component takes.
fn make_in_plain_directory(root: BorrowedFd<'_>, path: &Path, kind: Kind) -> Option<()> {
    if path.components().any(|part| part == Component::ParentDir) {
        return None;
    }
    let directory = kernel::open_plain_in_root(root, path.parent()?, DIRECTORY).ok()?;
    let name = path.file_name()?;
    match kind {
        Kind::Directory => mkdirat(&directory, name, Mode::from_bits_truncate(0o755)).ok(),
        Kind::File => make_file(&directory, name).ok(),
    }
}

fn make_file(directory: &OwnedFd, name: &OsStr) -> nix::Result<()> {
    let flags = OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(directory, name, flags, Mode::from_bits_truncate(0o644)).map(drop)
}

/// The parent directory of the path, made if it is missing, and the last component.
pub(super) fn parent<'a>(root: BorrowedFd<'_>, path: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
    let name = path.file_name().ok_or(ErrorKind::InvalidInput)?;
    let above = path.parent().unwrap_or(Path::new("/"));
    Ok((make_directories(root, above)?, name))
}

/// Opens a directory and makes the missing components of its path.
pub(super) fn make_directories(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    match kernel::open_in_root(root, path, DIRECTORY) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        found => return found,
    }
    make_plain_directories(root, &without_links(root, path)?)
}

fn make_plain_directories(root: BorrowedFd<'_>, path: &Path) -> io::Result<OwnedFd> {
    match kernel::open_in_root(root, path, DIRECTORY) {
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        found => return found,
    }
    let name = path.file_name().ok_or(ErrorKind::InvalidInput)?;
    let above = make_plain_directories(root, path.parent().unwrap_or(Path::new("/")))?;
    match mkdirat(&above, name, Mode::from_bits_truncate(0o755)) {
        // Another process that shares the volume has made the directory first.
        Ok(()) | Err(nix::Error::EEXIST) => kernel::open_in_root(root, path, DIRECTORY),
        Err(errno) => Err(errno.into()),
    }
}

/// Resolves all links of a path, whether or not the target exists. For example, `/etc/resolv.conf` of many images links
/// to a file that exists only in a running system. A mount on such a link makes its target.
fn without_links(root: BorrowedFd<'_>, path: &Path) -> io::Result<PathBuf> {
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(ErrorKind::InvalidInput.into());
    }
    let mut place = PathBuf::from("/");
    let mut rest: Vec<OsString> = parts(path);
    let mut links = 0;
    while let Some(part) = rest.pop() {
        if part == ".." {
            place.pop();
            continue;
        }
        place.push(&part);
        let link = match kernel::open_plain_in_root(root, &place, libc::O_PATH | libc::O_NOFOLLOW) {
            Ok(found) if is_link(&found)? => readlinkat(&found, "")?,
            Ok(_) => continue,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        links += 1;
        if links > LINKS_MAX {
            return Err(nix::Error::ELOOP.into());
        }
        place.pop();
        if Path::new(&link).is_absolute() {
            place = PathBuf::from("/");
        }
        rest.extend(parts(Path::new(&link)));
    }
    Ok(place)
}

/// The components of a path in reverse order.
fn parts(path: &Path) -> Vec<OsString> {
    let named = path.components().filter_map(|part| match part {
        Component::Normal(_) | Component::ParentDir => Some(part.as_os_str().to_owned()),
        Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
    });
    let mut parts: Vec<OsString> = named.collect();
    parts.reverse();
    parts
}

fn is_link(found: &OwnedFd) -> io::Result<bool> {
    Ok(fstat(found)?.st_mode & libc::S_IFMT == libc::S_IFLNK)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::fd::{AsFd as _, AsRawFd as _};
    use std::sync::atomic::{AtomicBool, Ordering};

    /// CVE-2021-30465: a container with the same volume replaced a link while the mount point of another one was made.
    #[test]
    fn cve_2021_30465_a_link_that_changes_meanwhile_does_not_lead_outside() {
        let base = std::env::temp_dir().join(format!("coracle-place-race-{}", std::process::id()));
        let (outside, root) = (base.join("outside"), base.join("root"));
        std::fs::create_dir_all(&outside).unwrap();
        std::fs::create_dir_all(root.join("inside")).unwrap();
        let (root, link, next) = (root.canonicalize().unwrap(), root.join("swapped"), root.join("next"));
        std::os::unix::fs::symlink("/inside", &link).unwrap();
        let open = File::open(&root).unwrap();
        let (done, mut made) = (AtomicBool::new(false), Vec::new());
        let exchanged = std::thread::scope(|scope| {
            let container = scope.spawn(|| {
                let targets = [outside.as_path(), Path::new("../outside"), Path::new("/inside")];
                for target in targets.into_iter().cycle().take_while(|_| !done.load(Ordering::Relaxed)) {
                    std::os::unix::fs::symlink(target, &next)?;
                    // Replaces the link in one step.
                    std::fs::rename(&next, &link)?;
                }
                io::Result::Ok(())
            });
            for (number, kind) in
                (0..500).flat_map(|number| [(number, Kind::Directory), (number, Kind::File)])
            {
                let path = PathBuf::from(format!("/swapped/{kind:?}-{number}/deep"));
                // The link may change between two steps. The container is refused then.
                let place = make(open.as_fd(), &path, kind).ok();
                made.extend(
                    place.map(|place| std::fs::read_link(format!("/proc/self/fd/{}", place.as_raw_fd()))),
                );
            }
            done.store(true, Ordering::Relaxed);
            container.join()
        });
        exchanged.unwrap().unwrap();
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
        assert!(!made.is_empty(), "all were refused");
        for place in made.into_iter().map(Result::unwrap) {
            assert!(place.starts_with(&root), "{} is outside", place.display());
        }
        std::fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn a_link_in_an_image_cannot_lead_outside_it() {
        let base = std::env::temp_dir().join(format!("coracle-place-{}", std::process::id()));
        let (outside, root) = (base.join("outside"), base.join("root"));
        std::fs::create_dir_all(root.join("inside")).unwrap();
        std::fs::create_dir_all(&outside).unwrap();
        std::os::unix::fs::symlink(&outside, root.join("out")).unwrap();
        std::os::unix::fs::symlink("../../outside", root.join("up")).unwrap();
        std::os::unix::fs::symlink("/inside", root.join("in")).unwrap();
        let open = File::open(&root).unwrap();
        for path in ["/out/x", "/up/y"] {
            make(open.as_fd(), Path::new(path), Kind::Directory).unwrap();
            make(open.as_fd(), &Path::new(path).with_extension("f"), Kind::File).unwrap();
        }
        assert!(root.join(outside.strip_prefix("/").unwrap()).join("x").is_dir());
        assert!(root.join("outside/y.f").is_file());
        assert!(make(open.as_fd(), Path::new("/a/../../x"), Kind::Directory).is_err());
        make(open.as_fd(), Path::new("/in/a/b"), Kind::Directory).unwrap();
        make(open.as_fd(), Path::new("/in/c/d"), Kind::File).unwrap();
        assert!(root.join("inside/a/b").is_dir() && root.join("inside/c/d").is_file());
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
        std::fs::remove_dir_all(base).unwrap();
    }

    #[test]
    fn containers_with_one_volume_make_the_same_mount_points_at_the_same_time() {
        const CONTAINERS: usize = 4;
        let root = std::env::temp_dir().join(format!("coracle-place-shared-{}", std::process::id()));
        std::fs::create_dir_all(&root).unwrap();
        let open = File::open(&root).unwrap();
        for (round, kind) in (0..100).flat_map(|round| [(round, Kind::File), (round, Kind::Directory)]) {
            let path = PathBuf::from(format!("/{round}/{kind:?}"));
            let barrier = std::sync::Barrier::new(CONTAINERS);
            let make_one = || {
                barrier.wait();
                make(open.as_fd(), &path, kind).map(drop)
            };
            std::thread::scope(|scope| {
                let all: Vec<_> = (0..CONTAINERS).map(|_| scope.spawn(make_one)).collect();
                all.into_iter().for_each(|one| one.join().unwrap().unwrap());
            });
        }
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_missing_last_component_is_made_without_resolving_each_component() {
        let root = std::env::temp_dir().join(format!("coracle-last-{}", std::process::id()));
        std::fs::create_dir_all(root.join("sys/fs")).unwrap();
        std::os::unix::fs::symlink("sys", root.join("link")).unwrap();
        std::os::unix::fs::symlink("nowhere", root.join("sys/dangling")).unwrap();
        let open = File::open(&root).unwrap();
        let made = |path: &str, kind| make_in_plain_directory(open.as_fd(), Path::new(path), kind).is_some();
        assert!(made("/sys/fs/cgroup", Kind::Directory) && root.join("sys/fs/cgroup").is_dir());
        assert!(made("/sys/file", Kind::File) && root.join("sys/file").is_file());
        for path in ["/link/x", "/missing/x", "/sys/dangling", "/sys/fs", "/sys/../x", "/"] {
            assert!(!made(path, Kind::Directory) && !made(path, Kind::File), "{path}");
        }
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn a_path_is_opened_while_other_files_are_renamed() {
        let root = std::env::temp_dir().join(format!("coracle-renamed-{}", std::process::id()));
        std::fs::create_dir_all(root.join("d/x")).unwrap();
        std::os::unix::fs::symlink("../d/".repeat(10), root.join("d/up")).unwrap();
        let (a, b) = (root.join("a"), root.join("b"));
        File::create(&a).unwrap();
        let open = File::open(&root).unwrap();
        std::thread::scope(|scope| {
            let renaming = scope.spawn(|| {
                for _ in 0..50_000 {
                    std::fs::rename(&a, &b).and_then(|()| std::fs::rename(&b, &a)).unwrap();
                }
            });
            while !renaming.is_finished() {
                make(open.as_fd(), Path::new("/d/up/x"), Kind::Directory).unwrap();
            }
        });
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn the_missing_target_of_a_link_is_made() {
        let root = std::env::temp_dir().join(format!("coracle-nowhere-{}", std::process::id()));
        std::fs::create_dir_all(root.join("etc")).unwrap();
        let link = |to: &str, name: &str| std::os::unix::fs::symlink(to, root.join(name)).unwrap();
        link("../run/systemd/resolve/stub-resolv.conf", "etc/resolv.conf");
        link("/run", "var-run");
        link("loop-b", "loop-a");
        link("loop-a", "loop-b");
        let open = File::open(&root).unwrap();
        make(open.as_fd(), Path::new("/etc/resolv.conf"), Kind::File).unwrap();
        assert!(root.join("run/systemd/resolve/stub-resolv.conf").is_file());
        make(open.as_fd(), Path::new("/var-run/lock/subsys"), Kind::Directory).unwrap();
        assert!(root.join("run/lock/subsys").is_dir());
        for kind in [Kind::File, Kind::Directory] {
            assert!(make(open.as_fd(), Path::new("/loop-a/x"), kind).is_err());
        }
        std::fs::remove_dir_all(root).unwrap();
    }
}
