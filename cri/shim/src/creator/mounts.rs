//! The mounts of a container's spec, in its root file system.
//!
//! All steps use descriptors. A mount point is resolved inside the container's root and opened once, and the mount is
//! attached to that descriptor. So no symbolic link of an image or a shared volume can redirect a mount. The container
//! library parses the mount options.

use std::ffi::{CString, c_ulong};
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::Mount;
use libcontainer::rootfs::utils::{MountOptionConfig, is_bind, parse_mount};
use nix::sys::statfs::{FsType, PROC_SUPER_MAGIC, fstatfs, statfs};

use super::place::{self, Kind};
use crate::kernel::{self, Attributes, Depth};
use crate::selinux;

/// Files of /proc that a mount may cover, so that tools such as lxcfs can show a container its own limits. Other mounts
/// in /proc could show wrong data to programs that trust /proc. The list is the same as in runc.
const MAY_COVER: [&str; 10] = [
    "/proc/cpuinfo",
    "/proc/diskstats",
    "/proc/meminfo",
    "/proc/stat",
    "/proc/swaps",
    "/proc/uptime",
    "/proc/loadavg",
    "/proc/slabinfo",
    "/proc/sys/kernel/ns_last_pid",
    "/proc/sys/crypto/fips_enabled",
];

/// Pairs of a mount(2) flag and the equivalent mount_setattr(2) attribute.
const ATTRIBUTES: [(c_ulong, u64); 5] = [
    (libc::MS_RDONLY, libc::MOUNT_ATTR_RDONLY),
    (libc::MS_NOSUID, libc::MOUNT_ATTR_NOSUID),
    (libc::MS_NODEV, libc::MOUNT_ATTR_NODEV),
    (libc::MS_NOEXEC, libc::MOUNT_ATTR_NOEXEC),
    (libc::MS_NODIRATIME, libc::MOUNT_ATTR_NODIRATIME),
];

/// Modes of access time updates. They exclude each other: a mount has exactly one of them.
const TIMES: [(c_ulong, u64); 3] = [
    (libc::MS_STRICTATIME, libc::MOUNT_ATTR_STRICTATIME),
    (libc::MS_NOATIME, libc::MOUNT_ATTR_NOATIME),
    (libc::MS_RELATIME, libc::MOUNT_ATTR_RELATIME),
];

#[derive(Debug, thiserror::Error)]
pub(super) enum MountError {
    #[error("cannot parse the options of the mount at {}: {why}", .at.display())]
    Options { at: PathBuf, why: String },
    #[error("the mount at {} has no source", .0.display())]
    NoSource(PathBuf),
    #[error("cannot mount at {}: only a proc file system may be mounted in /proc", .0.display())]
    InProc(PathBuf),
    #[error("cannot open {} to mount it at {}", .what.display(), .at.display())]
    Source { what: PathBuf, at: PathBuf, source: io::Error },
    #[error("cannot make the mount point {}", .at.display())]
    Place { at: PathBuf, source: io::Error },
    #[error("cannot make a file system of type {kind:?} for {}", .at.display())]
    Create { kind: String, at: PathBuf, source: io::Error },
    #[error("cannot set the attributes of the mount at {}", .at.display())]
    Attributes { at: PathBuf, source: io::Error },
    #[error("cannot mount at {}", .at.display())]
    Attach { at: PathBuf, source: io::Error },
}

/// Mounts one entry of a spec. `label` is the SELinux label of its files.
pub(super) fn mount(root: BorrowedFd<'_>, entry: &Mount, label: Option<&str>) -> Result<(), MountError> {
    let at = entry.destination();
    let why = |error: &dyn std::error::Error| MountError::Options { at: at.clone(), why: error.to_string() };
    let options = parse_mount(entry).map_err(|error| why(&error))?;
    let (tree, kind) =
        if is_bind(entry) { bind(entry)? } else { (create(entry, &options, label)?, Kind::Directory) };
    let failed = |source| MountError::Attributes { at: at.clone(), source };
    let attributes = attributes(options.flags.bits(), at);
    if attributes != Attributes::default() {
        kernel::set_attributes(&tree, attributes, Depth::One).map_err(failed)?;
    }
    if let Some(deep) = &options.rec_attr {
        let deep = Attributes { set: deep.attr_set, clear: deep.attr_clr };
        kernel::set_attributes(&tree, deep, Depth::All).map_err(failed)?;
    }
    let place = open_mount_point(root, entry, kind)?;
    kernel::attach_mount_at(&tree, place).map_err(|source| MountError::Attach { at: at.clone(), source })
}

