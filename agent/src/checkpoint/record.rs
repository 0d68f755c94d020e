//! Content of records: the format, the decryption and the parser.

use std::io;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::{Checkpoint, Kind, files};
use crate::json_file;

/// A record that was read from its file.
pub(super) struct Opened<T> {
    pub(super) name: String,
    pub(super) value: T,
    /// SHA-256 of the content.
    pub(super) digest: [u8; 32],
}

/// Content of a file before encryption.
#[derive(Serialize, Deserialize)]
pub(super) struct Record<T> {
    /// Version of this format.
    pub(super) version: u32,
    pub(super) name: String,
    pub(super) value: T,
}

pub(super) const VERSION: u32 = 1;

// === impl Checkpoint ===

impl Checkpoint {
    /// Decrypts and parses a file. `None` if the file is absent or invalid. An invalid file is renamed.
    pub(super) fn read<T: DeserializeOwned>(&self, kind: Kind, path: &Path) -> io::Result<Option<Opened<T>>> {
        let Some(sealed) = files::read(path)? else { return Ok(None) };
        match self.shared.keys.open(&sealed, &context(kind, path)) {
            Ok(content) => {
                let digest = Sha256::digest(&content).into();
                Ok(self.parse(path, &content).map(|(name, value)| Opened { name, value, digest }))
            }
            Err(error) => {
                files::quarantine(path, &error);
                Ok(None)
            }
        }
    }

    pub(super) fn parse<T: DeserializeOwned>(&self, path: &Path, content: &[u8]) -> Option<(String, T)> {
        let record: Result<Record<T>, _> = json_file::parse(content);
        match record {
            Ok(record) if record.version == VERSION => Some((record.name, record.value)),
            Ok(record) => {
                let version = record.version;
                files::quarantine(
                    path,
                    &format!("its version is {version}, this program supports {VERSION}"),
                );
                None
            }
            Err(error) => {
                files::quarantine(path, &error);
                None
            }
        }
    }
}

/// Associated data of a record: its kind and file name, so that no record can replace another.
pub(super) fn context(kind: Kind, path: &Path) -> Vec<u8> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    format!("coracle-agent-checkpoint/{}/{name}", kind.directory()).into_bytes()
}
