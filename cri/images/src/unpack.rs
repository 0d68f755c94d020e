//! Unpacks one layer into a directory that overlayfs can use as a lower directory.
//!
//! The stream is decompressed, hashed and written in one pass. Whiteouts become overlayfs whiteouts (a character device
//! 0:0, or the opaque attribute). A layer must not name paths outside its directory (see `root.rs`), set attributes of
//! overlayfs, or exceed the limits.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Seek, SeekFrom, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::sys::stat::{FchmodatFlags, Mode, SFlag, fchmodat};
use nix::unistd::{Gid, Uid, fchownat};

use crate::archive::{Archive, ArchiveError, Entry, Kind, Mtime, Segment};
use crate::config::Limits;
use crate::digest::{Algorithm, Digest, HashingReader};

mod attributes;
mod decompress;
mod error;
mod links;
mod recipe;
mod root;
mod times;

use attributes::{MakeError, set_attributes, set_extended};
use decompress::Decompressed;
pub(crate) use error::{TooLarge, UnpackError};
use links::DeferredLinks;
pub(crate) use links::{Link, LinkError, place};
pub(crate) use recipe::Rebuilt;
use recipe::{Recorder, RecordingReader};
use root::{PlainPath, Root, errno};

const WHITEOUT: &[u8] = b".wh.";
const OPAQUE: &[u8] = b".wh..wh..opq";
/// Prefix of other whiteout names, which aufs uses for its own bookkeeping.
const AUFS: &[u8] = b".wh..wh.";
/// Largest numbers of a device. mknod(2) ignores higher bits, so that a larger number could become 0:0, a whiteout.
const MAJOR_MAX: u32 = (1 << 12) - 1;
const MINOR_MAX: u32 = (1 << 20) - 1;
const BUFFER: usize = 128 * 1024;
const BLOCK: u64 = 4096;
/// Maximum bytes of names that are kept until the layer ends. The largest images need about a tenth of this number.
const NAMES: u64 = 64 << 20;

/// Result of unpacking a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Unpacked {
    /// The digest of the uncompressed archive.
    pub(crate) diff_id: Digest,
    /// Bytes of the files, in whole blocks.
    pub(crate) bytes: u64,
    /// Number of files, directories and other inodes.
    pub(crate) inodes: u64,
    /// Directories that the layer uses but does not describe.
    pub(crate) implied: Vec<String>,
    /// Hard links to files of lower layers, in the order of the archive.
    pub(crate) links: Vec<Link>,
}

/// The type of a layer's entry at a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LayerEntry {
    Directory(Attributes),
    /// The path, or a parent of the path, is a file, a link or a whiteout.
    Other,
    Absent,
}

/// Mode and owner of a directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attributes {
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
}

/// The archive of a layer, as a stream.
type Stream<I> = Archive<RecordingReader<HashingReader<Decompressed<I>>>>;

/// Unpacks a layer, compressed or not, into an empty directory. Reads the input to its end.
pub(crate) fn unpack(input: impl BufRead, into: &Path, limits: &Limits) -> Result<Unpacked, UnpackError> {
    unpack_recorded(input, into, limits, None, Algorithm::Sha256)
}

/// Like [`unpack`], and writes a recipe to rebuild the archive. `algorithm` is the algorithm of the archive's digest.
/// An archive with a duplicate name gets no recipe.
pub(crate) fn unpack_with_recipe(
    input: impl BufRead,
    into: &Path,
    limits: &Limits,
    recipe: &Path,
    algorithm: Algorithm,
) -> Result<Unpacked, UnpackError> {
    let recorder = Recorder::create(recipe).map_err(no_recipe)?;
    unpack_recorded(input, into, limits, Some(recorder), algorithm)
}

