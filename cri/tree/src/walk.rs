//! Walks a tree that may change meanwhile.

use std::ffi::CStr;
use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, DirEntry, FileType, Mode, ResolveFlags, SeekFrom, Stat, fstat, openat, openat2, seek,
    statat,
};
use rustix::io::Errno;

use crate::DIRECTORY;

/// Number of levels that stay open. Of deeper levels only the last one is open; the others are reopened
/// through its `..`.
const OPEN_LEVELS: usize = 64;

/// A directory on the current path. A closed one takes 40 bytes, far less than the kernel uses for it.
enum Level {
    Open(Box<Dir>, i64),
    Closed { device: u64, inode: u64, offset: i64 },
}

/// An entry found by the walk.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// The directory of the entry.
    pub dir: BorrowedFd<'a>,
    /// The entry's name.
    pub name: &'a CStr,
    /// Its metadata when it was found.
    pub stat: &'a Stat,
    /// Depth of its directory below the top. All parent directories are reported before it, without other
    /// entries in between.
    pub depth: usize,
}

/// Reports every entry below a directory, in any order. Links are not followed; mounts are neither entered
/// nor reported. A process that moves directories at depths above 64 during the walk can hide their contents,
/// but nothing else.
///
/// # Errors
/// If the directory cannot be opened, or there are too few descriptors for one below it.
pub fn walk(top: &Path, mut found: impl FnMut(Found<'_>)) -> io::Result<()> {
    let mut levels = vec![Level::open(openat(CWD, top, DIRECTORY, Mode::empty())?, 0)?];
    loop {
        let depth = levels.len().saturating_sub(1);
        let Some(Level::Open(dir, offset)) = levels.last_mut() else { return Ok(()) };
        match dir.read() {
            Some(Ok(entry)) => {
                *offset = entry.offset();
                if let Some(below) = report(dir, &entry, depth, &mut found)? {
                    go_down(&mut levels, below)?;
                }
            }
            // An unreadable directory counts as ended.
            Some(Err(_)) | None => go_up(&mut levels)?,
        }
    }
}

/// Reports an entry, and opens it if it is a directory.
fn report(
    dir: &Dir,
    entry: &DirEntry,
    depth: usize,
    found: &mut impl FnMut(Found<'_>),
) -> Result<Option<OwnedFd>, Errno> {
    let name = entry.file_name();
    if name == c"." || name == c".." {
        return Ok(None);
    }
    let at = dir.fd()?;
    let Ok(stat) = statat(at, name, AtFlags::SYMLINK_NOFOLLOW) else { return Ok(None) };
    let opened = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => openat2(at, name, DIRECTORY, Mode::empty(), ResolveFlags::NO_XDEV),
        _ => Err(Errno::NOTDIR),
    };
    match opened {
        Err(error @ (Errno::MFILE | Errno::NFILE)) => return Err(error),
        Err(Errno::XDEV) => return Ok(None),
        _ => found(Found { dir: at, name, stat: &stat, depth }),
    }
    Ok(opened.ok())
}

fn go_down(levels: &mut Vec<Level>, below: OwnedFd) -> Result<(), Errno> {
    if levels.len() > OPEN_LEVELS
        && let Some(last) = levels.last_mut()
    {
        last.close()?;
    }
    levels.push(Level::open(below, 0)?);
    Ok(())
}

fn go_up(levels: &mut Vec<Level>) -> Result<(), Errno> {
    let left = levels.pop();
    let (Some(Level::Open(below, _)), Some(last)) = (left, levels.last_mut()) else { return Ok(()) };
    if let Level::Closed { device, inode, offset } = *last {
        match reopen(&below, (device, inode), offset)? {
            Some(level) => *last = level,
            // It was moved. Continue at the deepest level that is still open.
            None => levels.truncate(OPEN_LEVELS),
        }
    }
    Ok(())
}

/// Opens the parent directory, if it is still the same one.
fn reopen(below: &Dir, known: (u64, u64), offset: i64) -> Result<Option<Level>, Errno> {
    let above = match openat(below.fd()?, "..", DIRECTORY, Mode::empty()) {
        Err(error @ (Errno::MFILE | Errno::NFILE)) => return Err(error),
        Err(_) => return Ok(None),
        Ok(above) => above,
    };
    let stat = fstat(&above)?;
    let (Ok(place), true) = (u64::try_from(offset), (stat.st_dev, stat.st_ino) == known) else {
        return Ok(None);
    };
    seek(&above, SeekFrom::Start(place))?;
    Level::open(above, offset).map(Some)
}

// === impl Level ===

impl Level {
    fn open(fd: OwnedFd, offset: i64) -> Result<Level, Errno> {
        Ok(Level::Open(Box::new(Dir::new(fd)?), offset))
    }

    fn close(&mut self) -> Result<(), Errno> {
        if let Level::Open(dir, offset) = self {
            let stat = dir.stat()?;
            *self = Level::Closed { device: stat.st_dev, inode: stat.st_ino, offset: *offset };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::scratch::{deep, in_memory, with_few_resources};

    fn inodes(top: &Path) -> HashSet<u64> {
        let (mut seen, mut times) = (HashSet::new(), 0);
        let found = |found: Found<'_>| {
            seen.insert(found.stat.st_ino);
            times += 1;
        };
        walk(top, found).expect("walk");
        assert_eq!(seen.len(), times, "nothing twice");
        seen
    }

    #[test]
    fn all_of_a_tree_is_found_however_deep() {
        let place = in_memory();
        let top = place.path().join("top");
        deep(&top, 25_000);
        // The walk returns through these, on both sides of the limit of open levels.
        for level in [1, OPEN_LEVELS - 1, OPEN_LEVELS, OPEN_LEVELS + 1, 300] {
            let at =
                top.join(["down"; 300].join("/")).ancestors().nth(300 - level).expect("level").to_owned();
            for number in 0..100 {
                fs::create_dir_all(at.join(format!("{number}/below"))).expect("make");
            }
        }
        with_few_resources(|| assert_eq!(inodes(&top).len(), 25_000 + 5 * 200));
        crate::remove(&top).expect("remove");
    }

    #[test]
    fn the_depth_of_entries_gives_their_paths() {
        let place = tempfile::tempdir().expect("directory");
        for path in ["a/b/c", "a/d", "e/f/g/h"] {
            fs::create_dir_all(place.path().join(path)).expect("make");
            fs::write(place.path().join(path).join("file"), path).expect("write");
        }
        let (mut names, mut files) = (Vec::new(), HashSet::new());
        let found = |found: Found<'_>| {
            names.truncate(found.depth);
            names.push(found.name.to_str().expect("text").to_owned());
            if found.name == c"file" {
                files.insert(names.join("/"));
            }
        };
        walk(place.path(), found).expect("walk");
        assert_eq!(files, ["a/b/c/file", "a/d/file", "e/f/g/h/file"].map(str::to_owned).into());
    }

    #[test]
    fn targets_of_links_are_not_reported() {
        let place = tempfile::tempdir().expect("directory");
        let (top, outside) = (place.path().join("top"), place.path().join("outside"));
        fs::create_dir(&top).expect("make");
        fs::create_dir(&outside).expect("make");
        fs::write(outside.join("file"), "file").expect("write");
        symlink(&outside, top.join("link")).expect("link");
        assert_eq!(inodes(&top).len(), 1);
        assert!(walk(&top.join("link"), |_| {}).is_err());
    }
}
