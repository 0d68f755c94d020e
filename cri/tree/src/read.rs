//! Reads files of untrusted processes.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// Reads a regular file of at most `most` bytes. Links are followed.
///
/// # Errors
/// `FileTooLarge` for a larger file. `InvalidInput` for anything but a regular file: a FIFO would block, and
/// a device may have no end.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    // The type is checked before the file is opened: opening a device can have effects. With musl, the standard library
    // removes O_PATH from custom flags.
    let place = File::from(rustix::fs::open(path, OFlags::PATH.union(OFlags::CLOEXEC), Mode::empty())?);
    if !place.metadata()?.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut options = File::options();
    options.read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    let file = options.open(format!("/proc/self/fd/{}", place.as_raw_fd()))?;
    let found = file.metadata()?;
    let too_large =
        || io::Error::new(ErrorKind::FileTooLarge, format!("the file is larger than {most} bytes"));
    if found.len() > most {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    // Files in /proc have length 0, and other files may grow.
    file.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { Err(too_large()) } else { Ok(bytes) }
}

/// Text of a file in /proc, such as the table of mounts. Bytes that are not UTF-8 become U+FFFD: users choose names in
/// such files, for example of mount points and processes.
///
/// # Errors
/// If the file cannot be read.
pub fn read_lossy(path: impl AsRef<Path>) -> io::Result<String> {
    let bytes = std::fs::read(path)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Whether the kernel refused to read a file. The process or the machine lacks descriptors or memory, or a permission
/// or a security module denies the access. The file may be intact: a later attempt can read it.
///
/// EIO is not a refusal. A bad sector persists, and one unreadable file must not prevent every later start.
#[must_use]
pub fn is_refusal(error: &io::Error) -> bool {
    let is_shortage =
        |errno: Errno| matches!(errno, Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN);
    let is_denial = |errno: Errno| matches!(errno, Errno::ACCESS | Errno::PERM);
    Errno::from_io_error(error).is_some_and(|errno| is_shortage(errno) || is_denial(errno))
}

/// The last `most` bytes of a log; empty if it cannot be read.
#[must_use]
pub fn read_end(path: &Path, most: u64) -> String {
    let end = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(most)))?;
        let mut bytes = Vec::new();
        file.take(most).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    String::from_utf8_lossy(&end().unwrap_or_default()).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_descriptors_or_rights_does_not_mean_a_damaged_file() {
        for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::ACCESS, Errno::PERM] {
            assert!(is_refusal(&errno.into()), "{errno}");
        }
        for errno in [Errno::NOENT, Errno::IO, Errno::ISDIR] {
            assert!(!is_refusal(&errno.into()), "{errno}");
        }
        assert!(!is_refusal(&io::Error::other("no error of the kernel")));
    }

    #[test]
    fn a_name_that_is_not_utf_8_hides_no_other_text() {
        let dir = tempfile::tempdir().expect("directory");
        let table = dir.path().join("mountinfo");
        std::fs::write(&table, b"30 1 0:5 / /media/\xff rw\n31 1 0:6 / /sys rw\n").expect("write");
        let text = read_lossy(&table).expect("read");
        assert_eq!(text.lines().nth(1), Some("31 1 0:6 / /sys rw"));
    }

    #[test]
    fn too_large_and_irregular_files_are_refused() {
        let dir = tempfile::tempdir().expect("directory");
        let path = dir.path().join("file");
        std::fs::write(&path, "12345").expect("write");
        assert_eq!(read(&path, 5).expect("read"), b"12345");
        assert_eq!(read(&path, 4).expect_err("too large").kind(), ErrorKind::FileTooLarge);
        assert_eq!(read_end(&path, 2), "45");
        File::create(&path).and_then(|file| file.set_len(1 << 40)).expect("sparse");
        assert_eq!(read(&path, 1 << 20).expect_err("too large").kind(), ErrorKind::FileTooLarge);
        let fifo = dir.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("fifo");
        let socket = dir.path().join("socket");
        // open(2) of a socket fails with ENXIO, so the type was checked before.
        let _socket = std::os::unix::net::UnixListener::bind(&socket).expect("socket");
        for other in [fifo.as_path(), &socket, Path::new("/dev/zero"), dir.path()] {
            assert_eq!(read(other, 9).expect_err("no file").kind(), ErrorKind::InvalidInput, "{other:?}");
        }
    }
}
