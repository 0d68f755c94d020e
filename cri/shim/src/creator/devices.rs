//! The contents of a container's /dev: default device nodes, the device nodes of its spec, and links.

use std::io::{self, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::{LinuxDevice, LinuxDeviceType, Mount, Spec};
use libcontainer::rootfs::utils::{default_devices, is_bind};
use nix::fcntl::AtFlags;
use nix::sys::stat::{Mode, SFlag, fstat, makedev, mknodat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchownat, symlinkat, unlinkat};

use super::place::{self, Kind};
use crate::kernel;

/// From the OCI runtime specification, "Default Filesystems and Devices"; `/dev/core` as in runc.
const LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "fd"),
    ("/proc/self/fd/0", "stdin"),
    ("/proc/self/fd/1", "stdout"),
    ("/proc/self/fd/2", "stderr"),
    ("/proc/kcore", "core"),
];

#[derive(Debug, thiserror::Error)]
pub(super) enum DeviceError {
    #[error("cannot open /dev")]
    Open(#[source] io::Error),
    #[error("cannot make the device {}", .path.display())]
    Node { path: PathBuf, source: io::Error },
    #[error("cannot make the link /dev/{name}")]
    Link { name: &'static str, source: io::Error },
}

/// The way in which device nodes get into /dev.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Nodes {
    /// Device nodes made by mknod(2).
    Made,
    /// Bind mounts of the host's nodes, because root of a user namespace cannot make device nodes.
    Bound,
}

/// The device number (`st_dev`) of the file system that this mount has just made at /dev. `None` for a mount at another
/// path, or a bind mount.
pub(super) fn own_file_system(
    root: BorrowedFd<'_>,
    entry: &Mount,
) -> Result<Option<libc::dev_t>, DeviceError> {
    let dev = Path::new("/dev");
    if entry.destination() != dev || is_bind(entry) {
        return Ok(None);
    }
    file_system(root, dev).map_err(DeviceError::Open)
}

/// Fills /dev, unless a bind mount or a volume covers it. `own` is the device number of the container's own file system
/// at /dev. `None` if the container has no such file system.
pub(super) fn fill(
    root: BorrowedFd<'_>,
    spec: &Spec,
    nodes: Nodes,
    own: Option<libc::dev_t>,
) -> Result<(), DeviceError> {
    let mounts = spec.mounts().as_deref().unwrap_or_default();
    if is_bind_mounted(mounts) || is_volume(root, Path::new("/dev"), own).map_err(DeviceError::Open)? {
        return Ok(());
    }
    let requested = spec.linux().as_ref().and_then(|linux| linux.devices().as_deref()).unwrap_or_default();
    let mut last = None;
    for device in &merged(requested, mounts) {
        let made = match nodes {
            Nodes::Made => make(root, device, &mut last),
            Nodes::Bound => bind(root, device),
        };
        made.map_err(|source| DeviceError::Node { path: device.path().clone(), source })?;
    }
    links(root)
}

/// Whether a bind mount is at /dev. Such a mount shows a directory of the host or of a volume, which must not be
/// changed.
fn is_bind_mounted(mounts: &[Mount]) -> bool {
    mounts.iter().any(|mount| mount.destination() == Path::new("/dev") && is_bind(mount))
}

/// Whether a volume is mounted at /dev. The destination of a volume can lead to /dev through `..` or a link of the image.
/// The type of the file system is not sufficient: the host's /dev and /run are also a tmpfs.
fn is_volume(root: BorrowedFd<'_>, dev: &Path, own: Option<libc::dev_t>) -> io::Result<bool> {
    let found = file_system(root, dev)?;
    Ok(found.is_some() && found != own && found != Some(fstat(root)?.st_dev))
}

/// The device number of the file system of a directory. `None` if the directory is absent.
fn file_system(root: BorrowedFd<'_>, path: &Path) -> io::Result<Option<libc::dev_t>> {
    match kernel::open_plain_in_root(root, path, libc::O_PATH | libc::O_DIRECTORY) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        found => Ok(Some(fstat(&found?)?.st_dev)),
    }
}

/// The default devices that the spec does not override, then the devices of the spec. A mount replaces the device at
/// its path: pods mount /dev/urandom at /dev/random. Of several devices at one path, the last device is used.
fn merged(requested: &[LinuxDevice], mounts: &[Mount]) -> Vec<LinuxDevice> {
    let mut all: Vec<LinuxDevice> = Vec::new();
    for device in default_devices().iter().chain(requested) {
        all.retain(|earlier| earlier.path() != device.path());
        all.push(device.clone());
    }
    all.retain(|device| !mounts.iter().any(|mount| mount.destination() == device.path()));
    all
}

/// An open directory below the root of the container.
struct OpenDirectory {
    path: PathBuf,
    descriptor: OwnedFd,
}

