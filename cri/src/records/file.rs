//! Files of records: written to a temporary name and renamed, and read at the start.

use std::io::ErrorKind;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::error::Error;
use crate::json_file::{encode, make_dir, replace};

/// Version of the records that this program writes.
pub(super) const VERSION: u32 = 1;
/// Name of the file of a record in the directory of its object.
pub(super) const FILE: &str = "record.json";

/// The fields that records of every version have.
#[derive(Debug, Deserialize)]
struct Head {
    version: u32,
}

/// All records of one kind.
#[derive(Debug)]
pub(crate) struct Found<T> {
    pub(crate) readable: Vec<T>,
    /// Ids of directories without a readable record.
    pub(crate) lost: Vec<String>,
}

pub(super) fn write<T: Serialize>(dir: &Path, record: &T) -> Result<(), Error> {
    let path = dir.join(FILE);
    let bytes = encode(&path, record)?;
    match replace(&path, &bytes) {
        Err(Error::File { source, .. }) if source.kind() == ErrorKind::NotFound => {
            make_dir(dir)?;
            replace(&path, &bytes)
        }
        other => other,
    }
}

pub(super) fn remove(dir: &Path) -> Result<(), Error> {
    coracle_tree::remove(dir).map_err(Error::file("remove", dir))
}

/// Names of the entries of a directory.
///
/// # Errors
/// If the directory cannot be read completely. An object that is missing in the list would be removed.
pub(super) fn names(dir: &Path) -> Result<Vec<String>, Error> {
    let entries = std::fs::read_dir(dir).map_err(Error::file("list", dir))?;
    let mut names = Vec::new();
    for entry in entries {
        names.extend(entry.map_err(Error::file("list", dir))?.file_name().into_string().ok());
    }
    Ok(names)
}

pub(super) fn read(path: &Path) -> std::io::Result<Vec<u8>> {
    std::fs::read(path)
}

pub(super) fn load<T: DeserializeOwned>(
    dir: &Path,
    read: impl Fn(&Path) -> std::io::Result<Vec<u8>>,
) -> Result<Found<T>, Error> {
    let mut found = Found { readable: Vec::new(), lost: Vec::new() };
    for id in names(dir)? {
        let path = dir.join(&id).join(FILE);
        let bytes = match read(&path) {
            // The record is not lost, and its pod runs. The next start can read it.
            Err(source) if coracle_tree::is_refusal(&source) => {
                return Err(Error::file("read", &path)(source));
            }
            bytes => bytes.map_err(Error::file("read", &path)),
        };
        let record = bytes.and_then(|bytes| {
            if let Some(version) = later_version(&bytes) {
                return Err(Error::Later { path: path.clone(), version, known: VERSION });
            }
            serde_json::from_slice(&bytes).map_err(|source| Error::Format {
                doing: "decode",
                path: path.clone(),
                source,
            })
        });
        match record {
            Ok(record) => found.readable.push(record),
            Err(error @ Error::Later { .. }) => return Err(error),
            Err(error) => {
                warn!(id, error = error.chain(), "ignoring an unreadable record");
                found.lost.push(id);
            }
        }
    }
    Ok(found)
}

/// The version of a record, if a later version of this program has written it.
pub(super) fn later_version(record: &[u8]) -> Option<u32> {
    let head: Head = serde_json::from_slice(record).ok()?;
    Some(head.version).filter(|version| *version > VERSION)
}
