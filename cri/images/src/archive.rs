//! Streaming reader of tar archives: ustar, pax and GNU headers, long names, sparse files.
//!
//! The parser is part of this crate, because archives are untrusted. Every header that is kept in memory has a size
//! limit. The caller must check paths, link targets, attribute names and device numbers.

use std::io::{self, BufRead};

use tar::Header;

mod pax;

use pax::Pax;

const BLOCK: usize = 512;
/// Maximum bytes of an extended header or a long name. Linux limits paths to 4 KiB and attributes to 64 KiB.
const HEADER_MAX: u64 = 1 << 20;
/// Maximum number of segments of one sparse file.
const SEGMENTS_MAX: usize = 1 << 16;

/// An archive that is read sequentially.
pub(crate) struct Archive<R> {
    input: R,
    /// Unread bytes of the current entry's data.
    data_left: u64,
    /// Padding after the data up to the next block, in bytes.
    padding: u64,
}

/// One entry of the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) path: Vec<u8>,
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime: Mtime,
    pub(crate) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Type of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Kind {
    File {
        /// Size of the file including holes.
        size: u64,
        /// Segments with stored data, for a sparse file.
        sparse: Option<Vec<Segment>>,
    },
    Directory,
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
    Char(u32, u32),
    Block(u32, u32),
    Fifo,
}

/// A range of a sparse file whose data is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// A modification time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Mtime {
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: u32,
}

