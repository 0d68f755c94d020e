//! Removing a tree.
//!
//! The first levels are emptied depth first, as they lie. A directory below them is renamed to near the top instead,
//! and waits there for a later pass: with each pass the tree is as many levels less deep, and what one interrupts,
//! whoever removes the tree next finds in it.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, DirEntry, FileType, Mode, ResolveFlags, openat, openat2, renameat, unlinkat,
};
use rustix::io::Errno;

use crate::DIRECTORY;

/// Levels that are open at once, each with a descriptor and a buffer. More than what people make; what is below
/// costs a rename for each directory.
const OPEN: usize = 32;
/// Passes in which nothing was renamed: a file system may pass over entries of a directory that changes.
const IDLE_PASSES: u32 = 8;

/// The levels that are being emptied; the first is the top, and always there.
struct Removal {
    levels: Vec<Level>,
    /// Numbers the names that directories are renamed to.
    number: u64,
    /// Whether this pass has renamed a directory.
    renamed: bool,
    /// Why a directory could not be renamed, and is still where it was.
    stuck: Option<Errno>,
}

struct Level {
    dir: Dir,
    /// Its name in the level above.
    name: CString,
}

/// Removes what is at a path, with all that is below it; what is not there is removed already. A link is removed
/// itself, not what it leads to.
///
/// # Errors
/// The first thing that cannot be removed ends the removal. A mount below the path is such a thing, and stays whole.
pub fn remove(path: &Path) -> io::Result<()> {
    remove_at(CWD, path)
}

/// The same, for a path that is relative to an open directory.
///
/// # Errors
/// As for [`remove`].
pub fn remove_at(at: impl AsFd, path: &Path) -> io::Result<()> {
    match openat(&at, path, DIRECTORY, Mode::empty()) {
        Ok(top) => Ok(remove_directory(at, path, top)?),
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::NOTDIR | Errno::LOOP) => Ok(gone(unlinkat(at, path, AtFlags::empty()))?),
        Err(error) => Err(error.into()),
    }
}

fn remove_directory(at: impl AsFd, path: &Path, top: OwnedFd) -> Result<(), Errno> {
    let top = Level { dir: Dir::new(top)?, name: CString::default() };
    let mut removal = Removal { levels: vec![top], number: 0, renamed: false, stuck: None };
    let mut idle = 0;
    loop {
        removal.pass()?;
        match gone(unlinkat(&at, path, AtFlags::REMOVEDIR)) {
            Err(Errno::NOTEMPTY | Errno::EXIST) if removal.renamed || idle < IDLE_PASSES => {}
            Err(error) => return Err(removal.stuck.unwrap_or(error)),
            Ok(()) => return Ok(()),
        }
        idle += u32::from(!removal.renamed);
        removal.rewind();
    }
}

// === impl Removal ===

impl Removal {
    /// Goes through the tree once.
    fn pass(&mut self) -> Result<(), Errno> {
        while let Some(level) = self.levels.last_mut() {
            match level.dir.read() {
                Some(entry) => self.entry(&entry?)?,
                None if self.levels.len() == 1 => break,
                None => self.leave()?,
            }
        }
        Ok(())
    }

    fn rewind(&mut self) {
        self.levels.iter_mut().for_each(|level| level.dir.rewind());
        (self.renamed, self.stuck) = (false, None);
    }

    fn entry(&mut self, entry: &DirEntry) -> Result<(), Errno> {
        let name = entry.file_name();
        if name == c"." || name == c".." {
            return Ok(());
        }
        if entry.file_type() != FileType::Directory {
            match self.unlink(name) {
                // The file system does not tell, or it is another one by now.
                Err(Errno::ISDIR) => {}
                done => return done,
            }
        }
        if self.levels.len() > OPEN { self.raise(name) } else { self.enter(name) }
    }

    fn unlink(&self, name: &CStr) -> Result<(), Errno> {
        let Some(level) = self.levels.last() else { return Ok(()) };
        gone(unlinkat(level.dir.fd()?, name, AtFlags::empty()))
    }

