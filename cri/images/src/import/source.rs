//! The files of an archive or a layout directory, by name. An archive is indexed once and read in place.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read, Seek, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;

use super::ImportError;
use crate::archive::{Archive, ArchiveError, Kind};
use crate::layers::{Layers, Workshop};

/// Most files of an archive that are looked at.
const FILES_MAX: usize = 100_000;
/// Most links that may lead to one another.
const LINKS_MAX: usize = 40;

/// Where files come from.
pub(super) enum Source {
    Directory(PathBuf),
    Archive {
        path: PathBuf,
        file: Arc<File>,
        /// Offset and size of each file.
        index: HashMap<String, (u64, u64)>,
        /// Where a compressed archive was unpacked to; gone with this.
        scratch: Option<Workshop>,
    },
}

/// A stretch of a file.
struct Section {
    file: Arc<File>,
    offset: u64,
    left: u64,
}

/// A file that counts what was read, to know where each entry's data begins.
struct Positioned<R> {
    input: R,
    position: u64,
}

// === impl Source ===

impl Source {
    /// Opens a layout directory or an archive. A compressed archive is uncompressed into a scratch file first, for
    /// its files come in any order.
    pub(super) fn open(path: &Path, layers: &Layers) -> Result<Source, ImportError> {
        let error = |source| ImportError::Read { path: path.to_owned(), source };
        if std::fs::metadata(path).map_err(error)?.is_dir() {
            return Ok(Source::Directory(path.to_owned()));
        }
        let mut file = File::open(path).map_err(error)?;
        let mut magic = [0; 4];
        let n = file.read(&mut magic).map_err(error)?;
        file.rewind().map_err(error)?;
        let input = BufReader::with_capacity(128 << 10, file);
        let (file, scratch) = match magic[..n] {
            [0x1f, 0x8b, ..] => uncompressed(MultiGzDecoder::new(input), layers, path)?,
            [0x28, 0xb5, 0x2f, 0xfd] => {
                uncompressed(zstd::Decoder::with_buffer(input).map_err(error)?, layers, path)?
            }
            _ => (input.into_inner(), None),
        };
        let index = index(&file).map_err(|failure| match failure {
            ArchiveError::Read(source) => ImportError::Read { path: path.to_owned(), source },
            _ => ImportError::Layout { reason: "it is no tar archive" },
        })?;
        Ok(Source::Archive { path: path.to_owned(), file: Arc::new(file), index, scratch })
    }

    /// Removes what it needed on disk. Blocks.
    pub(super) fn close(self) {
        if let Source::Archive { scratch: Some(scratch), .. } = self {
            scratch.discard();
        }
    }

    /// The size of a file; none if there is no such file.
    pub(super) fn size(&self, name: &str) -> Result<Option<u64>, ImportError> {
        match self {
            Source::Archive { index, .. } => Ok(index.get(&plain(name)).map(|(_, size)| *size)),
            Source::Directory(directory) => match std::fs::metadata(directory.join(plain(name))) {
                Ok(metadata) => Ok(Some(metadata.len())),
                Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(source) => Err(ImportError::Read { path: directory.join(plain(name)), source }),
            },
        }
    }

    /// A reader of a file; none if there is no such file.
    pub(super) fn reader(&self, name: &str) -> Result<Option<Box<dyn Read + Send>>, ImportError> {
        match self {
            Source::Archive { index, file, .. } => Ok(index.get(&plain(name)).map(|(offset, size)| {
                let section = Section { file: file.clone(), offset: *offset, left: *size };
                Box::new(section) as Box<dyn Read + Send>
            })),
            Source::Directory(directory) => {
                let path = directory.join(plain(name));
                match File::open(&path) {
                    Ok(file) => Ok(Some(Box::new(file))),
                    Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
                    Err(source) => Err(ImportError::Read { path, source }),
                }
            }
        }
    }

    /// The whole of a small file; none if there is no such file.
    pub(super) fn whole(&self, name: &str, max: u64) -> Result<Option<Vec<u8>>, ImportError> {
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
            Source::Directory(path) | Source::Archive { path, .. } => path,
        }
    }
}

fn uncompressed(
    mut input: impl Read,
    layers: &Layers,
    path: &Path,
) -> Result<(File, Option<Workshop>), ImportError> {
    let scratch = layers.workshop()?;
    let mut copy = || {
        let name = scratch.files().join("archive");
        let mut file = File::options().create_new(true).read(true).write(true).open(name)?;
        io::copy(&mut input, &mut file)?;
        file.flush()?;
        file.rewind()?;
        Ok(file)
    };
    match copy() {
        Ok(file) => Ok((file, Some(scratch))),
        Err(source) => {
            scratch.discard();
            Err(ImportError::Read { path: path.to_owned(), source })
        }
    }
}

/// Where the files of an archive are. Docker, before 25, saved a layer that it had written already as a link to that.
fn index(file: &File) -> Result<HashMap<String, (u64, u64)>, ArchiveError> {
    let (mut index, mut links) = (HashMap::new(), HashMap::new());
    let input = BufReader::with_capacity(128 << 10, file);
    let mut archive = Archive::new(Positioned { input, position: 0 });
    while let Some(entry) = archive.next_entry()? {
        let Ok(path) = String::from_utf8(entry.path) else { continue };
        let path = plain(&path);
        match entry.kind {
            Kind::File { size, sparse: None } => {
                links.remove(&path);
                index.insert(path, (archive.get_ref().position, size));
            }
            Kind::HardLink(target) => {
                links.extend(String::from_utf8(target).ok().map(|target| (path, plain(&target))));
            }
            Kind::Symlink(target) => {
                let target = String::from_utf8(target).ok().map(|target| beside(&path, &target));
                links.extend(target.map(|target| (path, target)));
            }
            _ => {}
        }
        if index.len() + links.len() > FILES_MAX {
            return Err(ArchiveError::Damaged("too many files"));
        }
    }
    let found: Vec<_> =
        links.keys().filter_map(|link| Some((link.clone(), follow(link, &links, &index)?))).collect();
    index.extend(found);
    Ok(index)
}

/// The file that a link leads to, if it does.
fn follow(
    link: &str,
    links: &HashMap<String, String>,
    index: &HashMap<String, (u64, u64)>,
) -> Option<(u64, u64)> {
    let targets = std::iter::successors(links.get(link), |target| links.get(*target));
    targets.take(LINKS_MAX).last().and_then(|target| index.get(target)).copied()
}

/// The name that a symbolic link means. What would climb out of the archive stays at its top.
fn beside(link: &str, target: &str) -> String {
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

/// A name without `./` and slashes at its front, and without anything that climbs.
fn plain(name: &str) -> String {
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
