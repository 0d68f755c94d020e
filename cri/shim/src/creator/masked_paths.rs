//! Masked and read-only paths of a container.

use std::io::{self, ErrorKind};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use libcontainer::oci_spec::runtime::Spec;
use nix::sys::stat::fstat;

use crate::kernel::{self, Depth, READ_ONLY, READ_ONLY_DATA};
use crate::null;
use crate::selinux;

#[derive(Debug, thiserror::Error)]
pub(super) enum MaskError {
    #[error("cannot mask {}", .path.display())]
    Mask { path: PathBuf, source: io::Error },
    #[error("cannot make {} read-only", .path.display())]
    ReadOnly { path: PathBuf, source: io::Error },
}

/// Covers the spec's masked paths and makes its read-only paths read-only. Absent paths are skipped.
pub(super) fn apply(root: BorrowedFd<'_>, spec: &Spec) -> Result<(), MaskError> {
    let Some(linux) = spec.linux() else { return Ok(()) };
    for path in linux.readonly_paths().iter().flatten().map(Path::new) {
        let failed = |source| MaskError::ReadOnly { path: path.to_owned(), source };
        if let Some(place) = find(root, path).map_err(failed)? {
            protect(&place).map_err(failed)?;
        }
    }
    let label = selinux::mount_label(spec);
    let mut empty = None;
    for path in linux.masked_paths().iter().flatten().map(Path::new) {
        let failed = |source| MaskError::Mask { path: path.to_owned(), source };
        let Some(place) = find(root, path).map_err(failed)? else { continue };
        let mode = fstat(&place).map_err(|errno| failed(errno.into()))?.st_mode;
        let covered = match (mode & libc::S_IFMT == libc::S_IFDIR, &empty) {
            (false, _) => null::mount().and_then(|null| kernel::attach_mount_at(&null, place)),
            // Before Linux 6.15 only an attached mount can be copied.
            (true, Some(first)) => kernel::copy_mount_at(first, Depth::One)
                .and_then(|copy| kernel::attach_mount_at(&copy, place)),
            (true, None) => {
                let first = empty.insert(empty_directory(label).map_err(failed)?);
                kernel::attach_mount_at(first, place)
            }
        };
        covered.map_err(failed)?;
    }
    Ok(())
}

fn find(root: BorrowedFd<'_>, path: &Path) -> io::Result<Option<OwnedFd>> {
    match kernel::open_in_root(root, path, libc::O_PATH) {
        Ok(found) => Ok(Some(found)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
        Err(error) => Err(error),
    }
}

fn protect(place: &OwnedFd) -> io::Result<()> {
    let copy = kernel::copy_mount_at(place, Depth::All)?;
    kernel::set_attributes(&copy, READ_ONLY_DATA, Depth::One)?;
    kernel::attach_mount_at(&copy, place)
}

fn empty_directory(label: Option<&str>) -> io::Result<OwnedFd> {
    let fs = kernel::fs_open(c"tmpfs")?;
    kernel::fs_set(&fs, c"source", Path::new("tmpfs"))?;
    kernel::fs_set(&fs, c"nr_blocks", Path::new("1"))?;
    kernel::fs_set(&fs, c"nr_inodes", Path::new("1"))?;
    kernel::fs_label(&fs, label)?;
    kernel::fs_create(&fs)?;
    let mount = kernel::fs_mount(&fs, false)?;
    kernel::set_attributes(&mount, READ_ONLY, Depth::One)?;
    Ok(mount)
}
