//! The mount points that every container needs, as a layer below the layers of its image.
//!
//! Most images have no `/etc/hosts`. Without this layer each container's own layer would get the file and a copy of its `/etc`
//! directory: files that are created at every start and removed at every end. This is slow on a file system with recent
//! removals: ext4 skips the entries removed in the last seconds one by one.

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// Parents before children.
const DIRECTORIES: [&str; 5] = ["", "dev", "etc", "proc", "sys"];
const FILES: [&str; 3] = ["etc/hostname", "etc/hosts", "etc/resolv.conf"];

/// Path of the layer in the runtime's root directory.
pub(crate) fn layer(root: &Path) -> PathBuf {
    root.join("mount-points")
}

/// Creates the missing parts of the layer.
pub(crate) fn make(root: &Path) -> Result<(), Error> {
    let layer = layer(root);
    for path in DIRECTORIES.map(|name| layer.join(name)) {
        fs::create_dir_all(&path).map_err(Error::file("create directory", &path))?;
        allow(&path, 0o755)?;
    }
    for path in FILES.map(|name| layer.join(name)) {
        let made = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        made.map_err(Error::file("create", &path))?;
        allow(&path, 0o644)?;
    }
    Ok(())
}

/// Sets the mode, with any umask: containers see these files as their own.
fn allow(path: &Path, mode: u32) -> Result<(), Error> {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(Error::file("set the mode of", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_parts_of_the_layer_are_created_again() {
        let root = tempfile::tempdir().expect("directory");
        make(root.path()).expect("layer");
        let hosts = layer(root.path()).join("etc/hosts");
        assert_eq!(fs::metadata(&hosts).expect("file").permissions().mode() & 0o777, 0o644);
        fs::remove_file(&hosts).expect("remove");
        make(root.path()).expect("layer");
        assert!(hosts.is_file() && layer(root.path()).join("proc").is_dir());
    }
}
