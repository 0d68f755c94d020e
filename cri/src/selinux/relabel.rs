//! Relabelling of volumes, with all files below them.
//!
//! Files are opened by descriptors: a container that can write to the volume must not redirect the walk by a link.

use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{Mode, fstat};

const ATTRIBUTE: &str = "security.selinux";
/// Maximum depth of directories. A deeper tree could exhaust the stack.
const DEPTH_MAX: usize = 200;

/// Directories of the node that are never relabelled. The list is that of go-selinux, which all runtimes use.
const NEVER_RELABELLED: [&str; 24] = [
    "/",
    "/bin",
    "/boot",
    "/dev",
    "/etc",
    "/etc/passwd",
    "/etc/pki",
    "/etc/shadow",
    "/home",
    "/lib",
    "/lib64",
    "/media",
    "/opt",
    "/proc",
    "/root",
    "/run",
    "/sbin",
    "/srv",
    "/sys",
    "/tmp",
    "/usr",
    "/var",
    "/var/lib",
    "/var/log",
];

/// Labels `path`, which must contain no links, and everything below it. File systems without labels are skipped. Files that
/// disappear meanwhile are skipped.
///
/// # Errors
/// Also for a system directory of the node.
pub(crate) fn relabel(path: &Path, label: &str) -> io::Result<()> {
    if is_the_nodes(path) {
        let why = format!("{} is a system directory and is not relabelled", path.display());
        return Err(io::Error::new(ErrorKind::PermissionDenied, why));
    }
    let flags = libc::O_PATH | libc::O_NOFOLLOW;
    let top =
        std::os::unix::fs::OpenOptionsExt::custom_flags(File::options().read(true), flags).open(path)?;
    walk(&top.into(), label, 0)
}

fn is_the_nodes(path: &Path) -> bool {
    // `components` removes duplicate and trailing slashes.
    let clean: PathBuf = path.components().collect();
    NEVER_RELABELLED.iter().any(|never| clean == Path::new(never))
        || std::env::var_os("HOME").is_some_and(|home| !home.is_empty() && clean == Path::new(&home))
}

fn walk(place: &OwnedFd, label: &str, depth: usize) -> io::Result<()> {
    if depth > DEPTH_MAX {
        return Err(io::Error::other(format!("directories are nested deeper than {DEPTH_MAX}")));
    }
    let by_number = PathBuf::from(format!("/proc/self/fd/{}", place.as_raw_fd()));
    if fstat(place)?.st_mode & libc::S_IFMT != libc::S_IFDIR {
        return set(&by_number, label);
    }
    // All names are read first, so that the list is closed during the recursion.
    let names: Vec<_> = fs::read_dir(&by_number)?.flatten().map(|entry| entry.file_name()).collect();
    for name in names {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        match openat(place, name.as_os_str(), flags, Mode::empty()) {
            Ok(below) => walk(&below, label, depth + 1)?,
            Err(nix::Error::ENOENT) => {}
            Err(error) => return Err(error.into()),
        }
    }
    // The directory is labelled last: a labelled directory is completely labelled.
    set(&by_number, label)
}

/// Whether the file has exactly this label.
pub(super) fn has(path: &Path, label: &str) -> bool {
    let has = xattr::get_deref(path, ATTRIBUTE).ok().flatten();
    // The kernel may append a zero byte.
    has.is_some_and(|has| has.strip_suffix(b"\0").unwrap_or(&has) == label.as_bytes())
}

/// Sets the label, unless the file has it.
fn set(by_number: &Path, label: &str) -> io::Result<()> {
    if has(by_number, label) {
        return Ok(());
    }
    match xattr::set_deref(by_number, ATTRIBUTE, label.as_bytes()) {
        Err(error) if error.raw_os_error() == Some(libc::ENOTSUP) => Ok(()),
        result => result,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_directories_are_refused_in_every_notation() {
        for path in ["/", "/etc", "/etc/", "/./etc", "//var//lib/", "/home", "/usr"] {
            assert!(is_the_nodes(Path::new(path)), "{path}");
            assert!(relabel(Path::new(path), "u:r:t").is_err(), "{path}");
        }
        assert!(!is_the_nodes(Path::new("/var/lib/coracle/pods/x")));
    }

    #[test]
    fn a_whole_tree_is_labelled_and_links_are_not_followed() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("directory");
        let (inside, outside) = (dir.path().join("in"), dir.path().join("out"));
        fs::create_dir_all(inside.join("a/b")).expect("directories");
        fs::write(inside.join("a/b/file"), "").expect("file");
        fs::write(&outside, "").expect("file");
        std::os::unix::fs::symlink(&outside, inside.join("a/link")).expect("link");
        // Without SELinux, root can set the attribute like any other.
        let label = "system_u:object_r:container_file_t:s0:c1,c2";
        relabel(&inside, label).expect("relabel");
        let of = |path: &Path| xattr::get(path, ATTRIBUTE).expect("attribute");
        for path in ["", "a", "a/b", "a/b/file"] {
            assert_eq!(of(&inside.join(path)).as_deref(), Some(label.as_bytes()), "{path}");
        }
        assert_ne!(of(&outside).as_deref(), Some(label.as_bytes()));
    }
}