fn unpack_recorded<I: BufRead>(
    input: I,
    into: &Path,
    limits: &Limits,
    recorder: Option<Recorder>,
    algorithm: Algorithm,
) -> Result<Unpacked, UnpackError> {
    let decompressed = Decompressed::new(input, *limits).map_err(read_error)?;
    let reader = BufReader::with_capacity(BUFFER, HashingReader::new(decompressed, algorithm));
    let mut archive: Stream<I> = Archive::new(RecordingReader::new(reader, recorder));
    let root =
        Root::open(into).map_err(|source| UnpackError::Write { path: into.display().to_string(), source })?;
    let mut writer = Writer::new(root, *limits);
    while let Some(entry) = archive.next_entry().map_err(archive_error)? {
        writer.write(&entry, &mut archive)?;
    }
    let (implied, links) = writer.finish()?;
    // The digest includes the bytes after the end of the archive.
    let mut rest = archive.into_inner();
    loop {
        let n = rest.fill_buf().map_err(read_error)?.len();
        if n == 0 {
            break;
        }
        rest.consume(n);
    }
    let (hashed, recorder) = rest.into_parts();
    if let Some(recorder) = recorder {
        let done = if writer.root.replaced() { recorder.discard() } else { recorder.finish() };
        done.map_err(no_recipe)?;
    }
    let diff_id = hashed.finish();
    Ok(Unpacked { diff_id, bytes: writer.bytes, inodes: writer.inodes, implied, links })
}

/// Size of a file, and the stored segments of a sparse file.
struct FileContent<'a> {
    size: u64,
    sparse: Option<&'a [Segment]>,
}

struct Writer {
    root: Root,
    limits: Limits,
    bytes: u64,
    inodes: u64,
    entries: u64,
    /// Modification times of directories. They are set at the end, because creating a file changes its
    /// directory's time.
    times: BTreeMap<PlainPath, Mtime>,
    /// Bytes of names that are kept until the end.
    names: u64,
    waiting: DeferredLinks,
}

// === impl Writer ===

impl Writer {
    fn new(root: Root, limits: Limits) -> Writer {
        let waiting = DeferredLinks::default();
        Writer { root, limits, bytes: 0, inodes: 0, entries: 0, times: BTreeMap::new(), names: 0, waiting }
    }

    fn write<I: BufRead>(&mut self, entry: &Entry, archive: &mut Stream<I>) -> Result<(), UnpackError> {
        self.entries += 1;
        self.check_limits()?;
        self.write_entry(entry, archive)?;
        // Checked again: the entry may have added implied directories and names, and may be the last entry.
        self.check_limits()
    }

    /// Checks the limits. Implied directories count as entries, and their names are kept too.
    fn check_limits(&self) -> Result<(), UnpackError> {
        let implied = self.root.implied_totals();
        if self.entries + implied.directories > self.limits.layer_entries {
            return Err(UnpackError::TooLarge(TooLarge::Entries(self.limits.layer_entries)));
        }
        if self.names + implied.name_bytes > NAMES {
            return Err(UnpackError::TooLarge(TooLarge::Names(NAMES)));
        }
        Ok(())
    }

    /// Records the time of a directory, to be set at the end. The last entry wins.
    fn defer_time(&mut self, path: &PlainPath, mtime: Mtime) {
        if self.times.insert(path.clone(), mtime).is_none() {
            self.names += path.as_bytes().len() as u64;
        }
    }

    fn write_entry<I: BufRead>(&mut self, entry: &Entry, archive: &mut Stream<I>) -> Result<(), UnpackError> {
        let path = parse_path(&entry.path)?;
        if path.is_root() {
            return if entry.kind == Kind::Directory { self.root_directory(entry) } else { Ok(()) };
        }
        let (parent, name) = path.split();
        if name.as_bytes().starts_with(WHITEOUT) {
            return self.whiteout(&parent, name, &path);
        }
        match &entry.kind {
            Kind::File { size, sparse } => {
                let content = FileContent { size: *size, sparse: sparse.as_deref() };
                self.file(entry, &path, &content, archive)
            }
            Kind::HardLink(target) => self.hard_link(&path, target),
            // overlayfs treats a device 0:0 as a whiteout, so a layer must not contain such a device.
            Kind::Char(0, 0) => Err(UnpackError::WhiteoutDevice { path: path.display() }),
            Kind::Char(major, minor) | Kind::Block(major, minor)
                if *major > MAJOR_MAX || *minor > MINOR_MAX =>
            {
                Err(UnpackError::DeviceNumber { path: path.display(), major: *major, minor: *minor })
            }
            _ => self.special(entry, &path).map_err(|cannot| cannot_make(&path, cannot)),
        }
    }

    fn whiteout(&mut self, parent: &PlainPath, name: &OsStr, path: &PlainPath) -> Result<(), UnpackError> {
        let name = name.as_bytes();
        let done = if name == OPAQUE {
            self.root.make_opaque(parent)
        } else if name.starts_with(AUFS) {
            return Ok(());
        } else {
            let hidden = &name[WHITEOUT.len()..];
            if matches!(hidden, b"" | b"." | b"..") {
                return Err(UnpackError::WhiteoutName { path: path.display() });
            }
            self.inodes += 1;
            self.root.make_whiteout(parent, OsStr::from_bytes(hidden))
        };
        done.map_err(|source| cannot_write(path, source))
    }

