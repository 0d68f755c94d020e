//! The tar archive of a checkpoint, and its unnamed output file.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use nix::fcntl::AtFlags;
use nix::unistd::linkat;
use sha2::{Digest, Sha256};
use tar::{Builder, HeaderMode};

/// Archives a directory to a file without a name, which disappears when it is closed. Returns the file and its digest.
pub(super) fn write(directory: &Path, parent: &Path) -> io::Result<(File, String)> {
    let to = Hashing { file: BufWriter::new(unnamed(parent)?), hash: Sha256::new() };
    let Hashing { file, hash } = archived(directory, to)?;
    let file = file.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.sync_all()?;
    Ok((file, hex::encode(hash.finalize())))
}

/// Archives a directory to a file and syncs it to the disk.
pub(super) fn fill(directory: &Path, file: File) -> io::Result<()> {
    let file = archived(directory, BufWriter::new(file))?;
    file.into_inner().map_err(io::IntoInnerError::into_error)?.sync_all()
}

fn archived<W: Write>(directory: &Path, to: W) -> io::Result<W> {
    let mut archive = builder(to);
    archive.append_dir_all("", directory)?;
    archive.into_inner()
}

/// Creates a file without a name in a directory.
pub(super) fn unnamed(parent: &Path) -> io::Result<File> {
    File::options().write(true).mode(0o600).custom_flags(libc::O_TMPFILE).open(parent)
}

/// Gives a file its name. An existing file is an error.
pub(super) fn name(file: &File, location: &Path) -> io::Result<()> {
    let unnamed = format!("/proc/self/fd/{}", file.as_raw_fd());
    linkat(
        nix::fcntl::AT_FDCWD,
        unnamed.as_str(),
        nix::fcntl::AT_FDCWD,
        location,
        AtFlags::AT_SYMLINK_FOLLOW,
    )?;
    Ok(())
}

/// The SHA-256 digest of a file.
pub(super) fn digest(path: &Path) -> io::Result<String> {
    let mut hashing = Hashing { file: io::sink(), hash: Sha256::new() };
    io::copy(&mut File::open(path)?, &mut hashing)?;
    Ok(hex::encode(hashing.hash.finalize()))
}

/// A writer that computes the digest.
struct Hashing<W> {
    file: W,
    hash: Sha256,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.file.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

pub(super) fn builder<W: Write>(to: W) -> Builder<W> {
    let mut archive = Builder::new(to);
    archive.follow_symlinks(false);
    archive.mode(HeaderMode::Complete);
    archive
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::MetadataExt;

    use super::*;

    #[test]
    fn an_archive_matches_its_digest() {
        let dir = tempfile::tempdir().expect("directory");
        let from = dir.path().join("from");
        fs::create_dir_all(from.join("sub")).expect("make");
        fs::write(from.join("sub/file"), "text").expect("write");
        let (file, sha256) = write(&from, dir.path()).expect("archive");
        let location = dir.path().join("checkpoint.tar");
        name(&file, &location).expect("name");
        assert_eq!(digest(&location).expect("digest"), sha256);
        assert_eq!(fs::metadata(&location).expect("metadata").mode() & 0o777, 0o600);
        let mut archive = tar::Archive::new(File::open(&location).expect("archive"));
        let paths = archive
            .entries()
            .expect("entries")
            .map(|entry| entry.expect("entry").path().expect("path").display().to_string());
        assert!(paths.into_iter().any(|path| path == "sub/file"));
        let taken = name(&file, &location).expect_err("an existing file");
        assert_eq!(taken.kind(), io::ErrorKind::AlreadyExists);
    }
}
