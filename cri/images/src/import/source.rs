//! The files of an archive or a layout directory, by name. An archive is indexed once and then read in place.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;
use nix::errno::Errno;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

use super::ImportError;
use crate::archive::{Archive, ArchiveError, Kind};
use crate::config::Limits;
use crate::layers::{Layers, UnpackDir};

/// Maximum number of files in an archive.
const FILES_MAX: usize = 100_000;
/// Maximum bytes of the names of all files and links. A single name can have a megabyte.
const NAMES_MAX: usize = 64 << 20;
/// Maximum length of a chain of links.
const LINKS_MAX: usize = 40;

/// Origin of the files.
pub(super) enum Source {
    Directory {
        path: PathBuf,
        root: File,
    },
    Archive {
        path: PathBuf,
        file: Arc<File>,
        index: HashMap<String, ArchivedFile>,
        /// The uncompressed copy of a compressed archive. Deleted with this value.
        scratch: Option<UnpackDir>,
    },
}

/// The place of a file in an archive.
#[derive(Clone, Copy)]
pub(super) struct ArchivedFile {
    /// Bytes before the file's data.
    offset: u64,
    /// Bytes of the file.
    size: u64,
}

/// A range of a file.
struct Section {
    file: Arc<File>,
    offset: u64,
    left: u64,
}

/// A reader that counts the bytes read, to know the offset of each entry's data.
struct Positioned<R> {
    input: R,
    position: u64,
}

// === impl Source ===

impl Source {
    /// Opens a layout directory or an archive. A compressed archive is uncompressed into a scratch file
    /// first, because its files are read in any order.
    pub(super) fn open(path: &Path, layers: &Layers, limits: &Limits) -> Result<Source, ImportError> {
        // A pipe must not block the node.
        let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
        let mut file = opened.map_err(ImportError::Archive)?;
        let metadata = file.metadata().map_err(ImportError::Archive)?;
        if metadata.is_dir() {
            return Ok(Source::Directory { path: path.to_owned(), root: file });
        }
        if !metadata.is_file() {
            return Err(ImportError::Layout { reason: "it is not a regular file" });
        }
        let mut magic = [0; 4];
        let packed = metadata.len();
        let most = packed.saturating_mul(limits.ratio).max(limits.ratio_from);
        let n = file.read(&mut magic).map_err(ImportError::Archive)?;
        file.rewind().map_err(ImportError::Archive)?;
        let input = BufReader::with_capacity(128 << 10, file);
        let (file, scratch) = match magic[..n] {
            [0x1f, 0x8b, ..] => uncompressed(MultiGzDecoder::new(input), layers, most)?,
            [0x28, 0xb5, 0x2f, 0xfd] => {
                let decoder = zstd::Decoder::with_buffer(input).map_err(ImportError::Archive)?;
                uncompressed(decoder, layers, most)?
            }
            _ => (input.into_inner(), None),
        };
        let index = index(&file, FILES_MAX, NAMES_MAX).map_err(|failure| match failure {
            ArchiveError::Read(source) => ImportError::Archive(source),
            ArchiveError::Damaged(reason) => ImportError::Layout { reason },
            ArchiveError::Type(_) => ImportError::Layout { reason: "it has an entry of an unsupported type" },
        })?;
        Ok(Source::Archive { path: path.to_owned(), file: Arc::new(file), index, scratch })
    }

    /// Deletes the scratch file. Blocks.
    pub(super) fn close(self) {
        if let Source::Archive { scratch: Some(scratch), .. } = self {
            scratch.discard();
        }
    }

    /// The size of a file; `None` if it does not exist.
    pub(super) fn size(&self, name: &str) -> Result<Option<u64>, ImportError> {
        match self {
            Source::Archive { index, .. } => Ok(index.get(&normalize(name)).map(|found| found.size)),
            Source::Directory { path, root } => {
                let size = open_within(root, name).and_then(|file| Ok(file.metadata()?.len()));
                unless_absent(size, path, name)
            }
        }
    }

