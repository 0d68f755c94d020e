//! Reads of files that a container, an image, a plugin or a user controls. Only regular files are read, up to a limit.
//! A symlink in the last component is not followed, and a FIFO does not block.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::OFlag;
use nix::sys::stat::Mode;

/// Opens a regular file for reading.
///
/// # Errors
/// As open(2); `InvalidInput` for another file type, ELOOP for a symlink.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    // With musl, the standard library removes O_PATH from custom flags.
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let found = File::from(nix::fcntl::open(path, flags, Mode::empty())?);
    if found.metadata()?.is_symlink() {
        return Err(io::Error::from_raw_os_error(libc::ELOOP));
    }
    open_found(&found)
}

/// Opens with these options, and rejects other file types. O_NONBLOCK: opening a FIFO does not wait for its other
/// end. The container must not be able to replace the file: a device is opened before it is rejected.
pub(crate) fn checked(options: &mut OpenOptions, path: &Path) -> io::Result<File> {
    let file = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

/// Reads a whole file of at most `max` bytes.
///
/// # Errors
/// Like [`open`]; `FileTooLarge` for a larger file.
pub(crate) fn read(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    all(open(path)?, max)
}

/// Reads a whole file of at most `max` bytes that was found with `O_PATH`. The path below `/proc` leads to the found
/// file, even if its name belongs to another file now.
///
/// # Errors
/// As open(2); `InvalidInput` for another file type, `FileTooLarge` for a larger file.
pub(crate) fn read_found(found: &File, max: u64) -> io::Result<Vec<u8>> {
    all(open_found(found)?, max)
}

/// Opens a regular file that was found with `O_PATH`.
fn open_found(found: &File) -> io::Result<File> {
    // The type is checked before the file is opened: opening a device can have effects.
    if !found.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    // O_NONBLOCK: a lease on the file does not delay its opening.
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
    options.open(format!("/proc/self/fd/{}", found.as_raw_fd()))
}

/// Whether a read failed because of the file: it is too large, a link, of another type, or cannot be parsed. After
/// another error of the kernel the content can be intact, and a later read can succeed.
pub(crate) fn is_damage(error: &io::Error) -> bool {
    use io::ErrorKind::{FileTooLarge, InvalidData, InvalidInput, UnexpectedEof};
    match error.raw_os_error() {
        // ELOOP is a symbolic link, ENXIO a socket (open(2)).
        Some(number) => matches!(number, libc::ELOOP | libc::ENXIO),
        None => matches!(error.kind(), FileTooLarge | InvalidInput | InvalidData | UnexpectedEof),
    }
}

/// Reads a text file of an administrator, of at most `max` bytes. Symlinks are followed, and pipes are read: a
/// shell's process substitution is a pipe.
///
/// # Errors
/// As open(2); `FileTooLarge` for a larger file, `InvalidData` for text that is not UTF-8.
pub fn read_text(path: &Path, max: u64) -> io::Result<String> {
    String::from_utf8(all(File::open(path)?, max)?)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn all(file: File, max: u64) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    // The size is not trusted: the file may grow while it is read.
    file.take(max.saturating_add(1)).read_to_end(&mut content)?;
    if content.len() as u64 > max {
        return Err(io::Error::new(io::ErrorKind::FileTooLarge, format!("larger than {max} bytes")));
    }
    Ok(content)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn a_large_file_a_link_a_fifo_and_a_device_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        std::fs::write(at("file"), "12345").unwrap();
        assert_eq!(read(&at("file"), 5).unwrap(), b"12345");
        assert_eq!(read(&at("file"), 4).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        // A sparse file of a terabyte costs no more than the limit.
        std::fs::File::create(at("sparse")).unwrap().set_len(1 << 40).unwrap();
        assert_eq!(read(&at("sparse"), 1 << 20).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        symlink(at("file"), at("link")).unwrap();
        assert_eq!(read(&at("link"), 5).unwrap_err().raw_os_error(), Some(libc::ELOOP));
        assert_eq!(read_text(&at("link"), 5).unwrap(), "12345");
        assert_eq!(read_text(&at("link"), 4).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
        nix::unistd::mkfifo(&at("fifo"), Mode::S_IRWXU).unwrap();
        assert_eq!(read(&at("fifo"), 5).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        assert_eq!(read(Path::new("/dev/zero"), 5).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        // open(2) of a socket fails with ENXIO, so the type was checked before.
        let _socket = std::os::unix::net::UnixListener::bind(at("socket")).unwrap();
        assert_eq!(read(&at("socket"), 5).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