    fn root_directory(&mut self, entry: &Entry) -> Result<(), UnpackError> {
        let path = parse_path(b"/")?;
        let set = |writer: &mut Writer| {
            let directory = writer.root.existing_directory(&path)?;
            set_attributes(&directory, entry)?;
            writer.defer_time(&path, entry.mtime);
            Ok(())
        };
        set(self).map_err(|cannot| cannot_make(&path, cannot))
    }

    fn file<I: BufRead>(
        &mut self,
        entry: &Entry,
        path: &PlainPath,
        content: &FileContent<'_>,
        archive: &mut Stream<I>,
    ) -> Result<(), UnpackError> {
        let FileContent { size, sparse } = *content;
        let cannot = |source| cannot_write(path, source);
        let mut file = self.root.make_file(path).map_err(cannot)?;
        match sparse {
            None => copy_data(archive, &mut file, Segment { offset: 0, length: u64::MAX }, path)?,
            Some(segments) => {
                if size > self.limits.layer_bytes {
                    return Err(UnpackError::TooLarge(TooLarge::Sparse(self.limits.layer_bytes)));
                }
                for segment in segments {
                    file.seek(SeekFrom::Start(segment.offset)).map_err(errno).map_err(cannot)?;
                    copy_data(archive, &mut file, *segment, path)?;
                }
                file.set_len(size).map_err(errno).map_err(cannot)?;
            }
        }
        set_attributes(&file, entry).map_err(|cannot| cannot_make(path, cannot))?;
        times::set(&file, entry.mtime).map_err(cannot)?;
        let stored = sparse.map_or(size, |segments| segments.iter().map(|s| s.length).sum());
        self.bytes += stored.next_multiple_of(BLOCK);
        self.inodes += 1;
        Ok(())
    }

    fn hard_link(&mut self, path: &PlainPath, target: &[u8]) -> Result<(), UnpackError> {
        let target = parse_path(target)?;
        if *path == target {
            return Ok(());
        }
        let made = match self.root.find(&target) {
            Ok(Some(_)) if !self.waiting.is_placeholder(&self.root, &target) => {
                self.root.make_hard_link(path, &target)
            }
            Ok(_) if !target.is_root() => {
                self.inodes += 1;
                self.names += (path.as_bytes().len() + target.as_bytes().len()) as u64;
                self.waiting.add(&mut self.root, path, &target)
            }
            Ok(_) => Err(Errno::EPERM),
            Err(e) => Err(e),
        };
        match made {
            // No file system supports hard links to directories.
            Err(Errno::EPERM) => {
                Err(UnpackError::LinkTarget { path: path.display(), target: target.display() })
            }
            done => done.map_err(|source| cannot_write(path, source)),
        }
    }

    /// Makes an entry without data.
    fn special(&mut self, entry: &Entry, path: &PlainPath) -> Result<(), MakeError> {
        self.inodes += 1;
        match &entry.kind {
            Kind::Directory => {
                let directory = self.root.make_directory(path)?;
                set_attributes(&directory, entry)?;
                self.defer_time(path, entry.mtime);
                self.bytes += BLOCK;
                return Ok(());
            }
            Kind::Symlink(target) => self.root.make_symlink(path, target)?,
            Kind::Char(major, minor) => self.root.make_node(path, SFlag::S_IFCHR, *major, *minor)?,
            Kind::Block(major, minor) => self.root.make_node(path, SFlag::S_IFBLK, *major, *minor)?,
            Kind::Fifo => self.root.make_node(path, SFlag::S_IFIFO, 0, 0)?,
            Kind::File { .. } | Kind::HardLink(_) => {}
        }
        let (at, name) = self.root.parent_and_name(path)?;
        let owner = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
        fchownat(at, name, Some(owner.0), Some(owner.1), AtFlags::AT_SYMLINK_NOFOLLOW)?;
        if !matches!(entry.kind, Kind::Symlink(_)) {
            // The path was created just now and is not a link; no other process works in this directory.
            fchmodat(at, name, Mode::from_bits_truncate(entry.mode), FchmodatFlags::FollowSymlink)?;
        }
        // `xattr::set` does not follow a link at the last component, and the prefix is an open directory.
        let path = Path::new("/proc/self/fd").join(at.as_raw_fd().to_string()).join(name);
        set_extended(at, entry, |attribute, value| xattr::set(&path, attribute, value))?;
        times::set_at(at, name, entry.mtime)?;
        Ok(())
    }

