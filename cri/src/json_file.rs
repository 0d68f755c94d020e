//! JSON files. A file is replaced as a whole: a reader sees the old or the new contents.

use std::path::Path;

use serde::Serialize;

use crate::error::Error;

/// Replaces a file by the JSON of a value. A reader sees the old or the new contents.
pub(crate) fn replace_json<T: Serialize>(path: &Path, value: &T) -> Result<(), Error> {
    replace(path, &encode(path, value)?)
}

/// Replaces a file: a reader sees the old or the new contents.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let temporary = path.with_extension("new");
    let written = crate::shim_client::file::write_private(&temporary, bytes);
    let written = written.map_err(Error::file("write", &temporary));
    let replaced =
        written.and_then(|()| std::fs::rename(&temporary, path).map_err(Error::file("rename into", path)));
    if replaced.is_err() {
        // On a full disk the incomplete file would occupy the space that other writes need.
        let _ = std::fs::remove_file(&temporary);
    }
    replaced
}

/// Creates a directory and its parents.
pub(crate) fn make_dir(dir: &Path) -> Result<(), Error> {
    std::fs::create_dir_all(dir).map_err(Error::file("create directory", dir))
}

/// The JSON of a value. The error names `path`.
pub(crate) fn encode<T: Serialize>(path: &Path, value: &T) -> Result<Vec<u8>, Error> {
    serde_json::to_vec(value).map_err(|source| Error::Format {
        doing: "encode",
        path: path.to_owned(),
        source,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_write_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("record.json");
        std::fs::create_dir(&path).expect("a directory is not replaced by a file");
        assert!(replace(&path, b"{}").is_err());
        assert!(!path.with_extension("new").exists());
    }
}
