//! Recipes: how to rebuild a layer's archive byte for byte from its unpacked files. A recipe has the position of each
//! file's content, and all other bytes of the archive (headers, padding, the end). Layers are not kept compressed, so
//! exports need the recipe, and a layer on disk can be verified with it.
//!
//! The file is a zstd stream of `R <length: u32> <bytes>` and `F <path length: u32> <path> <offset: u64> <length: u64>`,
//! numbers little-endian.

use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::root::{PlainPath, Root};

/// Raw bytes are written in chunks of about this size.
const PIECE: usize = 64 << 10;
/// Maximum length of a path that is read back (PATH_MAX of the kernel).
const PATH_MAX: u32 = 4096;
/// Window of the compressor, which determines its memory: 128 KiB.
const WINDOW_LOG: u32 = 17;

/// Writes a recipe during unpacking. The first error is returned at the end.
pub(super) struct Recorder {
    path: PathBuf,
    output: zstd::Encoder<'static, BufWriter<File>>,
    raw: Vec<u8>,
    failed: io::Result<()>,
}

/// A reader that records the bytes read, except file contents.
pub(super) struct RecordingReader<R> {
    input: BufReader<R>,
    recorder: Option<Recorder>,
    content: bool,
}

/// The rebuilt archive of a layer, as a reader.
pub(crate) struct Rebuilt {
    recipe: zstd::Decoder<'static, BufReader<File>>,
    root: Root,
    raw_left: u64,
    file: Option<io::Take<File>>,
}

// === impl Recorder ===

impl Recorder {
    /// Starts a recipe.
    pub(super) fn create(path: &Path) -> io::Result<Recorder> {
        let file = File::create(path)?;
        // The compressors of higher levels are not in the product (scripts/build).
        let mut output = zstd::Encoder::new(BufWriter::new(file), 1)?;
        output.window_log(WINDOW_LOG)?;
        Ok(Recorder { path: path.to_owned(), output, raw: Vec::new(), failed: Ok(()) })
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.raw.extend_from_slice(bytes);
        if self.raw.len() >= PIECE {
            self.flush();
        }
    }

    /// Records a range of a file's content as the next part of the archive.
    fn content(&mut self, path: &PlainPath, offset: u64, length: u64) {
        self.flush();
        let path = path.as_bytes();
        let mut record = vec![b'F'];
        record.extend_from_slice(&length_of(path));
        record.extend_from_slice(path);
        record.extend_from_slice(&offset.to_le_bytes());
        record.extend_from_slice(&length.to_le_bytes());
        self.write(&record);
    }

    fn flush(&mut self) {
        if self.raw.is_empty() {
            return;
        }
        let raw = std::mem::take(&mut self.raw);
        self.write(b"R");
        self.write(&length_of(&raw));
        self.write(&raw);
        self.raw = raw;
        self.raw.clear();
    }

    fn write(&mut self, bytes: &[u8]) {
        if self.failed.is_ok() {
            self.failed = self.output.write_all(bytes);
        }
    }

    /// Ends the recipe.
    pub(super) fn finish(mut self) -> io::Result<()> {
        self.flush();
        self.failed?;
        self.output.finish()?.flush()
    }

    /// Deletes a recipe that would not reproduce the archive.
    pub(super) fn discard(self) -> io::Result<()> {
        std::fs::remove_file(self.path)
    }
}

/// The length as it is stored. Chunks and paths are far smaller than `u32::MAX`.
fn length_of(bytes: &[u8]) -> [u8; 4] {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX).to_le_bytes()
}

// === impl RecordingReader ===

impl<R: Read> RecordingReader<R> {
    /// Reads through a buffer. Records the bytes if there is a recorder.
    pub(super) fn new(input: BufReader<R>, recorder: Option<Recorder>) -> RecordingReader<R> {
        RecordingReader { input, recorder, content: false }
    }