    /// A reader of a file; `None` if it does not exist.
    pub(super) fn reader(&self, name: &str) -> Result<Option<Box<dyn Read + Send>>, ImportError> {
        match self {
            Source::Archive { index, file, .. } => Ok(index.get(&normalize(name)).map(|found| {
                let section = Section { file: file.clone(), offset: found.offset, left: found.size };
                Box::new(section) as Box<dyn Read + Send>
            })),
            Source::Directory { path, root } => {
                let file = unless_absent(open_within(root, name), path, name)?;
                Ok(file.map(|file| Box::new(file) as Box<dyn Read + Send>))
            }
        }
    }

    /// The content of a small file; `None` if it does not exist.
    pub(super) fn read_small(&self, name: &str, max: u64) -> Result<Option<Vec<u8>>, ImportError> {
        let Some(reader) = self.reader(name)? else { return Ok(None) };
        let mut whole = Vec::new();
        let error = |source| ImportError::Read { path: self.path().join(name), source };
        reader.take(max + 1).read_to_end(&mut whole).map_err(error)?;
        if whole.len() as u64 > max {
            return Err(ImportError::TooLarge { path: name.to_owned(), max });
        }
        Ok(Some(whole))
    }

    fn path(&self) -> &Path {
        match self {
            Source::Directory { path, .. } | Source::Archive { path, .. } => path,
        }
    }
}

/// Opens a file of a layout directory. The directory may belong to a user, who can replace its files by links and pipes
/// at any time. So no link leads out of the directory, and only regular files are opened.
fn open_within(root: &File, name: &str) -> io::Result<File> {
    // On 32-bit machines openat2(2) opens files above 2 GiB only with this flag.
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC | OFlag::O_LARGEFILE;
    let within = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    let (path, how) = (normalize(name), OpenHow::new().flags(flags).resolve(within));
    let opened = coracle_tree::open_despite_renames(|| openat2(root, Path::new(&path), how));
    let file = match opened {
        Err(Errno::EXDEV) => return Err(io::Error::other("a link leads out of the layout directory")),
        opened => File::from(opened?),
    };
    if file.metadata()?.is_file() { Ok(file) } else { Err(io::Error::other("it is not a regular file")) }
}

/// Converts the result of an access to a file: `None` if the file does not exist.
fn unless_absent<T>(found: io::Result<T>, directory: &Path, name: &str) -> Result<Option<T>, ImportError> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(ImportError::Read { path: directory.join(normalize(name)), source }),
    }
}

/// Writes the archive uncompressed to a scratch file. `most` is the maximum number of bytes, which stops decompression
/// bombs.
fn uncompressed(
    input: impl Read,
    layers: &Layers,
    most: u64,
) -> Result<(File, Option<UnpackDir>), ImportError> {
    let scratch = layers.unpack_dir()?;
    let mut input = input.take(most.saturating_add(1));
    let mut copy = || {
        let name = scratch.files().join("archive");
        let mut file = File::options().create_new(true).read(true).write(true).open(name)?;
        let bytes = io::copy(&mut input, &mut file)?;
        file.flush()?;
        file.rewind()?;
        Ok((file, bytes))
    };
    match copy() {
        Ok((_, bytes)) if bytes > most => {
            scratch.discard();
            Err(ImportError::TooLarge { path: "the unpacked archive".to_owned(), max: most })
        }
        Ok((file, _)) => Ok((file, Some(scratch))),
        Err(source) => {
            scratch.discard();
            Err(ImportError::Archive(source))
        }
    }
}

/// The files of an archive by name. Docker before 25 stored a repeated layer as a link to the first copy.
fn index(
    file: &File,
    most_files: usize,
    most_bytes: usize,
) -> Result<HashMap<String, ArchivedFile>, ArchiveError> {
    let (mut index, mut links) = (HashMap::new(), HashMap::new());
    let mut bytes = 0;
    let input = BufReader::with_capacity(128 << 10, file);
    let mut archive = Archive::new(Positioned { input, position: 0 });
    while let Some(entry) = archive.next_entry()? {
        let Ok(path) = String::from_utf8(entry.path) else { continue };
        let path = normalize(&path);
        bytes += path.len();
        match entry.kind {
            Kind::File { size, sparse: None } => {
                links.remove(&path);
                index.insert(path, ArchivedFile { offset: archive.get_ref().position, size });
            }
            Kind::HardLink(target) => {
                bytes += target.len();
                links.extend(String::from_utf8(target).ok().map(|target| (path, normalize(&target))));
            }
            Kind::Symlink(target) => {
                bytes += target.len();
                let target = String::from_utf8(target).ok().map(|target| link_target(&path, &target));
                links.extend(target.map(|target| (path, target)));
            }
            _ => {}
        }
        if index.len() + links.len() > most_files || bytes > most_bytes {
            return Err(ArchiveError::Damaged("it has over 100000 files, or over 64 MiB of file names"));
        }
    }
    let found: Vec<_> =
        links.keys().filter_map(|link| Some((link.clone(), follow(link, &links, &index)?))).collect();
    index.extend(found);
    Ok(index)
}

