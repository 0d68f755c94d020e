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
        let error = remove_file(dir.path()).expect_err("a directory is no file").to_string();
        assert_eq!(error, format!("cannot remove {}", dir.path().display()));
    }
}
