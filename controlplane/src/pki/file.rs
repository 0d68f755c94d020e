//! Atomic writes of small files: temporary name, sync, rename, sync of the directory.

use std::{
    fs::{File, OpenOptions},
    io::Write as _,
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use super::PkiError;

pub(super) fn read(path: &Path) -> Result<String, PkiError> {
    std::fs::read_to_string(path).map_err(|source| PkiError::Read { path: path.to_owned(), source })
}

pub(super) fn write(path: &Path, text: &str, mode: u32) -> Result<(), PkiError> {
    replace(path, text, mode).map_err(|source| PkiError::Write { path: path.to_owned(), source })
}

fn replace(path: &Path, text: &str, mode: u32) -> std::io::Result<()> {
    let temporary = path.with_extension("tmp");
    // A temporary file of an interrupted write may have another mode, so it is removed first.
    match std::fs::remove_file(&temporary) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    std::fs::rename(&temporary, path)?;
    match path.parent() {
        Some(directory) => File::open(directory)?.sync_all(),
        None => Ok(()),
    }
}
