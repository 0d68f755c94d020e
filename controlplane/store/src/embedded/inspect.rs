//! Inspection of the store's files before the engine opens them.
//!
//! The engine considers unreadable data in a journal as the incomplete end of its last write. It truncates the journal
//! at that position, and all data after it is lost. A real incomplete end is followed by zeros, because journals are
//! allocated in advance. Other data means that the journal is damaged. A damaged store must not be opened as an empty
//! store. The files of a first start that was interrupted before the first entry are removed.

use std::{
    fs::{self, File, TryLockError},
    io::{self, BufRead, BufReader, ErrorKind, Read},
    path::Path,
};

use crate::Error;

/// Magic bytes of the known format, and of the end of each batch in a journal.
const MAGIC: [u8; 4] = *b"FJL\x03";

/// Checks the store in `path`. A locked or missing store is not checked: the engine handles it.
pub(super) fn inspect(path: &Path) -> Result<(), Error> {
    let failed = |source| Error::Open { path: path.to_owned(), source };
    let corrupt = |detail: String| Error::Corrupt { path: path.to_owned(), detail };
    let lock = match File::open(path.join("lock")) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        other => other.map_err(failed)?,
    };
    match lock.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => return Ok(()),
        Err(TryLockError::Error(error)) => return Err(failed(error)),
    }
    let journals = journals(path).map_err(failed)?;
    let version = read_optional(&path.join("version")).map_err(failed)?;
    if version.as_deref().is_none_or(<[u8]>::is_empty) {
        if path.join("keyspaces/0").exists() {
            return Err(corrupt("its file \"version\" is missing or empty".to_owned()));
        }
        if !journals.is_empty() {
            tracing::warn!(path = %path.display(), "repaired: removed the files of an interrupted first start");
        }
        for name in journals.iter().map(String::as_str).chain(version.map(|_| "version")) {
            fs::remove_file(path.join(name)).map_err(failed)?;
        }
        return Ok(());
    }
    if version.as_deref() != Some(&MAGIC) {
        return Ok(());
    }
    if journals.is_empty() {
        return Err(corrupt("its journal is missing".to_owned()));
    }
    for name in journals {
        let file = File::open(path.join(&name)).map_err(failed)?;
        match end(&mut BufReader::new(file)).map_err(failed)? {
            End::Whole => {}
            // The engine truncates the journal there.
            End::Torn(at) => {
                tracing::warn!(
                    journal = name,
                    at,
                    "repaired: removed an incomplete write, which was not acknowledged"
                );
            }
            End::Damaged(at) => {
                return Err(corrupt(format!("its journal \"{name}\" is unreadable at byte {at}")));
            }
        }
    }
    Ok(())
}

fn journals(path: &Path) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name();
        names.extend(name.to_str().filter(|name| name.ends_with(".jnl")).map(str::to_owned));
    }
    Ok(names)
}

fn read_optional(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs::read(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        other => other.map(Some),
    }
}

/// The end of a journal, with its offset in bytes.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// The journal ends with a complete batch.
    Whole,
    /// The journal ends with the beginning of a batch, because the process ended during the write.
    Torn(u64),
    /// The journal ends with other data.
    Damaged(u64),
}

fn end(journal: &mut impl BufRead) -> io::Result<End> {
    let (mut at, mut whole, mut data) = (0, 0, Vec::new());
    loop {
        match entry(journal, &mut data) {
            Ok(Some((tag, size))) => {
                at += size;
                // The end of a batch, or the entry that clears a keyspace.
                if matches!(tag, 3 | 4) {
                    whole = at;
                }
            }
            Ok(None) => return Ok(End::Damaged(at)),
            // Zeros and the end of the file are a valid end of the journal. But if the entry has a wrong length, it may
            // include later batches. Then the journal is damaged.
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                let includes_batches = data.windows(MAGIC.len()).any(|bytes| bytes == MAGIC);
                return Ok(match (includes_batches, at > whole) {
                    (true, _) => End::Damaged(at),
                    (false, true) => End::Torn(whole),
                    (false, false) => End::Whole,
                });
            }
            Err(error) => return Err(error),
        }
    }
}

/// Reads the next entry: returns its type and its size in bytes, and puts the value of an item into `data`. `None` if
/// the bytes are not an entry.
///
/// # Errors
/// `UnexpectedEof` at zeros and at the end of the file.
fn entry(journal: &mut impl BufRead, data: &mut Vec<u8>) -> io::Result<Option<(u8, u64)>> {
    let [tag] = take(journal)?;
    let size = match tag {
        0 => return Err(ErrorKind::UnexpectedEof.into()),
        // The start of a batch: number of entries, sequence number.
        1 => take::<12>(journal).map(|_| Some(13))?,
        2 => {
            let head: [u8; 20] = take(journal)?;
            let length = |at: usize, bytes: usize| {
                head[at..at + bytes].iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte))
            };
            let size = length(10, 2) + length(16, 4);
            data.clear();
            let found = journal.by_ref().take(size).read_to_end(data)?;
            if u64::try_from(found).is_ok_and(|found| found < size) {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            return Ok(Some((tag, 21 + size)));
        }
        // The end of a batch: checksum, which the engine checks, and magic.
        3 => {
            let tail: [u8; 12] = take(journal)?;
            (tail[8..] == MAGIC || tail.ends_with(&[0])).then_some(13)
        }
        4 => take::<8>(journal).map(|_| Some(9))?,
        _ => None,
    };
    data.clear();
    Ok(size.map(|size| (tag, size)))
}

fn take<const N: usize>(journal: &mut impl BufRead) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    journal.read_exact(&mut bytes)?;
    Ok(bytes)
}