    fn enter(&mut self, name: &CStr) -> Result<(), Errno> {
        let Some(level) = self.levels.last() else { return Ok(()) };
        match openat2(level.dir.fd()?, name, DIRECTORY, Mode::empty(), ResolveFlags::NO_XDEV) {
            Ok(fd) => self.levels.push(Level { dir: Dir::new(fd)?, name: name.to_owned() }),
            Err(Errno::NOENT) => {}
            // A link or a file took its place.
            Err(Errno::NOTDIR | Errno::LOOP) => return self.unlink(name),
            Err(Errno::MFILE | Errno::NFILE) if self.levels.len() > 1 => return self.raise(name),
            // Something is mounted on it.
            Err(Errno::XDEV) => return Err(Errno::BUSY),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Renames a directory of the last level into the first one that takes it: the top, but for a file system full of
    /// links or a subvolume of its own. One that none takes waits for a pass with more room.
    fn raise(&mut self, name: &CStr) -> Result<(), Errno> {
        let Some((last, above)) = self.levels.split_last() else { return Ok(()) };
        for level in above {
            loop {
                let to = format!(".removed-{}", self.number);
                self.number += 1;
                match renameat(last.dir.fd()?, name, level.dir.fd()?, to) {
                    Ok(()) => {
                        self.renamed = true;
                        return Ok(());
                    }
                    Err(Errno::NOENT) => return Ok(()),
                    // Somebody has a name like ours.
                    Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                    Err(error) => {
                        self.stuck = Some(error);
                        break;
                    }
                }
            }
        }
        Ok(())
    }

    /// Removes the last level, which was emptied.
    fn leave(&mut self) -> Result<(), Errno> {
        let Some(emptied) = self.levels.pop() else { return Ok(()) };
        let Some(above) = self.levels.last() else { return Ok(()) };
        match gone(unlinkat(above.dir.fd()?, &emptied.name, AtFlags::REMOVEDIR)) {
            // What is still in it is for the next pass.
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
            done => done,
        }
    }
}

/// What is gone already needs no removing.
fn gone(removed: Result<(), Errno>) -> Result<(), Errno> {
    match removed {
        Err(Errno::NOENT) => Ok(()),
        done => done,
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::scratch::{deep, frugally, in_memory};

    #[test]
    fn a_tree_deeper_than_any_stack_is_removed_with_few_descriptors() {
        let place = in_memory();
        let top = place.path().join("top");
        deep(&top, 25_000);
        frugally(|| remove(&top).expect("remove"));
        assert!(!top.exists());
    }

    #[test]
    fn wide_and_deep_trees_with_names_like_ours_are_removed() {
        let place = in_memory();
        let top = place.path().join("top");
        deep(&top, 200);
        for (number, kind) in (0..30).zip([0, 1, 2].into_iter().cycle()) {
            let taken = top.join(format!(".removed-{number}"));
            match kind {
                0 => fs::write(&taken, "file").expect("write"),
                1 => fs::create_dir(&taken).expect("make"),
                _ => fs::create_dir_all(taken.join("full")).expect("make"),
            }
        }
        let edge = top.join(["down"; OPEN].join("/"));
        for number in 0..300 {
            fs::create_dir_all(edge.join(format!("{number}/below"))).expect("make");
            fs::write(edge.join(format!("{number}/file")), "file").expect("write");
        }
        frugally(|| remove(&top).expect("remove"));
        assert!(!top.exists());
    }

    #[test]
    fn links_are_removed_and_not_followed() {
        let place = tempfile::tempdir().expect("directory");
        let (top, outside) = (place.path().join("top"), place.path().join("outside"));
        fs::create_dir_all(top.join("a/b")).expect("make");
        fs::create_dir(&outside).expect("make");
        fs::write(outside.join("kept"), "kept").expect("write");
        symlink(&outside, top.join("a/link")).expect("link");
        symlink(&outside, top.join("a/b/link")).expect("link");
        symlink(&top, place.path().join("to-top")).expect("link");
        remove(&place.path().join("to-top")).expect("remove");
        assert!(top.exists());
        remove(&top).expect("remove");
        assert!(!top.exists());
        assert_eq!(fs::read(outside.join("kept")).expect("read"), b"kept");
    }

    #[test]
    fn a_file_is_removed_and_what_is_absent_is_so_already() {
        let place = tempfile::tempdir().expect("directory");
        fs::write(place.path().join("file"), "file").expect("write");
        let opened = fs::File::open(place.path()).expect("open");
        remove_at(&opened, Path::new("file")).expect("remove");
        remove_at(&opened, Path::new("file")).expect("nothing to remove");
        remove(&place.path().join("none/below")).expect("nothing to remove");
        assert_eq!(fs::read_dir(place.path()).expect("list").count(), 0);
    }
}