    /// Sets the deferred times of directories. Returns the implied directories and the links to lower layers.
    fn finish(&mut self) -> Result<(Vec<String>, Vec<Link>), UnpackError> {
        let links = std::mem::take(&mut self.waiting).finish(&self.root)?;
        for (path, mtime) in std::mem::take(&mut self.times) {
            // A later entry of the archive may have replaced the directory.
            if let Ok(directory) = self.root.existing_directory(&path)
                && let Err(error) = times::set(&directory, mtime)
            {
                tracing::debug!(path = path.display(), %error, "cannot set a directory's time");
            }
        }
        let implied = self.root.take_implied();
        self.inodes += implied.len() as u64;
        self.bytes += implied.len() as u64 * BLOCK;
        Ok((implied.iter().map(PlainPath::display).collect(), links))
    }
}

fn parse_path(path: &[u8]) -> Result<PlainPath, UnpackError> {
    PlainPath::new(path)
        .ok_or_else(|| UnpackError::Escape { path: String::from_utf8_lossy(path).into_owned() })
}

/// Copies the current entry's data, at most `range.length` bytes, from the reader's buffer to `range.offset` of the file.
fn copy_data<I: BufRead>(
    archive: &mut Stream<I>,
    file: &mut File,
    range: Segment,
    path: &PlainPath,
) -> Result<(), UnpackError> {
    let mut copied = 0;
    archive.get_mut().set_content(true);
    while copied < range.length {
        let data = archive.data().map_err(archive_error)?;
        if data.is_empty() {
            break;
        }
        let take = data.len().min(usize::try_from(range.length - copied).unwrap_or(usize::MAX));
        file.write_all(&data[..take]).map_err(errno).map_err(|source| cannot_write(path, source))?;
        archive.consume(take);
        copied += take as u64;
    }
    archive.get_mut().set_content(false);
    archive.get_mut().record_content(path, range.offset, copied);
    Ok(())
}

fn cannot_write(path: &PlainPath, source: Errno) -> UnpackError {
    match source {
        // The path itself, or the target of a link, is too long.
        Errno::ENAMETOOLONG => UnpackError::TooLarge(TooLarge::Path),
        source => UnpackError::Write { path: path.display(), source },
    }
}

fn cannot_make(path: &PlainPath, cannot: MakeError) -> UnpackError {
    match cannot {
        MakeError::Kernel(source) => cannot_write(path, source),
        MakeError::Attribute { name, bytes } => UnpackError::Attribute { path: path.display(), name, bytes },
    }
}

fn no_recipe(error: io::Error) -> UnpackError {
    UnpackError::Write { path: "the recipe".to_owned(), source: errno(error) }
}

/// Converts an I/O error of the stream. The stream reports an exceeded limit as an I/O error, too.
fn read_error(error: io::Error) -> UnpackError {
    match error.downcast::<TooLarge>() {
        Ok(limit) => UnpackError::TooLarge(limit),
        Err(error) => UnpackError::Read(error),
    }
}

fn archive_error(error: ArchiveError) -> UnpackError {
    match error {
        ArchiveError::Read(error) => read_error(error),
        other => UnpackError::Archive(other),
    }
}

/// Finds the entry of an unpacked layer at a path. Symbolic links are not followed.
pub(crate) fn inspect_path(files: &Path, path: &str) -> LayerEntry {
    let Some(plain) = PlainPath::new(path.as_bytes()) else { return LayerEntry::Absent };
    match Root::open(files).and_then(|root| root.stat_without_links(&plain)) {
        Ok(stat) if root::is_directory(&stat) => LayerEntry::Directory(Attributes {
            mode: stat.st_mode & 0o7777,
            uid: stat.st_uid,
            gid: stat.st_gid,
        }),
        Ok(_) | Err(Errno::ELOOP | Errno::ENOTDIR) => LayerEntry::Other,
        Err(_) => LayerEntry::Absent,
    }
}

/// Whether the kernel supports safe unpacking: openat2(2) with `RESOLVE_IN_ROOT`.
pub(crate) fn supported() -> bool {
    root::supported()
}

#[cfg(test)]
mod tests;
