//! Files and directory trees of other parties: reading, removing and walking them.
//!
//! A process without any privilege nests directories as deep as there are inodes, by renaming them into one another,
//! while a thread has a stack of 2 MiB and a process some thousand descriptors, and no path may have more than 4095
//! bytes. Nothing here recurses, holds a descriptor per level, writes out a path, follows a link or enters a mount.
//! Start with [`remove()`].

mod read;
mod remove;
#[cfg(test)]
mod scratch;
mod usage;
mod walk;

use rustix::fs::OFlags;

pub use read::{read, read_end};
pub use remove::{remove, remove_at};
pub use usage::usage;
pub use walk::{Found, walk};

/// How directories are opened.
const DIRECTORY: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
