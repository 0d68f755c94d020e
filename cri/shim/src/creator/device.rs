//! Device nodes for a pod with a user namespace. Root of that namespace cannot make device nodes, so the shim makes
//! them and binds them into the container.

use std::path::Path;

use libcontainer::oci_spec::runtime::{LinuxDevice, LinuxDeviceType, Mount};
use nix::sys::stat::{Mode, SFlag, makedev, mknod};
use nix::unistd::{Gid, Uid, chown};

use crate::user_namespace::{Mapping, Owner};

/// Makes the device node. Its owner is the uid and gid of the spec, mapped to the ids of the machine.
pub(super) fn make(path: &Path, device: &LinuxDevice, mapping: &Mapping) -> nix::Result<()> {
    let kind = match device.typ() {
        LinuxDeviceType::B => SFlag::S_IFBLK,
        LinuxDeviceType::P => SFlag::S_IFIFO,
        _ => SFlag::S_IFCHR,
    };
    let number = |number: i64| u64::try_from(number).unwrap_or_default();
    let numbers = makedev(number(device.major()), number(device.minor()));
    let mode = Mode::from_bits_truncate(device.file_mode().unwrap_or(0o666));
    mknod(path, kind, mode, numbers)?;
    // mknod(2) applies the umask, so the mode is set explicitly.
    nix::sys::stat::fchmodat(nix::fcntl::AT_FDCWD, path, mode, nix::sys::stat::FchmodatFlags::FollowSymlink)?;
    let Owner { uid, gid } = mapping.host_ids(device.uid().unwrap_or(0), device.gid().unwrap_or(0));
    chown(path, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
}

pub(super) fn bind(source: &Path, inside: &Path) -> Mount {
    let mut mount = Mount::default();
    mount.set_destination(inside.to_owned());
    mount.set_typ(Some("bind".to_owned()));
    mount.set_source(Some(source.to_owned()));
    mount.set_options(Some(vec!["bind".to_owned(), "rprivate".to_owned()]));
    mount
}
