//! File operations inside one directory with untrusted names.
//!
//! A path is normalised first: it has no `.`, `..` or empty components, and a path that leads out is refused. Then its
//! parent directory is opened with `openat2(RESOLVE_IN_ROOT)`, so that links, including absolute links, stay inside the
//! directory. The last component is only used relative to that descriptor and is never followed.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, ResolveFlag, open, openat, openat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fchmod, fstat, fstatat, makedev, mkdirat, mknodat};
use nix::unistd::{LinkatFlags, UnlinkatFlags, linkat, symlinkat, unlinkat};
use xattr::FileExt as _;

/// A normalised path relative to the root: no leading slash, no `.`, `..` or empty components.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct PlainPath(Vec<u8>);

/// Directories that were created because an entry needed them. A directory that is created again counts again.
#[derive(Clone, Copy, Default)]
pub(super) struct ImpliedTotals {
    /// Number of the directories.
    pub(super) directories: u64,
    /// Bytes of their paths.
    pub(super) name_bytes: u64,
}

/// The directory of a layer. No path of the layer leads out of it.
pub(super) struct Root {
    fd: OwnedFd,
    /// The parent directory that was used last: archives list the files of a directory one after another.
    recent: Option<(PlainPath, OwnedFd)>,
    /// Directories that were created because an entry needed them.
    implied: BTreeSet<PlainPath>,
    implied_totals: ImpliedTotals,
    /// Whether a later entry of the archive replaced an entry.
    replaced: bool,
}

/// Mode of directories that no entry describes.
const DIRECTORY_MODE: Mode = Mode::from_bits_truncate(0o755);
/// Attribute of a directory that hides the lower layers' directory.
const OPAQUE: &str = "trusted.overlay.opaque";

// === impl PlainPath ===

impl PlainPath {
    /// Normalises a path. `None` if it leads out or contains a NUL.
    pub(super) fn new(path: &[u8]) -> Option<PlainPath> {
        let mut parts: Vec<&[u8]> = Vec::new();
        for part in path.split(|b| *b == b'/') {
            match part {
                b"" | b"." => {}
                b".." => {
                    parts.pop()?;
                }
                _ if part.contains(&0) => return None,
                _ => parts.push(part),
            }
        }
        Some(PlainPath(parts.join(&b'/')))
    }

    /// Whether the path is the root itself.
    pub(super) fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// The parent and the last component of a path. Must not be called for the root.
    pub(super) fn split(&self) -> (PlainPath, &OsStr) {
        match self.0.iter().rposition(|b| *b == b'/') {
            Some(slash) => (PlainPath(self.0[..slash].to_vec()), OsStr::from_bytes(&self.0[slash + 1..])),
            None => (PlainPath(Vec::new()), OsStr::from_bytes(&self.0)),
        }
    }

    /// The path as text, for messages and records.
    pub(super) fn display(&self) -> String {
        String::from_utf8_lossy(&self.0).into_owned()
    }

    /// The path as bytes, relative to the root.
    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    fn as_path(&self) -> &Path {
        if self.is_root() { Path::new(".") } else { Path::new(OsStr::from_bytes(&self.0)) }
    }
}

// === impl Root ===

impl Root {
    /// Opens the directory to work in.
    pub(super) fn open(path: &Path) -> Result<Root, Errno> {
        let fd = open(path, OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC, Mode::empty())?;
        Ok(Root {
            fd,
            recent: None,
            implied: BTreeSet::new(),
            implied_totals: ImpliedTotals::default(),
            replaced: false,
        })
    }

    /// Takes the list of directories that were created because an entry needed them.
    pub(super) fn take_implied(&mut self) -> BTreeSet<PlainPath> {
        std::mem::take(&mut self.implied)
    }

    pub(super) fn implied_totals(&self) -> ImpliedTotals {
        self.implied_totals
    }

    /// Whether a later entry of the archive replaced an entry.
    pub(super) fn replaced(&self) -> bool {
        self.replaced
    }

