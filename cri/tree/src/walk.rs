//! Walks a directory tree that may change during the walk.

use std::ffi::CStr;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::Path;

use rustix::fs::{
    AtFlags, CWD, Dir, DirEntry, FileType, Mode, ResolveFlags, SeekFrom, Stat, fstat, fstatvfs, openat,
    openat2, seek, statat,
};
use rustix::io::Errno;

use crate::DIRECTORY;

/// Number of levels that stay open. Of the deeper levels only the deepest is open. The walk reopens the others through
/// `..`.
const OPEN_LEVELS: usize = 64;
/// Maximum depth of a walk.
const MAX_LEVELS: usize = 1 << 20;
/// Maximum directories that a walk enters, if the file system does not report its number of inodes.
const MAX_DIRECTORIES: u64 = 1 << 24;
/// Directories that other processes may create during a walk.
const NEW_DIRECTORIES: u64 = 1 << 16;

/// Maximum names that a walk reads, as a multiple of its maximum directories. Files rarely have more hard links.
const NAMES_PER_INODE: usize = 64;

/// A directory on the current path. A closed one takes 40 bytes, far less than the kernel uses for it.
enum Level {
    Open(Box<Dir>, i64),
    Closed { directory: FileId, offset: i64 },
}

/// Identity of a file or directory.
#[derive(Clone, Copy, PartialEq, Eq)]
struct FileId {
    device: u64,
    inode: u64,
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
    /// Depth of its directory below the top. All parent directories are reported before this entry, without other
    /// entries in between.
    pub depth: usize,
}

/// The reaction of a walk to an entry that it cannot read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Unreadable {
    Skip,
    Fail,
}

/// The entries that a walk reports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kinds {
    All,
    Directories,
}

/// The part of a tree that a walk visits.
#[derive(Clone, Copy, Debug)]
struct Scope {
    kinds: Kinds,
    /// Maximum directories that are reported.
    most: usize,
    /// Maximum names that are read, as a multiple of the maximum directories ([`most_directories`]).
    names: usize,
}

