//! Files for shims: memory files for large messages, and private files on disk.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::sys::memfd::{MFdFlags, memfd_create};

/// A memory file with this content.
pub(super) fn memory_file(content: &[u8]) -> std::io::Result<OwnedFd> {
    let memory = memfd_create(c"packet", MFdFlags::MFD_CLOEXEC)?;
    let mut file = std::fs::File::from(memory);
    file.write_all(content)?;
    Ok(file.into())
}

/// Writes a file that only root can read: records and specs contain environment variables, which can be secrets.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(path)?;
    file.write_all(bytes)
}