    /// Opens a directory. Makes it and its parents if they are missing.
    pub(super) fn directory(&mut self, path: &PlainPath) -> Result<BorrowedFd<'_>, Errno> {
        if self.recent.as_ref().is_none_or(|(recent, _)| recent != path) {
            let fd = self.open_or_make(path)?;
            self.recent = Some((path.clone(), fd));
        }
        // `recent` is this path: it was set above or by the previous call.
        Ok(self.recent.as_ref().map_or(self.fd.as_fd(), |(_, fd)| fd.as_fd()))
    }

    /// Opens an existing directory, to change its attributes.
    pub(super) fn existing_directory(&self, path: &PlainPath) -> Result<File, Errno> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
        self.open_in_root(path.as_path(), flags).map(File::from)
    }

    /// Opens a file for reading.
    pub(super) fn existing_file(&self, path: &PlainPath) -> Result<File, Errno> {
        // On 32-bit machines openat2(2) opens files above 2 GiB only with this flag.
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_LARGEFILE;
        self.open_in_root(path.as_path(), flags).map(File::from)
    }

    /// The metadata at a path. A link in any component is an error.
    pub(super) fn stat_without_links(&self, path: &PlainPath) -> Result<FileStat, Errno> {
        let how = OpenHow::new()
            .flags(OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS);
        fstat(openat2(&self.fd, path.as_path(), how)?)
    }

    /// Makes a directory, or opens an existing one. A directory that replaces a whiteout is opaque.
    pub(super) fn make_directory(&mut self, path: &PlainPath) -> Result<File, Errno> {
        let (parent, name) = path.split();
        let at = self.directory(&parent)?;
        match mkdirat(at, name, DIRECTORY_MODE) {
            Ok(()) => {
                let made = open_directory_at(at, name)?;
                self.real_path(&made)?;
                return Ok(made);
            }
            Err(Errno::EEXIST) => {}
            Err(e) => return Err(e),
        }
        let existing = stat_at(at, name)?;
        if is_directory(&existing) {
            return open_directory_at(at, name);
        }
        self.remove(path)?;
        let at = self.directory(&parent)?;
        mkdirat(at, name, DIRECTORY_MODE)?;
        let made = open_directory_at(at, name)?;
        if is_whiteout(&existing) {
            set_opaque(&made)?;
        }
        Ok(made)
    }

    /// Makes a new file. An existing entry of any type is replaced.
    pub(super) fn make_file(&mut self, path: &PlainPath) -> Result<File, Errno> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        self.replace(path, |at, name| {
            openat(at, name, flags, Mode::from_bits_truncate(0o600)).map(File::from)
        })
    }

    /// Makes a symbolic link.
    pub(super) fn make_symlink(&mut self, path: &PlainPath, target: &[u8]) -> Result<(), Errno> {
        self.replace(path, |at, name| symlinkat(OsStr::from_bytes(target), at, name))
    }

    /// Makes a device or a FIFO.
    pub(super) fn make_node(
        &mut self,
        path: &PlainPath,
        kind: SFlag,
        major: u32,
        minor: u32,
    ) -> Result<(), Errno> {
        let device = makedev(major.into(), minor.into());
        self.replace(path, |at, name| mknodat(at, name, kind, Mode::from_bits_truncate(0o600), device))
    }

    /// The metadata at a path, without following the last component. A whiteout counts as absent.
    pub(super) fn find(&self, path: &PlainPath) -> Result<Option<FileStat>, Errno> {
        let (parent, name) = path.split();
        let found = self
            .open_in_root(parent.as_path(), OFlag::O_PATH | OFlag::O_DIRECTORY)
            .and_then(|at| stat_at(at.as_fd(), name));
        match found {
            Ok(stat) => Ok(Some(stat).filter(|stat| !is_whiteout(stat))),
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// The path of an open file, without links. An error if the path is too long or leads out of the root.
    /// Without the length limit, links that lead into each other could nest directories without end.
    pub(super) fn real_path(&self, file: impl AsFd) -> Result<PlainPath, Errno> {
        let path =
            |fd: BorrowedFd<'_>| nix::fcntl::readlink(format!("/proc/self/fd/{}", fd.as_raw_fd()).as_str());
        let (root, file) = (path(self.fd.as_fd())?, path(file.as_fd())?);
        let below = Path::new(&file).strip_prefix(&root).map_err(|_moved| Errno::ENOENT)?;
        PlainPath::new(below.as_os_str().as_bytes()).ok_or(Errno::ENOENT)
    }

    /// An extended attribute at a path, without following the last component.
    pub(super) fn attribute(&self, path: &PlainPath, name: &str) -> Option<Vec<u8>> {
        let (parent, file) = path.split();
        let at = self.open_in_root(parent.as_path(), OFlag::O_PATH | OFlag::O_DIRECTORY).ok()?;
        xattr::get(Path::new("/proc/self/fd").join(at.as_raw_fd().to_string()).join(file), name).ok()?
    }

    /// Makes a hard link. A symbolic link is linked itself, not its target.
    pub(super) fn make_hard_link(&mut self, path: &PlainPath, target: &PlainPath) -> Result<(), Errno> {
        let (target_parent, target_name) = target.split();
        let target_at = self.open_in_root(target_parent.as_path(), OFlag::O_PATH | OFlag::O_DIRECTORY)?;
        self.replace(path, |at, name| linkat(&target_at, target_name, at, name, LinkatFlags::empty()))
    }

    /// Makes a whiteout, which hides the path of lower layers. An existing entry of this layer is kept.
    pub(super) fn make_whiteout(&mut self, parent: &PlainPath, name: &OsStr) -> Result<(), Errno> {
        let at = self.directory(parent)?;
        match mknodat(at, name, SFlag::S_IFCHR, Mode::empty(), makedev(0, 0)) {
            Err(Errno::EEXIST) => {
                if is_directory(&stat_at(at, name)?) {
                    set_opaque(&open_directory_at(at, name)?)?;
                }
                Ok(())
            }
            done => done,
        }
    }

    /// Makes a directory opaque: it hides the lower layers' directory.
    pub(super) fn make_opaque(&mut self, path: &PlainPath) -> Result<(), Errno> {
        self.directory(path)?;
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        set_opaque(&self.open_in_root(path.as_path(), flags)?.into())
    }

    /// The parent directory and last component of a path, for system calls of the caller.
    pub(super) fn parent_and_name<'p>(
        &mut self,
        path: &'p PlainPath,
    ) -> Result<(BorrowedFd<'_>, &'p OsStr), Errno> {
        let (parent, name) = path.split();
        Ok((self.directory(&parent)?, name))
    }

    /// Creates an entry. If the path exists, removes it and tries again.
    fn replace<T>(
        &mut self,
        path: &PlainPath,
        make: impl Fn(BorrowedFd<'_>, &OsStr) -> Result<T, Errno>,
    ) -> Result<T, Errno> {
        let (at, name) = self.parent_and_name(path)?;
        match make(at, name) {
            Err(Errno::EEXIST) => {}
            done => return done,
        }
        self.remove(path)?;
        let (at, name) = self.parent_and_name(path)?;
        make(at, name)
    }

    fn remove(&mut self, path: &PlainPath) -> Result<(), Errno> {
        self.replaced = true;
        let (at, name) = self.parent_and_name(path)?;
        let existing = stat_at(at, name)?;
        let removed = if is_directory(&existing) {
            coracle_tree::remove_at(at, Path::new(name)).map_err(errno)
        } else {
            unlinkat(at, name, UnlinkatFlags::NoRemoveDir)
        };
        // The cached directory may have been removed.
        self.recent = None;
        removed
    }

    fn open_or_make(&mut self, path: &PlainPath) -> Result<OwnedFd, Errno> {
        let open = |root: &Root| root.open_in_root(path.as_path(), OFlag::O_PATH | OFlag::O_DIRECTORY);
        match open(self) {
            Err(Errno::ENOENT | Errno::ENOTDIR) if !path.is_root() => {}
            done => return done,
        }
        let (parent, name) = path.split();
        let at = self.open_or_make(&parent)?;
        let made = match mkdirat(&at, name, DIRECTORY_MODE) {
            Ok(()) => open_directory_at(at.as_fd(), name)?,
            Err(Errno::EEXIST) => {
                if !is_whiteout(&stat_at(at.as_fd(), name)?) {
                    return Err(Errno::ENOTDIR);
                }
                unlinkat(&at, name, UnlinkatFlags::NoRemoveDir)?;
                mkdirat(&at, name, DIRECTORY_MODE)?;
                let made = open_directory_at(at.as_fd(), name)?;
                set_opaque(&made)?;
                made
            }
            Err(e) => return Err(e),
        };
        self.real_path(&made)?;
        // No entry describes the directory, so it gets the default mode, independent of the umask.
        fchmod(&made, DIRECTORY_MODE)?;
        self.implied_totals.directories += 1;
        self.implied_totals.name_bytes += path.as_bytes().len() as u64;
        self.implied.insert(path.clone());
        open(self)
    }

    fn open_in_root(&self, path: &Path, flags: OFlag) -> Result<OwnedFd, Errno> {
        let how = OpenHow::new()
            .flags(flags | OFlag::O_CLOEXEC)
            .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
        loop {
            match openat2(&self.fd, path, how) {
                // Another process renamed a file while the kernel resolved a `..` in a link.
                Err(Errno::EAGAIN) => {}
                done => return done,
            }
        }
    }
}

/// Whether the kernel supports the path resolution that is needed (Linux 5.6).
pub(super) fn supported() -> bool {
    let how = OpenHow::new().flags(OFlag::O_PATH).resolve(ResolveFlag::RESOLVE_IN_ROOT);
    openat2(AT_FDCWD, Path::new("/"), how).is_ok()
}

fn stat_at(at: BorrowedFd<'_>, name: &OsStr) -> Result<FileStat, Errno> {
    fstatat(at, name, AtFlags::AT_SYMLINK_NOFOLLOW)
}

/// Whether the file is a directory.
pub(super) fn is_directory(stat: &FileStat) -> bool {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFDIR
}

fn is_whiteout(stat: &FileStat) -> bool {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFCHR && stat.st_rdev == 0
}

fn open_directory_at(at: BorrowedFd<'_>, name: &OsStr) -> Result<File, Errno> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    openat(at, name, flags, Mode::empty()).map(File::from)
}

fn set_opaque(directory: &File) -> Result<(), Errno> {
    directory.set_xattr(OPAQUE, b"y").map_err(errno)
}

/// The errno of an I/O error.
pub(super) fn errno(error: std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

#[cfg(test)]
mod tests {
    use super::PlainPath;

    #[test]
    fn paths_are_normalised_or_refused() {
        for (given, plain) in [
            ("a", Some("a")),
            ("./a/./b//c/", Some("a/b/c")),
            ("/etc/passwd", Some("etc/passwd")),
            ("a/../b", Some("b")),
            ("a/b/../../c", Some("c")),
            (".", Some("")),
            ("/", Some("")),
            ("..", None),
            ("../x", None),
            ("a/../../x", None),
            ("/../x", None),
            ("a\0b", None),
        ] {
            assert_eq!(
                PlainPath::new(given.as_bytes()).map(|p| p.display()),
                plain.map(str::to_owned),
                "{given:?}"
            );
        }
    }
}