/// The file at the end of a chain of links, if there is one.
fn follow(
    link: &str,
    links: &HashMap<String, String>,
    index: &HashMap<String, ArchivedFile>,
) -> Option<ArchivedFile> {
    let targets = std::iter::successors(links.get(link), |target| links.get(*target));
    targets.take(LINKS_MAX).last().and_then(|target| index.get(target)).copied()
}

/// The target of a symbolic link, relative to the archive's root. `..` never leads above the root.
fn link_target(link: &str, target: &str) -> String {
    let from =
        if target.starts_with('/') { "" } else { link.rsplit_once('/').map_or("", |(parent, _)| parent) };
    let mut parts: Vec<&str> = from.split('/').filter(|part| !part.is_empty()).collect();
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            part => parts.push(part),
        }
    }
    parts.join("/")
}

/// A normalised name: without leading `./` and slashes, and without `..`.
fn normalize(name: &str) -> String {
    let parts = name.split('/').filter(|part| !matches!(*part, "" | "." | ".."));
    parts.collect::<Vec<_>>().join("/")
}

// === impl Section ===

impl Read for Section {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = buffer.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let n = self.file.read_at(&mut buffer[..most], self.offset)?;
        if n == 0 && self.left > 0 && most > 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.offset += n as u64;
        self.left -= n as u64;
        Ok(n)
    }
}

// === impl Positioned ===

impl Read for Positioned<BufReader<&File>> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.input.read(buffer)?;
        self.position += n as u64;
        Ok(n)
    }
}

impl BufRead for Positioned<BufReader<&File>> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.input.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        self.input.consume(count);
        self.position += count as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_a_layout_is_opened_while_other_files_are_renamed() {
        let dir = tempfile::tempdir().expect("directory");
        std::fs::create_dir(dir.path().join("inner")).expect("directory");
        std::fs::write(dir.path().join("inner/file"), "x").expect("file");
        let link = "../inner/".repeat(10);
        std::os::unix::fs::symlink(link.trim_end_matches('/'), dir.path().join("inner/in")).expect("link");
        let (root, a, b) =
            (File::open(dir.path()).expect("open"), dir.path().join("a"), dir.path().join("b"));
        std::fs::write(&a, "x").expect("file");
        std::thread::scope(|scope| {
            let renaming = scope.spawn(|| {
                for _ in 0..50_000 {
                    std::fs::rename(&a, &b).and_then(|()| std::fs::rename(&b, &a)).expect("rename");
                }
            });
            while !renaming.is_finished() {
                open_within(&root, "inner/in/file").expect("it exists");
            }
        });
    }

    #[test]
    fn the_number_of_files_and_the_bytes_of_their_names_are_limited() {
        let mut archive = tar::Builder::new(tempfile::tempfile().expect("file"));
        for number in 0..10 {
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            header.set_mode(0o644);
            header.set_uid(0);
            header.set_gid(0);
            header.set_mtime(0);
            header.set_cksum();
            let name = format!("{number}/{}", "x".repeat(200));
            archive.append_data(&mut header, name, io::empty()).expect("entry");
        }
        let mut file = archive.into_inner().expect("archive");
        let mut read = |files, bytes| {
            file.rewind().expect("rewind");
            index(&file, files, bytes).map(|index| index.len()).ok()
        };
        assert_eq!(read(10, 2020), Some(10));
        assert_eq!(read(9, 2020), None);
        assert_eq!(read(10, 2019), None);
    }
}
