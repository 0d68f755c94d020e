//! The format of a backup. A backup has all durable entries of the embedded store at one revision, as they are on disk.
//! Encrypted entries stay encrypted.
//!
//! | part | bytes |
//! |---|---|
//! | head | magic, version (4), newest revision (8), end of the reserved revisions (8) |
//! | entry, repeated | 1, length of the key (4), key, length of the value (4), value |
//! | end | 0, number of entries (8), SHA-256 of all bytes before it (32) |
//!
//! Numbers are big-endian.

use std::io::{self, BufRead, Read as _};

use bytes::Bytes;
use sha2::{Digest as _, Sha256};

use crate::Error;

const MAGIC: &[u8; 16] = b"coracle backup\r\n";
/// The version of the format. Backups of other versions are refused.
const VERSION: u32 = 1;
/// Approximate size of one chunk of a backup, in bytes.
const CHUNK_BYTES: usize = 64 << 10;
/// Maximum size of a key and of a value in bytes. A larger length in a backup shows that the backup is damaged. The
/// engine ends the process for a longer or an empty key.
const MAX_KEY: usize = (64 << 10) - 1;
const MAX_VALUE: usize = 64 << 20;
/// Maximum revision in a backup. With a greater revision, the revisions of the restored store would overflow.
pub(crate) const MAX_REVISION: u64 = 1 << 62;

/// Revisions of a store at a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackupHead {
    /// The newest revision. The backup has all durable commits up to it.
    pub revision: u64,
    /// The end of the reserved revisions. No commit has a greater revision.
    pub(crate) reserved: u64,
}

/// Revision and size of a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackupSummary {
    /// The newest revision. The backup has all durable commits up to it.
    pub revision: u64,
    /// Number of entries.
    pub entries: u64,
}

/// A key, and its value as it is on disk.
pub(crate) type Record = (Box<[u8]>, Box<[u8]>);

/// A running backup, as an iterator over its bytes in chunks. Reading blocks on the disk.
pub struct Backup {
    records: Box<dyn Iterator<Item = Result<Record, Error>> + Send>,
    hash: Sha256,
    /// The head. `None` after it was returned.
    head: Option<BackupHead>,
    entries: u64,
    is_ended: bool,
}

/// Reads a backup and verifies it.
pub(crate) struct Reader<R> {
    source: R,
    hash: Sha256,
    pub(crate) head: BackupHead,
    entries: u64,
}

// === impl Backup ===

impl Backup {
    pub(crate) fn new(
        head: BackupHead,
        records: impl Iterator<Item = Result<Record, Error>> + Send + 'static,
    ) -> Self {
        let records = Box::new(records);
        Self { records, hash: Sha256::new(), head: Some(head), entries: 0, is_ended: false }
    }
}

impl Iterator for Backup {
    type Item = Result<Bytes, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.is_ended {
            return None;
        }
        let mut chunk = Vec::with_capacity(CHUNK_BYTES);
        if let Some(head) = self.head.take() {
            chunk.extend_from_slice(MAGIC);
            chunk.extend_from_slice(&VERSION.to_be_bytes());
            chunk.extend_from_slice(&head.revision.to_be_bytes());
            chunk.extend_from_slice(&head.reserved.to_be_bytes());
        }
        while chunk.len() < CHUNK_BYTES {
            match self.records.next() {
                Some(Ok((key, value))) => {
                    self.entries += 1;
                    chunk.push(1);
                    for bytes in [&key, &value] {
                        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
                        chunk.extend_from_slice(&length.to_be_bytes());
                        chunk.extend_from_slice(bytes);
                    }
                }
                Some(Err(error)) => {
                    self.is_ended = true;
                    return Some(Err(error));
                }
                None => {
                    self.is_ended = true;
                    chunk.push(0);
                    chunk.extend_from_slice(&self.entries.to_be_bytes());
                    self.hash.update(&chunk);
                    let hash = std::mem::take(&mut self.hash).finalize();
                    chunk.extend_from_slice(&hash);
                    return Some(Ok(chunk.into()));
                }
            }
        }
        self.hash.update(&chunk);
        Some(Ok(chunk.into()))
    }
}

// === impl Reader ===

impl<R: BufRead> Reader<R> {
    /// Reads the head.
    pub(crate) fn new(source: R) -> Result<Self, Error> {
        let head = BackupHead { revision: 0, reserved: 0 };
        let mut reader = Self { source, hash: Sha256::new(), head, entries: 0 };
        if reader.array::<16>()? != *MAGIC {
            return Err(invalid("it is not a backup of coracle"));
        }
        let version = u32::from_be_bytes(reader.array()?);
        if version != VERSION {
            return Err(invalid(format!(
                "its version is {version}, and this program reads version {VERSION}"
            )));
        }
        let revision = u64::from_be_bytes(reader.array()?);
        reader.head = BackupHead { revision, reserved: u64::from_be_bytes(reader.array()?) };
        if revision.max(reader.head.reserved) > MAX_REVISION {
            return Err(invalid("it is damaged: its revision is too large"));
        }
        Ok(reader)
    }

