//! Reads files that contain credentials of users.

use std::{
    fs::File,
    io::{self, Read as _},
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

/// Maximum bytes of a file.
const MAX_BYTES: u64 = 8 << 20;

/// The text of a file. Logs a warning if all users of the machine can read or write the file.
pub(super) fn read(path: &Path) -> io::Result<String> {
    let file = File::open(path)?;
    if is_exposed(file.metadata()?.permissions().mode()) {
        tracing::warn!(path = %path.display(), "all users of the machine may use a file of credentials; its mode should be 0600");
    }
    let mut text = String::new();
    file.take(MAX_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_BYTES {
        return Err(io::Error::other(format!("it is larger than {MAX_BYTES} bytes")));
    }
    Ok(text)
}

/// Whether a mode permits users other than the owner and the group to read or write.
fn is_exposed(mode: u32) -> bool {
    mode & 0o006 != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_file_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("tokens");
        for (size, is_allowed) in [(MAX_BYTES, true), (MAX_BYTES + 1, false)] {
            std::fs::write(&path, "x".repeat(usize::try_from(size).unwrap())).unwrap();
            assert_eq!(read(&path).is_ok(), is_allowed, "{size}");
        }
    }

    #[test]
    fn a_mode_that_lets_all_users_in_is_exposed() {
        for (mode, expect) in [(0o100_600, false), (0o100_640, false), (0o100_644, true), (0o100_602, true)] {
            assert_eq!(is_exposed(mode), expect, "{mode:o}");
        }
    }
}
