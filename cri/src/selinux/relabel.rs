//! Relabelling of volumes, with all files below them.
//!
//! Files are opened relative to directory descriptors, so that a container that can write to the volume cannot redirect
//! the walk by a link. The walk needs the same memory for every tree, because a container can create directories of any
//! depth and with any number of files.

use std::fs::File;
use std::io::{self, ErrorKind};
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use coracle_tree::Found;
use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::Mode;

use crate::blocking::Abandoned;

const ATTRIBUTE: &str = "security.selinux";

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

/// Labels `path`, which must contain no links, and everything below it except mounts. File systems without labels are
/// skipped. Files that are removed meanwhile are skipped.
///
/// # Errors
/// If the path is a system directory of the node, or if a file cannot be read or labelled, as in go-selinux. If the caller
/// stops waiting, the rest is not labelled.
pub(crate) fn relabel(path: &Path, label: &str, abandoned: &Abandoned) -> io::Result<()> {
    if is_system_directory(path) {
        let why = format!("{} is a system directory and is not relabelled", path.display());
        return Err(io::Error::new(ErrorKind::PermissionDenied, why));
    }
    // With musl, the standard library removes O_PATH from custom flags: a device would be opened, and a FIFO would block.
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let top = File::from(open(path, flags, Mode::empty())?);
    if top.metadata()?.is_dir() {
        label_below(&top, label, abandoned)?;
    }
    // The top is labelled last, so its label shows that everything below it is labelled.
    set(&by_number(&top), label)
}

fn is_system_directory(path: &Path) -> bool {
    // `components` removes duplicate and trailing slashes.
    let clean: PathBuf = path.components().collect();
    NEVER_RELABELLED.iter().any(|never| clean == Path::new(never))
        || std::env::var_os("HOME").is_some_and(|home| !home.is_empty() && clean == Path::new(&home))
}

/// Labels everything below an open directory. Its path may lead to another directory in the meantime.
fn label_below(top: &File, label: &str, abandoned: &Abandoned) -> io::Result<()> {
    let mut labelled = Ok(());
    // The entry in /proc is a link, and the walk follows no link in the last component of a path. So the path ends with
    // `.`.
    coracle_tree::walk_all_while(&by_number(top).join("."), |found| {
        labelled =
            if abandoned.is_set() { Err(ErrorKind::Interrupted.into()) } else { label_entry(&found, label) };
        if labelled.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    labelled
}

/// Opens the entry first and labels the opened file, because the name may refer to another file in the meantime.
fn label_entry(found: &Found<'_>, label: &str) -> io::Result<()> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    match openat(found.dir, found.name, flags, Mode::empty()) {
        Ok(entry) => set(&by_number(&entry), label),
        Err(nix::Error::ENOENT) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// The path of an open file in /proc.
fn by_number(file: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
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
    use std::fs;

    use super::*;

    #[test]
    fn system_directories_are_refused_in_every_notation() {
        for path in ["/", "/etc", "/etc/", "/./etc", "//var//lib/", "/home", "/usr"] {
            assert!(is_system_directory(Path::new(path)), "{path}");
            assert!(relabel(Path::new(path), "u:r:t", &Abandoned::default()).is_err(), "{path}");
        }
        assert!(!is_system_directory(Path::new("/var/lib/coracle/pods/x")));
    }

    #[test]
    fn the_top_is_labelled_without_opening_it() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("directory");
        let socket = dir.path().join("socket");
        let _listening = std::os::unix::net::UnixListener::bind(&socket).expect("socket");
        let label = "system_u:object_r:container_file_t:s0:c1,c2";
        // open(2) of a socket fails with ENXIO.
        relabel(&socket, label, &Abandoned::default()).expect("relabel");
        assert!(has(&socket, label));
    }

    #[test]
    fn a_tree_of_any_depth_is_labelled() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("directory");
        let deepest = dir.path().join(["d"; 300].join("/"));
        fs::create_dir_all(&deepest).expect("directories");
        let label = "system_u:object_r:container_file_t:s0:c1,c2";
        relabel(dir.path(), label, &Abandoned::default()).expect("relabel");
        assert!(has(&deepest, label) && has(dir.path(), label));
    }

    #[test]
    fn the_opened_directory_is_labelled_and_not_what_replaced_it() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("directory");
        let (path, moved) = (dir.path().join("volume"), dir.path().join("moved"));
        fs::create_dir_all(path.join("below")).expect("directories");
        let top = File::open(&path).expect("open");
        fs::rename(&path, &moved).expect("rename");
        fs::create_dir_all(path.join("below")).expect("directories");
        let label = "system_u:object_r:container_file_t:s0:c1,c2";
        label_below(&top, label, &Abandoned::default()).expect("label");
        assert!(has(&moved.join("below"), label) && !has(&path.join("below"), label));
    }

    #[test]
    fn the_rest_of_a_tree_is_not_labelled_when_the_caller_stops_waiting() {
        let dir = tempfile::tempdir_in("/var/tmp").expect("directory");
        fs::create_dir(dir.path().join("below")).expect("directory");
        let label = "system_u:object_r:container_file_t:s0:c1,c2";
        let abandoned = Abandoned::without_caller();
        let error = relabel(dir.path(), label, &abandoned).expect_err("incomplete");
        assert_eq!(error.kind(), ErrorKind::Interrupted);
        assert!(!has(dir.path(), label), "the label of the top would show that all is labelled");
    }

    #[test]
    fn a_directory_that_cannot_be_read_is_an_error() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir_in("/var/tmp").expect("directory");
        let hidden = dir.path().join("hidden");
        fs::create_dir_all(hidden.join("below")).expect("directories");
        for (path, mode) in [(dir.path(), 0o755), (hidden.as_path(), 0)] {
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("mode");
        }
        let relabelled = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // This changes the user of only this thread. Root could read the directory.
                nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
                relabel(dir.path(), "system_u:object_r:container_file_t:s0:c1,c2", &Abandoned::default())
            });
            thread.join().expect("thread")
        });
        assert_eq!(relabelled.expect_err("unreadable").kind(), ErrorKind::PermissionDenied);
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
        relabel(&inside, label, &Abandoned::default()).expect("relabel");
        let of = |path: &Path| xattr::get(path, ATTRIBUTE).expect("attribute");
        for path in ["", "a", "a/b", "a/b/file"] {
            assert_eq!(of(&inside.join(path)).as_deref(), Some(label.as_bytes()), "{path}");
        }
        assert_ne!(of(&outside).as_deref(), Some(label.as_bytes()));
    }
}