    /// The next entry. `None` at the end of a complete backup, after its checksum was verified.
    pub(crate) fn next(&mut self) -> Result<Option<Record>, Error> {
        let [tag] = self.array()?;
        match tag {
            1 => {
                self.entries += 1;
                let key = self.sized(MAX_KEY)?;
                if key.is_empty() {
                    return Err(invalid("it is damaged: an entry has no key"));
                }
                Ok(Some((key, self.sized(MAX_VALUE)?)))
            }
            0 => self.end().map(|()| None),
            _ => Err(invalid("it is damaged: an entry has an unknown type")),
        }
    }

    pub(crate) fn summary(&self) -> BackupSummary {
        BackupSummary { revision: self.head.revision, entries: self.entries }
    }

    fn end(&mut self) -> Result<(), Error> {
        let entries = u64::from_be_bytes(self.array()?);
        let expected = std::mem::take(&mut self.hash).finalize();
        let mut found = [0; 32];
        self.source.read_exact(&mut found).map_err(|error| read_error(&error))?;
        if entries != self.entries || found != expected[..] {
            return Err(invalid("it is damaged: its checksum is wrong"));
        }
        let mut rest = [0];
        match self.source.read(&mut rest) {
            Ok(0) => Ok(()),
            Ok(_) => Err(invalid("it is damaged: bytes follow its end")),
            Err(error) => Err(read_error(&error)),
        }
    }

    fn sized(&mut self, max: usize) -> Result<Box<[u8]>, Error> {
        let length = usize::try_from(u32::from_be_bytes(self.array()?)).unwrap_or(usize::MAX);
        if length > max {
            return Err(invalid("it is damaged: an entry is too long"));
        }
        // Memory is allocated as the bytes are read, because the length may be damaged.
        let mut bytes = Vec::new();
        let limit = u64::try_from(length).unwrap_or(u64::MAX);
        let read =
            self.source.by_ref().take(limit).read_to_end(&mut bytes).map_err(|error| read_error(&error))?;
        if read < length {
            return Err(read_error(&io::ErrorKind::UnexpectedEof.into()));
        }
        self.hash.update(&bytes);
        Ok(bytes.into())
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let mut bytes = [0; N];
        self.source.read_exact(&mut bytes).map_err(|error| read_error(&error))?;
        self.hash.update(bytes);
        Ok(bytes)
    }
}

/// Reads a whole backup and verifies its checksum.
///
/// # Errors
/// [`Error::Backup`] if the backup is incomplete, damaged, or of another version.
pub fn verify_backup(source: impl BufRead) -> Result<BackupSummary, Error> {
    let mut reader = Reader::new(source)?;
    while reader.next()?.is_some() {}
    Ok(reader.summary())
}

/// The error of a backup that cannot be restored.
pub(crate) fn invalid(detail: impl Into<String>) -> Error {
    Error::Backup { detail: detail.into() }
}

fn read_error(error: &io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => invalid("it is incomplete"),
        _ => invalid(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written() -> Vec<u8> {
        let record = |n: u8| Ok((vec![b'k', n].into(), vec![n; 1000].into()));
        let backup = Backup::new(BackupHead { revision: 7, reserved: 9 }, (0..200).map(record));
        backup.flat_map(|chunk| chunk.unwrap().to_vec()).collect()
    }

    #[test]
    fn a_backup_is_read_as_written() {
        let bytes = written();
        assert_eq!(verify_backup(&bytes[..]).unwrap(), BackupSummary { revision: 7, entries: 200 });
        let mut reader = Reader::new(&bytes[..]).unwrap();
        assert_eq!(reader.head, BackupHead { revision: 7, reserved: 9 });
        let (key, value) = reader.next().unwrap().unwrap();
        assert_eq!((&key[..], value.len()), (&b"k\0"[..], 1000));
    }

    #[test]
    fn each_damage_is_found() {
        let bytes = written();
        for at in (0..bytes.len()).step_by(997).chain(bytes.len() - 45..bytes.len()) {
            let mut damaged = bytes.clone();
            damaged[at] ^= 0x40;
            assert!(verify_backup(&damaged[..]).is_err(), "changed at {at}");
            assert!(verify_backup(&bytes[..at]).is_err(), "cut at {at}");
        }
        assert!(verify_backup(&[&bytes[..], b"x"].concat()[..]).is_err());
    }

    #[test]
    fn a_backup_with_a_key_or_a_revision_that_no_store_has_is_refused() {
        let written = |revision: u64, reserved: u64, key: &[u8]| {
            let record = Ok((key.into(), vec![0_u8; 16].into()));
            let backup = Backup::new(BackupHead { revision, reserved }, std::iter::once(record));
            let bytes: Vec<u8> = backup.flat_map(|chunk| chunk.unwrap().to_vec()).collect();
            verify_backup(&bytes[..]).is_ok()
        };
        assert!(written(7, 9, &[b'k'; MAX_KEY]));
        assert!(!written(7, 9, &[b'k'; MAX_KEY + 1]) && !written(7, 9, b""));
        assert!(!written(7, u64::MAX, b"k") && !written(u64::MAX, 9, b"k"));
    }
}
