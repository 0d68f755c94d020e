//! The extended attributes of a changed file, as its archive has them (`SCHILY.xattr.NAME`, as GNU tar and Go write them).
//!
//! Those that are the file's own: a program's, its capabilities, its access lists. Labels of security modules and what is
//! `trusted.` are of the machine and of overlayfs, and mean nothing in another layer.

use std::ffi::OsStr;
use std::io;
use std::path::Path;

use nix::errno::Errno;

/// What a key begins with.
const KEY: &str = "SCHILY.xattr.";
/// What readers take of all attributes of one file together.
const MOST: usize = 1 << 20;
/// What a record has beside key and value, at most.
const RECORD: usize = 16;

/// The records of what a path leads to, which is followed. What no archive can have is left out: a checkpoint is also for
/// looking at what a container did, which must not be able to prevent it.
pub(super) fn records(of: &str, path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let names = match xattr::list_deref(of) {
        Err(error) if error.raw_os_error() == Some(Errno::ENOTSUP as i32) => return Ok(Vec::new()),
        names => names?,
    };
    let (mut records, mut size) = (Vec::new(), 0);
    for name in names.filter(|name| is_the_files_own(name)) {
        let Some(value) = xattr::get_deref(of, &name)? else { continue };
        let key = name.to_str().filter(|name| !name.contains('=')).map(|name| format!("{KEY}{name}"));
        let length = name.len() + value.len() + KEY.len() + RECORD;
        match key {
            Some(key) if size + length <= MOST => {
                size += length;
                records.push((key, value));
            }
            _ => {
                tracing::warn!(path = %path.display(), ?name, "an attribute does not fit into a checkpoint's archive")
            }
        }
    }
    Ok(records)
}

fn is_the_files_own(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    let users = name.starts_with(b"user.") && !name.starts_with(b"user.overlay.");
    users || name == b"security.capability" || name.starts_with(b"system.posix_acl_")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_what_is_the_files_own_is_read() {
        for (name, own) in [
            ("user.note", true),
            ("security.capability", true),
            ("system.posix_acl_access", true),
            ("user.overlay.opaque", false),
            ("trusted.overlay.origin", false),
            ("security.selinux", false),
        ] {
            assert_eq!(is_the_files_own(OsStr::new(name)), own, "{name}");
        }
    }

    #[test]
    fn what_no_archive_can_have_is_left_out_and_the_rest_is_there() {
        let dir = tempfile::tempdir().expect("directory");
        let file = dir.path().join("file");
        fs::write(&file, "").expect("write");
        for name in ["user.a=b", "user.c"] {
            xattr::set(&file, name, b"\0=\n").expect("set");
        }
        let records = records(file.to_str().expect("text"), &file).expect("read");
        assert_eq!(records, [("SCHILY.xattr.user.c".to_owned(), b"\0=\n".to_vec())]);
    }
}
