//! Disk usage of a directory tree.

use std::io;
use std::ops::ControlFlow;
use std::path::Path;

use rustix::fs::{FileType, statvfs};

use crate::walk::walk_while;

/// The number of parts that make one whole file. Each name of a file counts an equal share of them.
const PARTS_PER_FILE: u128 = 1 << 60;

/// Disk usage of a directory tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Allocated bytes.
    pub bytes: u64,
    /// Files and directories, without the directory itself.
    pub inodes: u64,
}

/// Bytes and inodes below a directory. A file with several names counts once: each name counts an equal part of the
/// file. So the walk keeps no inode numbers in memory, of which there may be millions. If some names of a file are
/// outside the directory, their parts are not counted.
///
/// If a process moves directories so that the walk does not end, or nests them too deeply, the directory counts at least
/// all used bytes of its file system.
///
/// The walk ends when `goes_on` returns false. Then the result is `None`.
///
/// # Errors
/// See [`walk`](crate::walk()), except EAGAIN.
pub fn usage_while(dir: &Path, mut goes_on: impl FnMut() -> bool) -> io::Result<Option<Usage>> {
    let (mut bytes, mut inodes, mut is_complete) = (0, 0, true);
    let walked = walk_while(dir, |found| {
        is_complete = goes_on();
        if !is_complete {
            return ControlFlow::Break(());
        }
        let stat = found.stat;
        // The link count of a directory grows with its subdirectories; it still has only one name.
        let is_directory = FileType::from_raw_mode(stat.st_mode) == FileType::Directory;
        let names = if is_directory { 1 } else { u128::from(stat.st_nlink).max(1) };
        let part = PARTS_PER_FILE / names;
        inodes += part;
        bytes += u128::try_from(stat.st_blocks).unwrap_or_default() * 512 * part;
        ControlFlow::Continue(())
    });
    if !is_complete {
        return Ok(None);
    }
    completed(walked, dir, Usage { bytes: whole_units(bytes), inodes: whole_units(inodes) }).map(Some)
}

/// The usage after a walk that counted `known`. If the walk ended with EAGAIN, the result has at least all used bytes of
/// the file system. Otherwise a process could hide its files behind directories that the walk finds again and again:
/// some file systems store directories without blocks.
fn completed(walked: io::Result<()>, dir: &Path, known: Usage) -> io::Result<Usage> {
    match walked {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
            let system = statvfs(dir)?;
            let used = system.f_blocks.saturating_sub(system.f_bfree).saturating_mul(system.f_frsize);
            Ok(Usage { bytes: known.bytes.max(used), ..known })
        }
        walked => walked.map(|()| known),
    }
}

/// Converts parts to whole units, rounded to the nearest. `PARTS_PER_FILE / names` rounds down. So the parts of one
/// file may add up to slightly less than [`PARTS_PER_FILE`].
fn whole_units(parts: u128) -> u64 {
    u64::try_from((parts + PARTS_PER_FILE / 2) / PARTS_PER_FILE).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    fn usage(dir: &Path) -> io::Result<Usage> {
        usage_while(dir, || true).map(|usage| usage.expect("complete"))
    }

    #[test]
    fn a_count_ends_where_its_caller_ends_it() {
        let dir = tempfile::tempdir().expect("directory");
        for file in ["a", "b", "c"] {
            std::fs::write(dir.path().join(file), "file").expect("write");
        }
        let mut left = 2;
        let goes_on = || {
            left -= 1;
            left > 0
        };
        assert_eq!(usage_while(dir.path(), goes_on).expect("the end is not an error"), None);
        assert_eq!(left, 0);
    }

    #[test]
    fn a_file_with_several_names_counts_once() {
        let dir = tempfile::tempdir().expect("directory");
        for (file, names) in [("a", 1), ("b", 3), ("c", 7), ("d", 1001)] {
            std::fs::write(dir.path().join(file), vec![1; 10_000]).expect("write");
            for name in 1..names {
                let name = dir.path().join(format!("{file}{name}"));
                std::fs::hard_link(dir.path().join(file), name).expect("link");
            }
        }
        let one = std::os::unix::fs::MetadataExt::blocks(&dir.path().join("a").metadata().expect("there"));
        assert_eq!(usage(dir.path()).expect("usage"), Usage { bytes: 4 * 512 * one, inodes: 4 });
    }

    #[test]
    fn a_directory_that_cannot_be_measured_counts_all_of_its_file_system() {
        let dir = crate::scratch::in_memory();
        std::fs::write(dir.path().join("file"), vec![1; 1 << 20]).expect("write");
        let after = |error: Errno, known| completed(Err(error.into()), dir.path(), known);
        let small = Usage { bytes: 4096, inodes: 7 };
        let Usage { bytes, inodes } = after(Errno::AGAIN, small).expect("usage");
        assert!(bytes >= 1 << 20 && inodes == 7, "{bytes} bytes, {inodes} inodes");
        let large = Usage { bytes: u64::MAX, ..small };
        assert_eq!(after(Errno::AGAIN, large).expect("usage"), large);
        assert!(after(Errno::MFILE, small).is_err());
        assert_eq!(completed(Ok(()), dir.path(), small).expect("usage"), small);
    }

    #[test]
    fn a_link_counts_as_itself_and_is_not_followed() {
        let (dir, other) = (tempfile::tempdir().expect("directory"), tempfile::tempdir().expect("directory"));
        std::fs::write(other.path().join("large"), vec![1; 1 << 20]).expect("write");
        std::os::unix::fs::symlink(other.path(), dir.path().join("out")).expect("link");
        let Usage { bytes, inodes } = usage(dir.path()).expect("usage");
        assert!(bytes < 1 << 16 && inodes == 1, "{bytes} bytes, {inodes} inodes");
    }

    #[test]
    fn trees_deeper_than_the_longest_path_count() {
        let dir = tempfile::tempdir().expect("directory");
        let (down, next) = (dir.path().join("down"), dir.path().join("next"));
        std::fs::create_dir(&down).expect("make");
        std::fs::write(down.join("file"), vec![1; 100_000]).expect("write");
        for _ in 0..30 {
            std::fs::create_dir(&next).expect("make");
            std::fs::rename(&down, next.join("d".repeat(200))).expect("rename");
            std::fs::rename(&next, &down).expect("rename");
        }
        let Usage { bytes, inodes } = usage(dir.path()).expect("usage");
        assert_eq!(inodes, 32);
        assert!(bytes >= 100_000, "{bytes}");
    }
}