/// Reports every entry below a directory, in any order. Links are not followed; mounts are neither entered
/// nor reported. A process that moves directories deeper than 64 levels during the walk can hide their contents,
/// but nothing else. It can also make the walk find directories again, even a directory of very many files. So the
/// number of directories has a limit: the used inodes of the file system, and some new ones. The limit of names is 64
/// times higher. Unreadable entries are skipped, with all that is below them.
///
/// # Errors
/// If the directory cannot be opened, or if no descriptor is free for a directory below it. EAGAIN if the walk found too
/// many directories, names or levels; the rest was not reported.
pub fn walk(top: &Path, found: impl FnMut(Found<'_>)) -> io::Result<()> {
    walk_with(top, Unreadable::Skip, Scope::EVERYTHING, each(found))
}

/// Like [`walk`], but ends when `found` returns `Break`. That is not an error.
///
/// # Errors
/// The errors of [`walk`].
pub fn walk_while(top: &Path, found: impl FnMut(Found<'_>) -> ControlFlow<()>) -> io::Result<()> {
    walk_with(top, Unreadable::Skip, Scope::EVERYTHING, found)
}

/// Like [`walk`], but reports only directories. Other entries cost no system calls. The walk ends after
/// `most` directories, with EAGAIN.
pub(crate) fn walk_directories(top: &Path, most: usize, found: impl FnMut(Found<'_>)) -> io::Result<()> {
    let scope = Scope { kinds: Kinds::Directories, most, ..Scope::EVERYTHING };
    walk_with(top, Unreadable::Skip, scope, each(found))
}

/// Like [`walk`], for callers that need all entries: an unreadable one is an error. Entries that disappear during the
/// walk are skipped.
///
/// # Errors
/// The errors of [`walk`], and the error of the first entry that cannot be read.
pub fn walk_all(top: &Path, found: impl FnMut(Found<'_>)) -> io::Result<()> {
    walk_with(top, Unreadable::Fail, Scope::EVERYTHING, each(found))
}

/// Like [`walk_all`], but ends when `found` returns `Break`. That is not an error.
///
/// # Errors
/// The errors of [`walk_all`].
pub fn walk_all_while(top: &Path, found: impl FnMut(Found<'_>) -> ControlFlow<()>) -> io::Result<()> {
    walk_with(top, Unreadable::Fail, Scope::EVERYTHING, found)
}

/// Converts a function that does not end a walk.
fn each(mut found: impl FnMut(Found<'_>)) -> impl FnMut(Found<'_>) -> ControlFlow<()> {
    move |one: Found<'_>| {
        found(one);
        ControlFlow::Continue(())
    }
}

fn walk_with(
    top: &Path,
    unreadable: Unreadable,
    scope: Scope,
    mut found: impl FnMut(Found<'_>) -> ControlFlow<()>,
) -> io::Result<()> {
    let top = openat(CWD, top, DIRECTORY, Mode::empty())?;
    let most = most_directories(&top);
    let (mut left, mut names_left) = (scope.most.min(most), scope.names.saturating_mul(most));
    let mut levels = vec![Level::open(top, 0)?];
    loop {
        let depth = levels.len().saturating_sub(1);
        let Some(Level::Open(dir, offset)) = levels.last_mut() else { return Ok(()) };
        match dir.read() {
            Some(Ok(entry)) => {
                *offset = entry.offset();
                names_left = names_left.saturating_sub(1);
                if names_left == 0 {
                    return Err(Errno::AGAIN.into());
                }
                if !scope.kinds.include(&entry) {
                    continue;
                }
                let ControlFlow::Continue(below) = report(dir, &entry, depth, unreadable, &mut found)? else {
                    return Ok(());
                };
                if let Some(below) = below {
                    left = left.saturating_sub(1);
                    // The caller has to know that the rest is missing.
                    if left == 0 || levels.len() >= MAX_LEVELS {
                        return Err(Errno::AGAIN.into());
                    }
                    go_down(&mut levels, below)?;
                }
            }
            Some(Err(error)) => {
                unreadable.check(error)?;
                // The rest of the directory is skipped.
                go_up(&mut levels, unreadable)?;
            }
            None => go_up(&mut levels, unreadable)?,
        }
    }
}

/// Maximum directories that a walk enters: the used inodes of the file system, and [`NEW_DIRECTORIES`]. Without this
/// limit, a process could prolong the walk without end: it could move each directory that the walk has left into the
/// directory that the walk reads.
fn most_directories(top: &OwnedFd) -> usize {
    let system = fstatvfs(top).ok();
    // Some file systems report no inodes, or more free ones than there are.
    let used = system.and_then(|system| system.f_files.checked_sub(system.f_ffree)).filter(|used| *used > 0);
    let most = used.map_or(MAX_DIRECTORIES, |used| used.saturating_add(NEW_DIRECTORIES));
    usize::try_from(most).unwrap_or(usize::MAX)
}

// === impl Scope ===

impl Scope {
    const EVERYTHING: Self = Self { kinds: Kinds::All, most: usize::MAX, names: NAMES_PER_INODE };
}

// === impl Kinds ===

impl Kinds {
    fn include(self, entry: &DirEntry) -> bool {
        // Not all file systems report the types of entries.
        self == Self::All || matches!(entry.file_type(), FileType::Directory | FileType::Unknown)
    }
}

// === impl Unreadable ===

impl Unreadable {
    /// Returns an error that ends the walk. An entry that was removed, or replaced by another type, does not end it.
    fn check(self, error: Errno) -> Result<(), Errno> {
        match (self, error) {
            (Self::Skip, _) | (Self::Fail, Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(()),
            (Self::Fail, _) => Err(error),
        }
    }
}

/// Reports an entry, and opens it if it is a directory. `Break` if the walk ends here.
fn report(
    dir: &Dir,
    entry: &DirEntry,
    depth: usize,
    unreadable: Unreadable,
    found: &mut impl FnMut(Found<'_>) -> ControlFlow<()>,
) -> Result<ControlFlow<(), Option<OwnedFd>>, Errno> {
    let name = entry.file_name();
    if name == c"." || name == c".." {
        return Ok(ControlFlow::Continue(None));
    }
    let at = dir.fd()?;
    let stat = match statat(at, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => stat,
        Err(error) => return unreadable.check(error).map(|()| ControlFlow::Continue(None)),
    };
    let opened = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => openat2(at, name, DIRECTORY, Mode::empty(), ResolveFlags::NO_XDEV),
        _ => Err(Errno::NOTDIR),
    };
    match opened {
        Err(error @ (Errno::MFILE | Errno::NFILE)) => return Err(error),
        Err(Errno::XDEV) => return Ok(ControlFlow::Continue(None)),
        _ => {}
    }
    if found(Found { dir: at, name, stat: &stat, depth }).is_break() {
        return Ok(ControlFlow::Break(()));
    }
    match opened {
        Ok(below) => Ok(ControlFlow::Continue(Some(below))),
        Err(error) => unreadable.check(error).map(|()| ControlFlow::Continue(None)),
    }
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

fn go_up(levels: &mut Vec<Level>, unreadable: Unreadable) -> Result<(), Errno> {
    let left = levels.pop();
    let (Some(Level::Open(below, _)), Some(last)) = (left, levels.last_mut()) else { return Ok(()) };
    if let Level::Closed { directory, offset } = *last {
        match reopen(&below, directory, offset, unreadable)? {
            Some(level) => *last = level,
            // The directory was moved. Continue at the deepest level that is still open.
            None => levels.truncate(OPEN_LEVELS),
        }
    }
    Ok(())
}

/// Opens the parent directory, if it is still the same one.
fn reopen(below: &Dir, known: FileId, offset: i64, unreadable: Unreadable) -> Result<Option<Level>, Errno> {
    let above = match openat(below.fd()?, "..", DIRECTORY, Mode::empty()) {
        Err(error @ (Errno::MFILE | Errno::NFILE)) => return Err(error),
        Err(error) => return unreadable.check(error).map(|()| None),
        Ok(above) => above,
    };
    let stat = fstat(&above)?;
    let (Ok(position), true) =
        (u64::try_from(offset), FileId { device: stat.st_dev, inode: stat.st_ino } == known)
    else {
        return Ok(None);
    };
    seek(&above, SeekFrom::Start(position))?;
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
            let directory = FileId { device: stat.st_dev, inode: stat.st_ino };
            *self = Level::Closed { directory, offset: *offset };
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;
    use crate::scratch::{deep, in_memory, with_few_resources};

    fn inodes(top: &Path) -> HashSet<u64> {
        let (mut inodes, mut times) = (HashSet::new(), 0);
        let found = |found: Found<'_>| {
            inodes.insert(found.stat.st_ino);
            times += 1;
        };
        walk(top, found).expect("walk");
        assert_eq!(inodes.len(), times, "nothing twice");
        inodes
    }

    #[test]
    fn the_entries_of_a_tree_are_found_at_every_depth() {
        let place = in_memory();
        let top = place.path().join("top");
        deep(&top, 25_000);
        // The walk returns to these levels after it has left them. Some are above the limit of open levels, some below.
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
    fn a_walk_ends_where_its_caller_ends_it() {
        let place = in_memory();
        fs::create_dir_all(place.path().join("a/b/c/d")).expect("make");
        let mut left = 2;
        let mut found = |_: Found<'_>| {
            left -= 1;
            if left % 2 == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        walk_while(place.path(), &mut found).expect("the end is not an error");
        walk_all_while(place.path(), &mut found).expect("the end is not an error");
        assert_eq!(left, -2, "two entries of each walk");
    }

    #[test]
    fn an_unreadable_directory_is_skipped_or_an_error() {
        let place = in_memory();
        let hidden = place.path().join("hidden");
        fs::create_dir_all(hidden.join("below")).expect("make");
        fs::set_permissions(place.path(), Permissions::from_mode(0o755)).expect("mode");
        fs::set_permissions(&hidden, Permissions::from_mode(0o0)).expect("mode");
        std::thread::scope(|scope| {
            scope.spawn(|| {
                // This changes only this thread. Root could read the directory.
                nix::unistd::setfsuid(nix::unistd::Uid::from_raw(65534));
                assert_eq!(inodes(place.path()).len(), 1);
                let error = walk_all(place.path(), |_| {}).expect_err("unreadable");
                assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            });
        });
        fs::set_permissions(&hidden, Permissions::from_mode(0o755)).expect("mode");
        let mut names = 0;
        walk_all(place.path(), |_| names += 1).expect("readable");
        assert_eq!(names, 2);
    }

    #[test]
    fn a_directory_that_is_removed_during_the_walk_is_not_an_error() {
        let place = in_memory();
        for name in ["a", "b", "c"] {
            fs::create_dir_all(place.path().join(name).join("below")).expect("make");
        }
        let mut names = 0;
        let found = |found: Found<'_>| {
            names += 1;
            if found.depth == 0 {
                // This also removes the directory whose entries would be read next.
                for name in ["a", "b", "c"] {
                    crate::remove(&place.path().join(name)).expect("remove");
                }
            }
        };
        walk_all(place.path(), found).expect("walk");
        assert!(names >= 1, "the first one was found");
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

    /// Calls `walks` with a tree and a function. A walk that calls the function for each entry finds directories without
    /// end.
    fn endless(top: &Path, walks: impl FnOnce(&Path, &mut dyn FnMut(Found<'_>))) {
        let end = |name: &str| top.join(name).join(["d"; 2 * OPEN_LEVELS].join("/"));
        for name in ["a", "b"] {
            fs::create_dir_all(end(name)).expect("make");
        }
        fs::rename(top.join("b"), end("a").join("b")).expect("move");
        let (mut upper, mut lower) = ("a", "b");
        walks(top, &mut |found: Found<'_>| {
            if found.name.to_bytes() == lower.as_bytes() {
                // The walk is about to enter the lower tree. The upper one is moved below its end.
                fs::rename(end(upper).join(lower), top.join(lower)).expect("move up");
                fs::rename(top.join(upper), end(lower).join(upper)).expect("move down");
                std::mem::swap(&mut upper, &mut lower);
            }
        });
    }

    #[test]
    fn directories_that_are_moved_below_the_walk_do_not_prolong_it_without_end() {
        let place = in_memory();
        let opened = openat(CWD, place.path(), DIRECTORY, Mode::empty()).expect("open");
        // Other tests create directories in the same file system.
        let limit = 4 * most_directories(&opened) + 500_000;
        let mut entered = 0_usize;
        endless(place.path(), |top, again| {
            let mut find = |found: Found<'_>| {
                entered += 1;
                assert!(entered <= limit, "the walk does not end");
                again(found);
            };
            let error = walk(top, &mut find).expect_err("endless");
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
            let error = walk_all(top, &mut find).expect_err("endless");
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        });
        assert!(entered > 1 << 17, "the trees alternated");
    }

    #[test]
    fn a_walk_reads_a_limited_number_of_names() {
        assert_eq!(Scope::EVERYTHING.names, NAMES_PER_INODE, "the limit of all walks");
        let place = in_memory();
        let opened = openat(CWD, place.path(), DIRECTORY, Mode::empty()).expect("open");
        let scope = |names| Scope { names, ..Scope::EVERYTHING };
        let (mut entered, mut most) = (0_usize, 0);
        endless(place.path(), |top, again| {
            let find = |found: Found<'_>| {
                entered += 1;
                again(found);
            };
            most = most_directories(&opened);
            // Each directory has three names, with `.` and `..`.
            let error = walk_with(top, Unreadable::Skip, scope(1), each(find)).expect_err("endless");
            assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        });
        assert!(entered > 1 << 13 && entered <= most / 2, "{entered} of {most}");
    }
}