    /// Sets whether the bytes consumed from now on are a file's content.
    pub(super) fn set_content(&mut self, content: bool) {
        self.content = content;
    }

    /// Records the range of the file whose content was just read.
    pub(super) fn record_content(&mut self, path: &PlainPath, offset: u64, length: u64) {
        if let Some(recorder) = self.recorder.as_mut().filter(|_| length > 0) {
            recorder.content(path, offset, length);
        }
    }

    /// The inner reader and the recorder.
    pub(super) fn into_parts(self) -> (R, Option<Recorder>) {
        (self.input.into_inner(), self.recorder)
    }
}

impl<R: Read> Read for RecordingReader<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let n = self.fill_buf()?.read(buffer)?;
        self.consume(n);
        Ok(n)
    }
}

impl<R: Read> BufRead for RecordingReader<R> {
    fn fill_buf(&mut self) -> io::Result<&[u8]> {
        self.input.fill_buf()
    }

    fn consume(&mut self, count: usize) {
        if let Some(recorder) = self.recorder.as_mut().filter(|_| !self.content) {
            recorder.raw(&self.input.buffer()[..count]);
        }
        self.input.consume(count);
    }
}

// === impl Rebuilt ===

impl Rebuilt {
    /// Opens the archive of the layer with this recipe and these files. Reads rebuild it.
    pub(crate) fn open(recipe: &Path, files: &Path) -> io::Result<Rebuilt> {
        let recipe = zstd::Decoder::new(File::open(recipe)?)?;
        Ok(Rebuilt { recipe, root: Root::open(files)?, raw_left: 0, file: None })
    }

    /// The length of the archive in bytes.
    pub(crate) fn length(recipe: &Path, files: &Path) -> io::Result<u64> {
        let mut rebuilt = Rebuilt::open(recipe, files)?;
        let mut length = 0;
        while let Some(record) = rebuilt.record()? {
            length += match record {
                Record::Raw(raw) => io::copy(&mut (&mut rebuilt.recipe).take(raw), &mut io::sink())?,
                Record::Content { length, .. } => length,
            };
        }
        Ok(length)
    }

    fn record(&mut self) -> io::Result<Option<Record>> {
        let mut tag = [0];
        if self.recipe.read(&mut tag)? == 0 {
            return Ok(None);
        }
        let length = u32::from_le_bytes(self.array()?);
        match tag {
            [b'R'] => Ok(Some(Record::Raw(length.into()))),
            [b'F'] if length <= PATH_MAX => {
                let mut path = vec![0; length as usize];
                self.recipe.read_exact(&mut path)?;
                let path = PlainPath::new(&path).ok_or(io::ErrorKind::InvalidData)?;
                let offset = u64::from_le_bytes(self.array()?);
                Ok(Some(Record::Content { path, offset, length: u64::from_le_bytes(self.array()?) }))
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.recipe.read_exact(&mut bytes)?;
        Ok(bytes)
    }
}

enum Record {
    Raw(u64),
    Content { path: PlainPath, offset: u64, length: u64 },
}

impl Read for Rebuilt {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            if self.raw_left > 0 {
                let n = (&mut self.recipe).take(self.raw_left).read(buffer)?;
                self.raw_left -= n as u64;
                return if n == 0 && !buffer.is_empty() {
                    Err(io::ErrorKind::UnexpectedEof.into())
                } else {
                    Ok(n)
                };
            }
            if let Some(file) = &mut self.file {
                match file.read(buffer)? {
                    0 if !buffer.is_empty() => self.file = None,
                    n => return Ok(n),
                }
            }
            match self.record()? {
                None => return Ok(0),
                Some(Record::Raw(length)) => self.raw_left = length,
                Some(Record::Content { path, offset, length }) => {
                    let mut file = self.root.existing_file(&path)?;
                    file.seek(SeekFrom::Start(offset))?;
                    self.file = Some(file.take(length));
                }
            }
        }
    }
}