/// Makes a device node. `last` has the directory of the last node, which is opened only once for all nodes in that
/// directory.
fn make(root: BorrowedFd<'_>, device: &LinuxDevice, last: &mut Option<OpenDirectory>) -> io::Result<()> {
    let name = device.path().file_name().ok_or(ErrorKind::InvalidInput)?;
    let above = device.path().parent().unwrap_or(Path::new("/"));
    let descriptor = match last.take().filter(|last| last.path == above) {
        Some(last) => last.descriptor,
        None => place::make_directories(root, above)?,
    };
    let directory = &last.insert(OpenDirectory { path: above.to_owned(), descriptor }).descriptor;
    let kind = match device.typ() {
        LinuxDeviceType::B => SFlag::S_IFBLK,
        LinuxDeviceType::P => SFlag::S_IFIFO,
        _ => SFlag::S_IFCHR,
    };
    let number = |number: i64| u64::try_from(number).map_err(io::Error::other);
    let numbers = makedev(number(device.major())?, number(device.minor())?);
    // The caller's umask is 0.
    let mode = Mode::from_bits_truncate(device.file_mode().unwrap_or(0o666));
    mknodat(directory, name, kind, mode, numbers)?;
    let (uid, gid) = (device.uid().unwrap_or(0), device.gid().unwrap_or(0));
    if (uid, gid) != (0, 0) {
        let owner = (Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)));
        fchownat(directory, name, owner.0, owner.1, AtFlags::AT_SYMLINK_NOFOLLOW)?;
    }
    Ok(())
}

fn bind(root: BorrowedFd<'_>, device: &LinuxDevice) -> io::Result<()> {
    let node = kernel::copy_one_mount(device.path())?;
    let place = place::make(root, device.path(), Kind::File)?;
    kernel::attach_mount_at(&node, place)
}

fn links(root: BorrowedFd<'_>) -> Result<(), DeviceError> {
    let failed = |name| move |source| DeviceError::Link { name, source };
    let (dev, _) = place::parent(root, Path::new("/dev/ptmx")).map_err(failed("ptmx"))?;
    for (target, name) in LINKS {
        link(&dev, target, name).map_err(failed(name))?;
    }
    // The container's own devpts replaces the image's file.
    match unlinkat(&dev, "ptmx", UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(nix::Error::ENOENT) => {}
        Err(errno) => return Err(failed("ptmx")(errno.into())),
    }
    link(&dev, "pts/ptmx", "ptmx").map_err(failed("ptmx"))
}

fn link(dev: &OwnedFd, target: &str, name: &str) -> io::Result<()> {
    match symlinkat(target, dev, name) {
        // The image already has a file of this name.
        Ok(()) | Err(nix::Error::EEXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    fn device(path: &str, minor: i64) -> LinuxDevice {
        serde_json::from_value(serde_json::json!({ "path": path, "type": "c", "major": 1, "minor": minor }))
            .unwrap()
    }

    #[test]
    fn a_device_of_the_spec_replaces_the_default_one_at_its_path() {
        let wanted = merged(&[device("/dev/null", 5), device("/dev/mine", 7)], &[]);
        let of = |path: &str| wanted.iter().filter(|d| d.path() == Path::new(path)).collect::<Vec<_>>();
        assert_eq!(of("/dev/null").len(), 1);
        assert_eq!(of("/dev/null")[0].minor(), 5);
        assert_eq!((of("/dev/mine").len(), of("/dev/zero").len(), wanted.len()), (1, 1, 7));
    }

    #[test]
    fn a_mount_and_a_later_device_replace_the_device_at_their_path() {
        let mount = |at: &str| -> Mount {
            let json =
                serde_json::json!({ "destination": at, "source": "/dev/urandom", "options": ["bind"] });
            serde_json::from_value(json).unwrap()
        };
        let mounts = [mount("/dev/random"), mount("/dev/mine")];
        let requested = [device("/dev/mine", 7), device("/dev/other", 8), device("/dev/other", 9)];
        let wanted = merged(&requested, &mounts);
        let minors = |path: &str| -> Vec<i64> {
            wanted.iter().filter(|found| found.path() == Path::new(path)).map(LinuxDevice::minor).collect()
        };
        assert_eq!((minors("/dev/random"), minors("/dev/mine")), (Vec::new(), Vec::new()));
        assert_eq!((minors("/dev/other"), minors("/dev/urandom").len()), (vec![9], 1));
    }

    #[test]
    fn a_bind_mount_at_dev_is_not_changed() {
        let at = |json| is_bind_mounted(&[serde_json::from_value::<Mount>(json).unwrap()]);
        let bound = serde_json::json!({ "destination": "/dev", "source": "/dev", "options": ["rbind"] });
        assert!(at(bound));
        assert!(!at(serde_json::json!({ "destination": "/dev", "type": "tmpfs", "source": "tmpfs" })));
    }

    #[test]
    fn a_volume_at_dev_is_recognised() {
        let root = std::fs::File::open("/").unwrap();
        let root = root.as_fd();
        let is_volume = |place: &str, own| super::is_volume(root, Path::new(place), own).unwrap();
        assert!(is_volume("/proc", None), "another file system");
        assert!(is_volume("/dev", None), "a tmpfs of the host");
        assert!(!is_volume("/", None), "the container's root");
        assert!(!is_volume("/missing", None));
        let entry = |kind: &str| -> Mount {
            let entry = serde_json::json!({"destination": "/dev", "type": kind, "source": "x"});
            serde_json::from_value(entry).unwrap()
        };
        let own = own_file_system(root, &entry("tmpfs")).unwrap();
        assert!(own.is_some() && !is_volume("/dev", own), "the container's own");
        assert_eq!(own_file_system(root, &entry("bind")).unwrap(), None);
    }
}
