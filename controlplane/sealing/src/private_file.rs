//! Files with keys: only this user may have access to them.

use std::{
    fs::OpenOptions,
    io::{self, ErrorKind, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use nix::fcntl::OFlag;

use crate::Error;

/// Reads a file of at most `max_bytes`. `flags` are additional flags for open(2).
///
/// # Errors
/// The file cannot be read, is too large or is not a regular file, or other users own it or have access to it.
pub fn read(path: &Path, flags: OFlag, max_bytes: u64) -> Result<String, Error> {
    let failed = |source| Error::Read { path: path.to_owned(), source };
    // NONBLOCK, because opening a FIFO at this path would otherwise block the start.
    let flags = (flags | OFlag::O_NONBLOCK).bits();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    let user = nix::unistd::geteuid().as_raw();
    let mode = metadata.mode() & 0o7777;
    if !metadata.is_file() || mode & 0o077 != 0 || metadata.uid() != user {
        return Err(Error::Exposed { path: path.to_owned(), mode, owner: metadata.uid(), user });
    }
    let mut text = String::new();
    file.take(max_bytes + 1).read_to_string(&mut text).map_err(failed)?;
    if text.len() as u64 > max_bytes {
        let detail = format!("larger than {} KiB", max_bytes >> 10);
        return Err(failed(io::Error::new(ErrorKind::FileTooLarge, detail)));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn only_a_private_file_within_the_limit_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        let write = |text: &str, mode: u32| {
            std::fs::write(&path, text).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        };
        let read = || read(&path, OFlag::empty(), 1024);
        assert!(matches!(read(), Err(Error::Read { source, .. }) if source.kind() == ErrorKind::NotFound));
        write("key", 0o600);
        assert_eq!(read().unwrap(), "key");
        write("key", 0o640);
        assert!(matches!(read(), Err(Error::Exposed { mode: 0o640, .. })));
        write(&"k".repeat(1025), 0o600);
        assert!(
            matches!(read(), Err(Error::Read { source, .. }) if source.to_string() == "larger than 1 KiB")
        );
    }
}
