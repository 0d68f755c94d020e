//! Reads a file that somebody else wrote.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use rustix::fs::OFlags;

/// The content of a regular file of at most `most` bytes. Links are followed.
///
/// # Errors
/// `FileTooLarge` for a larger file, `InvalidInput` for what is no regular file: a FIFO would wait for its writer, and
/// a device may never end.
pub fn read(path: &Path, most: u64) -> io::Result<Vec<u8>> {
    let flags = OFlags::NONBLOCK.union(OFlags::NOCTTY).bits().cast_signed();
    let file = File::options().read(true).custom_flags(flags).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() {
        return Err(io::Error::new(ErrorKind::InvalidInput, "it is no regular file"));
    }
    let too_large = || io::Error::new(ErrorKind::FileTooLarge, format!("it is larger than {most} bytes"));
    if found.len() > most {
        return Err(too_large());
    }
    let mut bytes = Vec::new();
    // Files of /proc say that they are empty, and others may grow.
    file.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most { Err(too_large()) } else { Ok(bytes) }
}

/// The end of a log of at most `most` bytes; empty when it cannot be read.
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
    fn what_is_too_large_or_no_file_is_refused() {
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
        for other in [fifo.as_path(), Path::new("/dev/zero"), dir.path()] {
            assert_eq!(read(other, 9).expect_err("no file").kind(), ErrorKind::InvalidInput, "{other:?}");
        }
    }
}