/// Errors of reading an archive.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ArchiveError {
    #[error("cannot read the archive")]
    Read(#[source] io::Error),
    #[error("the archive is damaged: {0}")]
    Damaged(&'static str),
    #[error("the archive has an entry of the unsupported type {0:?}")]
    Type(char),
}

// === impl Archive ===

impl<R: BufRead> Archive<R> {
    /// Reads an archive from the input.
    pub(crate) fn new(input: R) -> Archive<R> {
        Archive { input, data_left: 0, padding: 0 }
    }

    /// The next entry, or `None` at the end. Skips the rest of the current entry's data.
    pub(crate) fn next_entry(&mut self) -> Result<Option<Entry>, ArchiveError> {
        let mut pax = Pax::default();
        let (mut long_path, mut long_link) = (None, None);
        loop {
            self.skip_data()?;
            let Some(header) = self.header()? else { return Ok(None) };
            let size = header.entry_size().map_err(|_bad| ArchiveError::Damaged("bad size"))?;
            self.expect_data(size);
            match header.entry_type().as_byte() {
                b'x' | b'X' => pax = Pax::parse(&self.read_data()?)?,
                // Skip global headers, as other readers of layers do. In practice they contain only comments.
                b'g' => {}
                b'L' => long_path = Some(trim_nul(self.read_data()?)),
                b'K' => long_link = Some(trim_nul(self.read_data()?)),
                _ => {
                    let path = long_path.take();
                    let link = long_link.take();
                    return self.entry(&header, pax, path, link).map(Some);
                }
            }
        }
    }

    /// Buffered bytes of the current entry's data; empty at its end.
    pub(crate) fn data(&mut self) -> Result<&[u8], ArchiveError> {
        if self.data_left == 0 {
            return Ok(&[]);
        }
        let left = self.data_left;
        let buffer = self.input.fill_buf().map_err(ArchiveError::Read)?;
        if buffer.is_empty() {
            return Err(ArchiveError::Read(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(&buffer[..buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX))])
    }

    /// Marks bytes of [`Archive::data`] as read.
    pub(crate) fn consume(&mut self, count: usize) {
        self.input.consume(count);
        self.data_left -= count as u64;
    }

    /// The input at its current position.
    pub(crate) fn get_ref(&self) -> &R {
        &self.input
    }

    /// Mutable access to the input, for hints about the data.
    pub(crate) fn get_mut(&mut self) -> &mut R {
        &mut self.input
    }

    /// The input after the last read byte.
    pub(crate) fn into_inner(self) -> R {
        self.input
    }

    fn entry(
        &mut self,
        header: &Header,
        pax: Pax,
        long_path: Option<Vec<u8>>,
        long_link: Option<Vec<u8>>,
    ) -> Result<Entry, ArchiveError> {
        if let Some(size) = pax.size {
            self.expect_data(size);
        }
        let path =
            pax.path.clone().or(long_path).unwrap_or_else(|| trim_nul(header.path_bytes().into_owned()));
        let kind = self.kind(header, &pax, long_link, &path)?;
        if !matches!(kind, Kind::File { .. }) {
            // Only files have data. The size of other types is ignored, as in Go's reader.
            self.expect_data(0);
        }
        let id = |field: io::Result<u64>| {
            let id = field.map_err(|_bad| ArchiveError::Damaged("bad owner"))?;
            u32::try_from(id).map_err(|_large| ArchiveError::Damaged("owner out of range"))
        };
        let seconds = header.mtime().unwrap_or_default();
        Ok(Entry {
            path,
            kind,
            mode: header.mode().map_err(|_bad| ArchiveError::Damaged("bad mode"))? & 0o7777,
            uid: id(pax.uid.map_or_else(|| header.uid(), Ok))?,
            gid: id(pax.gid.map_or_else(|| header.gid(), Ok))?,
            // GNU tar writes times before 1970 as two's complement.
            mtime: pax.mtime.unwrap_or(Mtime { seconds: seconds.cast_signed(), nanoseconds: 0 }),
            xattrs: pax.xattrs,
        })
    }

    fn kind(
        &mut self,
        header: &Header,
        pax: &Pax,
        long_link: Option<Vec<u8>>,
        path: &[u8],
    ) -> Result<Kind, ArchiveError> {
        let link = || {
            let field = || header.link_name_bytes().map(|l| trim_nul(l.into_owned()));
            pax.link.clone().or(long_link).or_else(field).ok_or(ArchiveError::Damaged("link without target"))
        };
        let device = || {
            let numbers = (header.device_major(), header.device_minor());
            let (Ok(major), Ok(minor)) = numbers else { return Err(ArchiveError::Damaged("bad device")) };
            Ok((major.unwrap_or(0), minor.unwrap_or(0)))
        };
        Ok(match header.entry_type().as_byte() {
            // Before POSIX a directory was a file whose name ends in a slash.
            b'0' | 0 if path.ends_with(b"/") => Kind::Directory,
            b'0' | b'7' | 0 => self.file(pax)?,
            b'S' => self.old_gnu_sparse(header)?,
            b'1' => Kind::HardLink(link()?),
            b'2' => Kind::Symlink(link()?),
            b'3' => device().map(|(major, minor)| Kind::Char(major, minor))?,
            b'4' => device().map(|(major, minor)| Kind::Block(major, minor))?,
            b'5' => Kind::Directory,
            b'6' => Kind::Fifo,
            other => return Err(ArchiveError::Type(other.into())),
        })
    }

    fn file(&mut self, pax: &Pax) -> Result<Kind, ArchiveError> {
        let Some(real) = pax.sparse_size else {
            return Ok(Kind::File { size: self.data_left, sparse: None });
        };
        let segments = if pax.sparse_map_in_data { self.sparse_map()? } else { pax.sparse.clone() };
        check_segments(&segments, real, self.data_left)?;
        Ok(Kind::File { size: real, sparse: Some(segments) })
    }

    /// Reads the map of a sparse file of format 1.0: decimal numbers, one per line, before the data.
    fn sparse_map(&mut self) -> Result<Vec<Segment>, ArchiveError> {
        let mut taken = 0_u64;
        let count = self.sparse_number(&mut taken)?;
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        if count > SEGMENTS_MAX {
            return Err(ArchiveError::Damaged("too many sparse segments"));
        }
        let mut segments = Vec::with_capacity(count);
        for _ in 0..count {
            let offset = self.sparse_number(&mut taken)?;
            let length = self.sparse_number(&mut taken)?;
            segments.push(Segment { offset, length });
        }
        self.skip(taken.next_multiple_of(BLOCK as u64) - taken)?;
        Ok(segments)
    }

    fn sparse_number(&mut self, taken: &mut u64) -> Result<u64, ArchiveError> {
        const BAD: ArchiveError = ArchiveError::Damaged("bad sparse map");
        let mut number = 0_u64;
        loop {
            let byte = *self.data()?.first().ok_or(BAD)?;
            self.consume(1);
            *taken += 1;
            match byte {
                b'\n' => return Ok(number),
                b'0'..=b'9' => {
                    let digit = u64::from(byte - b'0');
                    number = number.checked_mul(10).and_then(|n| n.checked_add(digit)).ok_or(BAD)?;
                }
                _ => return Err(BAD),
            }
        }
    }

    /// Sparse files of the old GNU format: four segments in the header, more in following blocks.
    fn old_gnu_sparse(&mut self, header: &Header) -> Result<Kind, ArchiveError> {
        const BAD: ArchiveError = ArchiveError::Damaged("bad sparse header");
        let gnu = header.as_gnu().ok_or(BAD)?;
        let mut segments = Vec::new();
        let mut more = gnu.is_extended();
        let mut add = |headers: &[tar::GnuSparseHeader]| {
            for piece in headers.iter().filter(|piece| !piece.is_empty()) {
                let (Ok(offset), Ok(length)) = (piece.offset(), piece.length()) else { return Err(BAD) };
                segments.push(Segment { offset, length });
            }
            if segments.len() > SEGMENTS_MAX { Err(BAD) } else { Ok(()) }
        };
        add(&gnu.sparse)?;
        while more {
            let mut extension = tar::GnuExtSparseHeader::new();
            self.input.read_exact(extension.as_mut_bytes()).map_err(ArchiveError::Read)?;
            add(extension.sparse())?;
            more = extension.is_extended();
        }
        let size = gnu.real_size().map_err(|_bad| BAD)?;
        check_segments(&segments, size, self.data_left)?;
        Ok(Kind::File { size, sparse: Some(segments) })
    }

    /// The next header block. `None` at the end of the archive: a block of zeros or the end of the input.
    fn header(&mut self) -> Result<Option<Header>, ArchiveError> {
        let mut header = Header::new_old();
        let block = header.as_mut_bytes();
        let mut filled = 0;
        while filled < BLOCK {
            match self.input.read(&mut block[filled..]) {
                Ok(0) if filled == 0 => return Ok(None),
                Ok(0) => return Err(ArchiveError::Damaged("the archive ends inside a header")),
                Ok(n) => filled += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(ArchiveError::Read(e)),
            }
        }
        if block.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        check_sum(&header)?;
        Ok(Some(header))
    }

    fn expect_data(&mut self, size: u64) {
        self.data_left = size;
        self.padding = size.wrapping_neg() % BLOCK as u64;
    }

    fn read_data(&mut self) -> Result<Vec<u8>, ArchiveError> {
        if self.data_left > HEADER_MAX {
            return Err(ArchiveError::Damaged("an extended header of over 1 MiB"));
        }
        let mut whole = Vec::new();
        loop {
            let piece = self.data()?;
            if piece.is_empty() {
                return Ok(whole);
            }
            whole.extend_from_slice(piece);
            let taken = piece.len();
            self.consume(taken);
        }
    }

    fn skip_data(&mut self) -> Result<(), ArchiveError> {
        self.skip(self.data_left)?;
        // The padding of the last entry can be missing: some writers omit it.
        let mut padding = std::mem::take(&mut self.padding);
        while padding > 0 {
            let available = self.input.fill_buf().map_err(ArchiveError::Read)?.len() as u64;
            if available == 0 {
                break;
            }
            let step = available.min(padding);
            self.input.consume(usize::try_from(step).unwrap_or(usize::MAX));
            padding -= step;
        }
        Ok(())
    }

    fn skip(&mut self, mut count: u64) -> Result<(), ArchiveError> {
        while count > 0 {
            let available = self.data()?.len() as u64;
            if available == 0 {
                return Err(ArchiveError::Damaged("an entry is shorter than its header says"));
            }
            let step = available.min(count);
            self.consume(usize::try_from(step).unwrap_or(usize::MAX));
            count -= step;
        }
        Ok(())
    }
}

/// Checks that segments are in order, inside the file, and cover all stored data.
fn check_segments(segments: &[Segment], size: u64, stored: u64) -> Result<(), ArchiveError> {
    const BAD: ArchiveError = ArchiveError::Damaged("sparse segments do not fit their file");
    let (mut end, mut sum) = (0_u64, 0_u64);
    for segment in segments {
        if segment.offset < end {
            return Err(BAD);
        }
        end = segment.offset.checked_add(segment.length).ok_or(BAD)?;
        sum += segment.length;
    }
    if end <= size && sum == stored { Ok(()) } else { Err(BAD) }
}

/// Checks the sum of all bytes, in which the checksum field counts as spaces. Some old writers summed signed
/// bytes.
fn check_sum(header: &Header) -> Result<(), ArchiveError> {
    const WRONG: ArchiveError =
        ArchiveError::Damaged("a header has a wrong checksum, or the file is not a tar archive");
    let expected = header.cksum().map_err(|_no_number| WRONG)?;
    let bytes = header.as_bytes();
    let covered = |at: usize| if (148..156).contains(&at) { b' ' } else { bytes[at] };
    let unsigned: u32 = (0..BLOCK).map(|at| u32::from(covered(at))).sum();
    let signed: i32 = (0..BLOCK).map(|at| i32::from(covered(at).cast_signed())).sum();
    if expected == unsigned || i64::from(expected) == i64::from(signed) { Ok(()) } else { Err(WRONG) }
}

fn trim_nul(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(end) = bytes.iter().position(|b| *b == 0) {
        bytes.truncate(end);
    }
    bytes
}

#[cfg(test)]
mod tests;
