//! Errors of files, with the operation and the path.

use std::io;
use std::path::Path;

use crate::error::Error;

/// The error of an operation on a file, from the error of its system call.
pub(crate) fn failed(action: &'static str, path: &Path) -> impl Fn(io::Error) -> Error + use<> {
    let path = path.to_owned();
    move |source| Error::File { action, path: path.clone(), source }
}

/// Removes a file, if it exists.
pub(crate) fn remove_file(path: &Path) -> Result<(), Error> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Writes a temporary file, prepares it, and renames it to its path. So a reader sees either the old or the complete
/// new content. A failed write leaves no temporary file: on a full disk it would occupy the space that other writes
/// need.
pub(crate) fn replace(
    path: &Path,
    text: &[u8],
    prepare: impl FnOnce(&Path) -> io::Result<()>,
) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let written = std::fs::write(&temporary, text).and_then(|()| prepare(&temporary));
    let replaced = written.and_then(|()| std::fs::rename(&temporary, path));
    if replaced.is_err() {
        let _ = std::fs::remove_file(&temporary);
    }
    replaced
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_absent_file_is_removed_and_an_error_names_the_path() {
        let dir = tempfile::tempdir().expect("a directory");
        let file = dir.path().join("file");
        std::fs::write(&file, "").expect("written");
        for _ in 0..2 {
            remove_file(&file).expect("absent afterwards");
        }
        let error = remove_file(dir.path()).expect_err("a directory is not a file").to_string();
        assert_eq!(error, format!("cannot remove {}", dir.path().display()));
    }

    #[test]
    fn a_failed_replacement_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("a.json");
        replace(&path, b"old", |_| Ok(())).expect("written");
        assert!(replace(&path, b"new", |_| Err(io::Error::other("no space"))).is_err());
        assert_eq!(std::fs::read(&path).expect("kept"), b"old");
        std::fs::remove_file(&path).expect("removed");
        std::fs::create_dir(&path).expect("a directory is not replaced by a file");
        assert!(replace(&path, b"new", |_| Ok(())).is_err());
        assert!(!path.with_extension("new").exists());
    }
}