fn attributes(flags: c_ulong, at: &Path) -> Attributes {
    let mut attributes = Attributes::default();
    for (_, attribute) in ATTRIBUTES.iter().filter(|(flag, _)| flags & flag != 0) {
        attributes.set |= attribute;
    }
    if at == Path::new("/dev") {
        // /dev stays writable here, because device nodes and links are made in it later.
        attributes.set &= !libc::MOUNT_ATTR_RDONLY;
    }
    if let Some((_, times)) = TIMES.iter().find(|(flag, _)| flags & flag != 0) {
        attributes.set |= times;
        attributes.clear |= libc::MOUNT_ATTR__ATIME;
    }
    attributes
}

fn bind(entry: &Mount) -> Result<(OwnedFd, Kind), MountError> {
    let at = entry.destination();
    let what = entry.source().as_ref().ok_or_else(|| MountError::NoSource(at.clone()))?;
    let failed = |source| MountError::Source { what: what.clone(), at: at.clone(), source };
    let recursive = entry.options().iter().flatten().any(|option| option == "rbind");
    let tree =
        if recursive { kernel::copy_mounts(what) } else { kernel::copy_one_mount(what) }.map_err(failed)?;
    let mode = nix::sys::stat::fstat(&tree).map_err(|errno| failed(errno.into()))?.st_mode;
    let kind = if mode & libc::S_IFMT == libc::S_IFDIR { Kind::Directory } else { Kind::File };
    Ok((tree, kind))
}

fn create(entry: &Mount, options: &MountOptionConfig, label: Option<&str>) -> Result<OwnedFd, MountError> {
    // On v1 `cgroup_mount` has already replaced a `cgroup` entry. So a `cgroup` entry that is left is a mount of v2.
    let kind = match entry.typ().as_deref().unwrap_or_default() {
        "cgroup" => "cgroup2",
        kind => kind,
    };
    let source = entry.source().as_deref().unwrap_or(Path::new("none"));
    let make = || -> io::Result<OwnedFd> {
        let fs = kernel::fs_open(&CString::new(kind)?)?;
        kernel::fs_set(&fs, c"source", source)?;
        for option in options.data.iter().filter(|option| !option.is_empty()) {
            match option.split_once('=') {
                Some((key, value)) => kernel::fs_set(&fs, &CString::new(key)?, Path::new(value))?,
                None => kernel::fs_set_flag(&fs, &CString::new(option.as_str())?)?,
            }
        }
        kernel::fs_label(&fs, selinux::context_of(kind, label))?;
        kernel::fs_create(&fs)?;
        let tree = kernel::fs_mount(&fs, false)?;
        // The mqueue file system belongs to the pod's ipc namespace and already exists, so its root gets the label, as
        // in runc.
        if let Some(label) = label.filter(|_| kind == "mqueue") {
            selinux::label_root(&tree, label)?;
        }
        Ok(tree)
    };
    make().map_err(|source| MountError::Create {
        kind: kind.to_owned(),
        at: entry.destination().clone(),
        source,
    })
}

/// Opens the mount point. proc, sysfs and the file system of /dev are mounted at exactly their path. Symbolic links of
/// the image are not followed.
fn open_mount_point(root: BorrowedFd<'_>, entry: &Mount, kind: Kind) -> Result<OwnedFd, MountError> {
    let at = entry.destination();
    let failed = |source| MountError::Place { at: at.clone(), source };
    let place = place::make(root, at, kind).map_err(failed)?;
    let is_of_dev = at == Path::new("/dev") && !is_bind(entry);
    if is_of_dev || matches!(entry.typ().as_deref(), Some("proc" | "sysfs")) {
        let flags = libc::O_PATH | libc::O_DIRECTORY | libc::O_NOFOLLOW;
        return kernel::open_plain_in_root(root, at, flags).map_err(failed);
    }
    let covers = at == Path::new("/proc") || fstatfs(&place).is_ok_and(|at| is_proc(at.filesystem_type()));
    if covers && !may_cover(at) && !is_bind_of_proc(entry) {
        return Err(MountError::InProc(at.clone()));
    }
    Ok(place)
}

fn may_cover(at: &Path) -> bool {
    MAY_COVER.iter().any(|file| at == Path::new(file))
}

/// Whether the entry binds a proc file system at /proc. Such a bind mount is allowed.
fn is_bind_of_proc(entry: &Mount) -> bool {
    let source = entry.source().as_deref().filter(|_| is_bind(entry));
    entry.destination() == Path::new("/proc")
        && source.is_some_and(|source| statfs(source).is_ok_and(|found| is_proc(found.filesystem_type())))
}

