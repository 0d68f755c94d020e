//! Removes a directory tree.
//!
//! The first levels are emptied depth first. Deeper directories are renamed into a level near the top and
//! removed by a later pass. So each pass reduces the depth by a fixed number of levels. An interrupted removal leaves a
//! tree that can be removed again.

use std::ffi::{CStr, CString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, DirEntry, FileType, Mode, ResolveFlags, openat, openat2, renameat, unlinkat,
};
use rustix::io::Errno;

use crate::DIRECTORY;

/// Maximum number of open levels, each with a descriptor and a buffer. Real trees are rarely deeper. Each
/// deeper directory costs a rename.
const MAX_OPEN_LEVELS: usize = 32;
/// Maximum repetitions after passes without a rename. A file system may skip entries of a directory that changes.
const IDLE_PASSES: u32 = 8;

/// The state of a removal: the open levels. The first level is the top, and is always present.
struct Removal {
    levels: Vec<Level>,
    /// Counter for the names of renamed directories.
    number: u64,
    /// Whether this pass has renamed a directory.
    renamed: bool,
    /// The error of a directory that could not be renamed.
    stuck: Option<Errno>,
}

struct Level {
    dir: Dir,
    /// Its name in the parent.
    name: CString,
}

/// Removes a file, a socket or a symbolic link. An absent path is not an error.
///
/// # Errors
/// As unlink(2). A directory is an error.
pub fn remove_file(path: &Path) -> io::Result<()> {
    Ok(ignore_absent(unlinkat(CWD, path, AtFlags::empty()))?)
}

/// Removes a file or a directory tree. An absent path is not an error. A symbolic link is removed itself, not
/// its target.
///
/// # Errors
/// The first error ends the removal. A mount below the path is an error and is left intact.
pub fn remove(path: &Path) -> io::Result<()> {
    remove_at(CWD, path)
}

/// Like [`remove`], for a path relative to an open directory.
///
/// # Errors
/// See [`remove`].
pub fn remove_at(at: impl AsFd, path: &Path) -> io::Result<()> {
    match openat(&at, path, DIRECTORY, Mode::empty()) {
        Ok(top) => Ok(remove_directory(at, path, top)?),
        Err(Errno::NOENT) => Ok(()),
        Err(Errno::NOTDIR | Errno::LOOP) => Ok(ignore_absent(unlinkat(at, path, AtFlags::empty()))?),
        Err(error) => Err(error.into()),
    }
}

fn remove_directory(at: impl AsFd, path: &Path, top: OwnedFd) -> Result<(), Errno> {
    let top = Level { dir: Dir::new(top)?, name: CString::default() };
    let mut removal = Removal { levels: vec![top], number: 0, renamed: false, stuck: None };
    let mut idle = 0;
    loop {
        removal.traverse()?;
        match ignore_absent(unlinkat(&at, path, AtFlags::REMOVEDIR)) {
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
    /// Makes one pass through the tree.
    fn traverse(&mut self) -> Result<(), Errno> {
        while let Some(level) = self.levels.last_mut() {
            match level.dir.read() {
                Some(entry) => self.remove_entry(&entry?)?,
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

    fn remove_entry(&mut self, entry: &DirEntry) -> Result<(), Errno> {
        let name = entry.file_name();
        if name == c"." || name == c".." {
            return Ok(());
        }
        if entry.file_type() != FileType::Directory {
            match self.unlink(name) {
                // The file system does not report types, or the entry has changed.
                Err(Errno::ISDIR) => {}
                done => return done,
            }
        }
        if self.levels.len() > MAX_OPEN_LEVELS { self.move_up(name) } else { self.enter(name) }
    }

    fn unlink(&self, name: &CStr) -> Result<(), Errno> {
        let Some(level) = self.levels.last() else { return Ok(()) };
        ignore_absent(unlinkat(level.dir.fd()?, name, AtFlags::empty()))
    }

    fn enter(&mut self, name: &CStr) -> Result<(), Errno> {
        let Some(level) = self.levels.last() else { return Ok(()) };
        match openat2(level.dir.fd()?, name, DIRECTORY, Mode::empty(), ResolveFlags::NO_XDEV) {
            Ok(fd) => self.levels.push(Level { dir: Dir::new(fd)?, name: name.to_owned() }),
            Err(Errno::NOENT) => {}
            // The directory was replaced by a link or a file.
            Err(Errno::NOTDIR | Errno::LOOP) => return self.unlink(name),
            Err(Errno::MFILE | Errno::NFILE) if self.levels.len() > 1 => return self.move_up(name),
            // The directory is a mount point.
            Err(Errno::XDEV) => return Err(Errno::BUSY),
            Err(error) => return Err(error),
        }
        Ok(())
    }

    /// Moves a directory of the deepest open level to the highest level that accepts it. That is the top,
    /// except on a file system with full directories or on a subvolume. If no level accepts it, it stays for
    /// a later pass.
    fn move_up(&mut self, name: &CStr) -> Result<(), Errno> {
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
                    // The name exists already.
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

    /// Removes the deepest open level, which is empty now.
    fn leave(&mut self) -> Result<(), Errno> {
        let Some(emptied) = self.levels.pop() else { return Ok(()) };
        let Some(above) = self.levels.last() else { return Ok(()) };
        match ignore_absent(unlinkat(above.dir.fd()?, &emptied.name, AtFlags::REMOVEDIR)) {
            // Remaining entries are removed by the next pass.
            Err(Errno::NOTEMPTY | Errno::EXIST) => Ok(()),
            done => done,
        }
    }
}

/// An absent entry counts as removed.
fn ignore_absent(removed: Result<(), Errno>) -> Result<(), Errno> {
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
    use crate::scratch::{deep, in_memory, with_few_resources};

    #[test]
    fn a_file_may_be_absent_and_a_directory_is_not_removed_as_a_file() {
        let place = in_memory();
        let file = place.path().join("file");
        fs::write(&file, "").expect("write");
        remove_file(&file).expect("remove");
        assert!(!file.exists());
        remove_file(&file).expect("an absent file");
        remove_file(&place.path().join("no/parent")).expect("an absent directory");
        remove_file(place.path()).expect_err("a directory");
        assert!(place.path().exists());
    }

    #[test]
    fn a_tree_deeper_than_the_stack_is_removed_with_few_descriptors() {
        let place = in_memory();
        let top = place.path().join("top");
        deep(&top, 25_000);
        with_few_resources(|| remove(&top).expect("remove"));
        assert!(!top.exists());
    }

    #[test]
    fn wide_and_deep_trees_with_conflicting_names_are_removed() {
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
        let edge = top.join(["down"; MAX_OPEN_LEVELS].join("/"));
        for number in 0..300 {
            fs::create_dir_all(edge.join(format!("{number}/below"))).expect("make");
            fs::write(edge.join(format!("{number}/file")), "file").expect("write");
        }
        with_few_resources(|| remove(&top).expect("remove"));
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
    fn a_file_is_removed_and_an_absent_path_is_not_an_error() {
        let place = tempfile::tempdir().expect("directory");
        fs::write(place.path().join("file"), "file").expect("write");
        let opened = fs::File::open(place.path()).expect("open");
        remove_at(&opened, Path::new("file")).expect("remove");
        remove_at(&opened, Path::new("file")).expect("nothing to remove");
        remove(&place.path().join("none/below")).expect("nothing to remove");
        assert_eq!(fs::read_dir(place.path()).expect("list").count(), 0);
    }
}
