//! Reads, removes and walks files and directory trees of untrusted processes.
//!
//! A process without privileges can nest directories as deep as there are inodes, by renaming them into each
//! other. But a thread has a stack of 2 MiB, a process has about a thousand descriptors, and a path has at
//! most 4095 bytes. So no function here recurses, holds a descriptor per level, builds a complete path,
//! follows a link or enters a mount.
//! Start with [`remove()`].

pub mod cgroup;
pub mod mountinfo;
mod read;
mod remove;
mod renames;
#[cfg(test)]
mod scratch;
mod usage;
mod walk;

use rustix::fs::OFlags;

pub use read::{is_refusal, read, read_end, read_lossy};
pub use remove::{remove, remove_at, remove_file};
pub use renames::open_despite_renames;
pub use usage::{Usage, usage_while};
pub use walk::{Found, walk, walk_all, walk_all_while, walk_while};

/// Flags for opening directories.
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