fn is_proc(kind: FsType) -> bool {
    kind == PROC_SUPER_MAGIC
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsFd as _, AsRawFd as _};

    fn entry(json: serde_json::Value) -> Mount {
        serde_json::from_value(json).unwrap()
    }

    #[test]
    fn options_become_attributes_and_dev_stays_writable() {
        let entry = entry(serde_json::json!({
            "destination": "/x", "type": "tmpfs", "source": "tmpfs",
            "options": ["nosuid", "noexec", "nodev", "strictatime", "ro", "mode=755"],
        }));
        let options = parse_mount(&entry).unwrap();
        assert_eq!(options.data, ["mode=755"]);
        let all = libc::MOUNT_ATTR_NOSUID | libc::MOUNT_ATTR_NOEXEC | libc::MOUNT_ATTR_NODEV;
        let set = all | libc::MOUNT_ATTR_STRICTATIME;
        let clear = libc::MOUNT_ATTR__ATIME;
        let found = |at: &str| attributes(options.flags.bits(), Path::new(at));
        assert_eq!(found("/x"), Attributes { set: set | libc::MOUNT_ATTR_RDONLY, clear });
        assert_eq!(found("/dev"), Attributes { set, clear });
    }

    /// CVE-2026-41579: device nodes and links were made in the target of a link at /dev.
    #[test]
    fn cve_2026_41579_dev_is_mounted_at_its_path_only() {
        let base = std::env::temp_dir().join(format!("coracle-dev-{}", std::process::id()));
        let (linked, plain) = (base.join("linked"), base.join("plain"));
        std::fs::create_dir_all(linked.join("volume")).unwrap();
        std::fs::create_dir_all(plain.join("dev")).unwrap();
        std::os::unix::fs::symlink("/volume", linked.join("dev")).unwrap();
        let open = |root: &Path, json: serde_json::Value| {
            let root = std::fs::File::open(root).unwrap();
            open_mount_point(root.as_fd(), &entry(json), Kind::Directory)
        };
        let tmpfs = serde_json::json!({ "destination": "/dev", "type": "tmpfs", "source": "tmpfs" });
        let volume = serde_json::json!({
            "destination": "/dev", "type": "bind", "source": "/dev", "options": ["rbind"],
        });
        assert!(matches!(open(&linked, tmpfs.clone()), Err(MountError::Place { .. })));
        assert!(open(&plain, tmpfs).is_ok() && open(&linked, volume).is_ok());
        std::fs::remove_dir_all(&base).unwrap();
    }

    /// CVE-2026-115521: `/proc/self/fd` redirected a mount to another mount.
    #[test]
    fn cve_2026_115521_a_descriptor_is_no_mount_point() {
        let base = std::env::temp_dir().join(format!("coracle-descriptor-{}", std::process::id()));
        std::fs::create_dir_all(base.join("plain")).unwrap();
        let other = std::fs::File::open(&base).unwrap();
        let descriptor = PathBuf::from(format!("/proc/self/fd/{}", other.as_raw_fd()));
        std::os::unix::fs::symlink(&descriptor, base.join("link")).unwrap();
        let root = std::fs::File::open("/").unwrap();
        let open = |destination: &Path| {
            let json = serde_json::json!({
                "destination": destination, "type": "bind", "source": "/etc", "options": ["rbind", "ro"],
            });
            open_mount_point(root.as_fd(), &entry(json), Kind::Directory)
        };
        assert!(open(&base.join("plain")).is_ok());
        for place in [descriptor, base.join("link"), base.join("link/plain")] {
            assert!(matches!(open(&place), Err(MountError::Place { .. })), "{}", place.display());
        }
        std::fs::remove_dir_all(&base).unwrap();
    }

    #[test]
    fn only_proc_may_cover_proc() {
        let root = std::fs::File::open("/").unwrap();
        let refused = |destination: &str, source: &str| {
            let json = serde_json::json!({
                "destination": destination, "type": "bind", "source": source, "options": ["rbind"],
            });
            matches!(open_mount_point(root.as_fd(), &entry(json), Kind::File), Err(MountError::InProc(_)))
        };
        assert!(refused("/proc/self/environ", "/etc/hostname"));
        assert!(refused("/proc", "/etc"));
        assert!(!refused("/proc", "/proc"));
        assert!(!refused("/proc/meminfo", "/etc/hostname"));
        assert!(!refused("/etc/hostname", "/etc/hostname"));
    }
}
