//! A file in a volume, read by the node. Containers can write it.

use std::fs::File;
use std::io;
use std::path::Path;

use super::sub_path::{self, SubPathError};
use crate::bounded;

/// Reads a regular file of at most `max` bytes, at a relative path in the volume. None if the file does not exist. A
/// symlink is followed only inside the volume.
///
/// # Errors
/// As open(2); `InvalidInput` for another file type, `FileTooLarge` for a larger file, `Other` for a path that leads
/// out of the volume.
pub(crate) fn read(volume: &Path, path: &str, max: u64) -> io::Result<Option<Vec<u8>>> {
    let found = sub_path::open_existing(volume, path).map_err(|error| match error {
        SubPathError::Escape(_) => io::Error::other("the path leads out of the volume"),
        SubPathError::Io { source, .. } => source,
        other => io::Error::other(other),
    })?;
    found.map(|found| bounded::read_found(&File::from(found), max)).transpose()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use nix::sys::stat::Mode;

    use super::*;

    #[test]
    fn a_file_that_a_container_wrote_cannot_lead_out_of_the_volume_block_or_fill_the_memory() {
        let dir = tempfile::tempdir().expect("directory");
        let volume = dir.path().join("volume");
        let at = |name: &str| volume.join(name);
        fs::create_dir_all(at("inner")).expect("volume");
        fs::write(dir.path().join("secret"), "s").expect("file");
        fs::write(at("inner/file"), "12345").expect("file");
        symlink("inner/file", at("inside")).expect("symlink");
        symlink("../secret", at("outside")).expect("symlink");
        symlink(dir.path(), at("absolute")).expect("symlink");
        symlink("/proc/self/environ", at("proc")).expect("symlink");
        nix::unistd::mkfifo(&at("fifo"), Mode::S_IRWXU).expect("FIFO");
        File::create(at("sparse")).and_then(|file| file.set_len(1 << 40)).expect("file");

        let of = |path: &str| read(&volume, path, 5);
        for path in ["inner/file", "inside", "./inner/file"] {
            assert_eq!(of(path).expect(path).as_deref(), Some(&b"12345"[..]), "{path}");
        }
        assert_eq!(of("missing").expect("no error"), None);
        for path in ["outside", "absolute/secret", "proc", "../secret", "/etc/passwd", "inner/../../secret"] {
            assert_eq!(of(path).expect_err(path).kind(), io::ErrorKind::Other, "{path}");
        }
        for path in ["fifo", "inner", ""] {
            assert_eq!(of(path).expect_err(path).kind(), io::ErrorKind::InvalidInput, "{path}");
        }
        for (path, max) in [("sparse", 1 << 20), ("inner/file", 4)] {
            let error = read(&volume, path, max).expect_err(path);
            assert_eq!(error.kind(), io::ErrorKind::FileTooLarge, "{path}");
        }
    }
}
