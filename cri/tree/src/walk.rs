//! Walking a tree that changes meanwhile.

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

/// The first levels stay open. Of those below only the last one is: the others are found again by its `..`.
const OPEN: usize = 64;

/// A directory on the way down. A closed one takes 40 bytes, far less than the kernel spends on it.
enum Level {
    Open(Box<Dir>, i64),
    Closed { device: u64, inode: u64, offset: i64 },
}

/// Something that was found.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// The directory that it is in.
    pub dir: BorrowedFd<'a>,
    /// What it is called there.
    pub name: &'a CStr,
    /// What it was when it was looked at.
    pub stat: &'a Stat,
    /// How many directories below the walk's it is in. The directories on the way to it were told of before it, and
    /// nothing that is outside of them in between.
    pub depth: usize,
}

/// Tells of everything below a directory, in no order. Links are not followed, and mounts not entered or told of. Who
/// moves directories that are more than 64 levels deep during the walk hides what is in them, and nothing else.
///
/// # Errors
/// When the directory cannot be opened, or one below it for want of descriptors.
pub fn walk(top: &Path, mut found: impl FnMut(Found<'_>)) -> io::Result<()> {
    let mut levels = vec![Level::open(openat(CWD, top, DIRECTORY, Mode::empty())?, 0)?];
    loop {
        let depth = levels.len().saturating_sub(1);
        let Some(Level::Open(dir, offset)) = levels.last_mut() else { return Ok(()) };
        match dir.read() {
            Some(Ok(entry)) => {
                *offset = entry.offset();
                if let Some(below) = look(dir, &entry, depth, &mut found)? {
                    go_down(&mut levels, below)?;
                }
            }
            // One that cannot be read any more is as good as one at its end.
            Some(Err(_)) | None => go_up(&mut levels)?,
        }
    }
}

/// Tells of an entry, and opens it if it is a directory.
fn look(
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
    if levels.len() > OPEN
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
            // Somebody moved it: on from where we are sure to be.
            None => levels.truncate(OPEN),
        }
    }
    Ok(())
}

/// The directory above, if it still is the one that we came from.
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
    use crate::scratch::{deep, frugally, in_memory};

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
        // The way back leads through these, which lie on both sides of what stays open.
        for level in [1, OPEN - 1, OPEN, OPEN + 1, 300] {
            let at =
                top.join(["down"; 300].join("/")).ancestors().nth(300 - level).expect("level").to_owned();
            for number in 0..100 {
                fs::create_dir_all(at.join(format!("{number}/below"))).expect("make");
            }
        }
        frugally(|| assert_eq!(inodes(&top).len(), 25_000 + 5 * 200));
        crate::remove(&top).expect("remove");
    }

    #[test]
    fn how_deep_something_is_leads_to_its_path() {
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
    fn what_links_lead_to_is_not_found() {
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
