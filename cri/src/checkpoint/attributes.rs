//! Extended attributes of changed files, as PAX records (`SCHILY.xattr.NAME`, as in GNU tar and Go).
//!
//! Only attributes of the file itself are archived: user attributes, capabilities and access lists. Labels of security
//! modules and `trusted.` attributes belong to the machine and to overlayfs, and have no meaning in another layer.

use std::ffi::OsStr;
use std::io;
use std::path::Path;

use nix::errno::Errno;

/// Prefix of a record's key.
const KEY: &str = "SCHILY.xattr.";
/// Maximum bytes of all attributes of one file. Readers of archives have the same limit.
const MAX_BYTES: usize = 1 << 20;
/// Maximum bytes of a record without its key and value.
const RECORD: usize = 16;

/// The records of a file; links are followed. An attribute that an archive cannot contain is left out with a warning.
/// A container must not be able to prevent its checkpoint, because a checkpoint can serve to analyse the container.
pub(super) fn records(of: &str, path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let names = match xattr::list_deref(of) {
        Err(error) if error.raw_os_error() == Some(Errno::ENOTSUP as i32) => return Ok(Vec::new()),
        names => names?,
    };
    let (mut records, mut size) = (Vec::new(), 0);
    for name in names.filter(|name| is_of_the_file(name)) {
        let Some(value) = xattr::get_deref(of, &name)? else { continue };
        let key = name.to_str().filter(|name| !name.contains('=')).map(|name| format!("{KEY}{name}"));
        let length = name.len() + value.len() + KEY.len() + RECORD;
        match key {
            Some(key) if size + length <= MAX_BYTES => {
                size += length;
                records.push((key, value));
            }
            _ => {
                tracing::warn!(path = %path.display(), ?name, "cannot archive an extended attribute")
            }
        }
    }
    Ok(records)
}

fn is_of_the_file(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    let users = name.starts_with(b"user.") && !name.starts_with(b"user.overlay.");
    users || name == b"security.capability" || name.starts_with(b"system.posix_acl_")
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn only_attributes_of_the_file_itself_are_read() {
        for (name, own) in [
            ("user.note", true),
            ("security.capability", true),
            ("system.posix_acl_access", true),
            ("user.overlay.opaque", false),
            ("trusted.overlay.origin", false),
            ("security.selinux", false),
        ] {
            assert_eq!(is_of_the_file(OsStr::new(name)), own, "{name}");
        }
    }

    #[test]
    fn attributes_that_do_not_fit_are_left_out() {
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
