//! Small JSON files that survive a power failure: temporary file, fsync, rename, fsync of the directory. Written only
//! when the content changed. An unreadable file is renamed and does not prevent the start.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::private_file;

/// Writes a record with mode 0600, if it differs from the stored record.
pub(crate) fn write<T: Serialize>(path: &Path, value: &T) -> io::Result<()> {
    let content = serde_json::to_vec(value)?;
    if fs::read(path).is_ok_and(|now| now == content) {
        return Ok(());
    }
    private_file::replace(path, &content)
}

/// Reads a record. An unreadable record is renamed to `*.bad` with a warning.
pub(crate) fn read<T: DeserializeOwned>(path: &Path) -> Option<T> {
    let content = fs::read(path).ok()?;
    match parse(&content) {
        Ok(value) => Some(value),
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "renaming an unreadable record");
            let _ = fs::rename(path, path.with_extension("bad"));
            None
        }
    }
}

/// Parses JSON as text, as `kube` does. For JSON as bytes, the compiler would generate the code of each type again.
pub(crate) fn parse<T: DeserializeOwned>(content: &[u8]) -> serde_json::Result<T> {
    let text = std::str::from_utf8(content).map_err(<serde_json::Error as serde::de::Error>::custom)?;
    serde_json::from_str(text)
}

/// The records in a directory, without temporary and `*.bad` files.
pub(crate) fn list(dir: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(dir) else { return Vec::new() };
    let mut paths: Vec<PathBuf> = entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|e| e == "json"))
        .collect();
    paths.sort();
    paths
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_read_back_and_a_torn_one_is_set_aside() {
        let dir = tempdir();
        let path = dir.join("a.json");
        write(&path, &vec![1, 2]).unwrap();
        assert_eq!(read::<Vec<i32>>(&path), Some(vec![1, 2]));
        fs::write(&path, b"[1,").unwrap();
        assert_eq!(read::<Vec<i32>>(&path), None);
        assert!(list(&dir).is_empty() && dir.join("a.bad").exists());
        fs::write(&path, b"\"\xff\"").unwrap();
        assert_eq!(read::<String>(&path), None, "not UTF-8");
        fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn an_unchanged_record_is_not_written_again() {
        let dir = tempdir();
        let path = dir.join("a.json");
        write(&path, &"x").unwrap();
        let before = fs::metadata(&path).unwrap().modified().unwrap();
        write(&path, &"x").unwrap();
        assert_eq!(fs::metadata(&path).unwrap().modified().unwrap(), before);
        fs::remove_dir_all(dir).unwrap();
    }

    fn tempdir() -> PathBuf {
        let dir = std::env::temp_dir().join(format!("coracle-record-{}", uuid::Uuid::new_v4()));
        fs::create_dir_all(&dir).unwrap();
        dir
    }
}
