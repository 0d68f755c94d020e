//! What is too large for a packet.

use std::io::Write as _;
use std::os::fd::OwnedFd;

use nix::sys::memfd::{MFdFlags, memfd_create};

/// A file in memory, with this content.
pub(super) fn holding(content: &[u8]) -> std::io::Result<OwnedFd> {
    let memory = memfd_create(c"packet", MFdFlags::MFD_CLOEXEC)?;
    let mut file = std::fs::File::from(memory);
    file.write_all(content)?;
    Ok(file.into())
}
