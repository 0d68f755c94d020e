//! Files that only root can read, replaced so that a crash or a power failure leaves the old or the new content.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Replaces a file of mode 0600, and creates its directory if it is absent. The steps: temporary file with the
/// extension `tmp`, fsync, rename, fsync of the directory. Two writers of one path must not run at the same time.
///
/// # Errors
/// As mkdir(2), open(2), write(2), fsync(2) and rename(2). After an error the old file is unchanged, or the new file is
/// complete.
pub fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let dir = path.parent().unwrap_or(Path::new("/"));
    fs::create_dir_all(dir)?;
    let temporary = path.with_extension("tmp");
    // A temporary file of an interrupted replacement may have another mode.
    coracle_tree::remove_file(&temporary)?;
    let written = write_new(&temporary, content).and_then(|()| {
        coracle_fault::point("private-file.written");
        fs::rename(&temporary, path)
    });
    if written.is_err() {
        // On a full disk the incomplete file would occupy the space that other writes need.
        let _ = fs::remove_file(&temporary);
    }
    written?;
    coracle_fault::point("private-file.renamed");
    File::open(dir)?.sync_all()
}

fn write_new(path: &Path, content: &[u8]) -> io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(content)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use coracle_testing::{killed_dir, run_until_killed_in};

    use super::*;

    #[test]
    fn a_killed_replacement_leaves_the_old_or_the_new_content() {
        const TEST: &str = "private_file::tests::a_killed_replacement_leaves_the_old_or_the_new_content";
        if let Some(dir) = killed_dir() {
            return replace(&dir.join("file"), b"new").unwrap();
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        for (point, left) in [("private-file.written", "old"), ("private-file.renamed", "new")] {
            replace(&path, b"old").unwrap();
            run_until_killed_in(TEST, point, dir.path());
            assert_eq!(fs::read_to_string(&path).unwrap(), left, "{point}");
            replace(&path, b"next").unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), "next", "{point}");
            assert!(!path.with_extension("tmp").exists());
        }
    }

    #[test]
    fn a_failure_leaves_no_temporary_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::create_dir(&path).unwrap();
        assert!(replace(&path, b"new").is_err(), "a directory is not replaced by a file");
        assert!(!path.with_extension("tmp").exists());
    }

    #[test]
    fn a_replaced_file_is_private_even_if_the_old_one_and_a_leftover_were_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/file.json");
        fs::create_dir(dir.path().join("deep")).unwrap();
        for old in [&path, &path.with_extension("tmp")] {
            fs::write(old, "old").unwrap();
            fs::set_permissions(old, fs::Permissions::from_mode(0o666)).unwrap();
        }
        replace(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(!path.with_extension("tmp").exists());
    }
}
