//! The mount points that every container needs, as a layer below those of its image.
//!
//! An image that has no `/etc/hosts`, as most, would get one made in each container's own layer, and a copy of
//! its `/etc` with it: files on the disk, made at every start and removed at every end. A file system takes its
//! time for that the more the more was removed a moment ago: ext4 passes over what was removed in the last
//! seconds, one by one.

use std::fs::{self, OpenOptions, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use crate::error::Error;

/// Parents before children.
const DIRECTORIES: [&str; 5] = ["", "dev", "etc", "proc", "sys"];
const FILES: [&str; 3] = ["etc/hostname", "etc/hosts", "etc/resolv.conf"];

/// Where the layer is, below the runtime's root.
pub(crate) fn layer(root: &Path) -> PathBuf {
    root.join("mount-points")
}

/// Makes the layer, or what is missing of it.
pub(crate) fn make(root: &Path) -> Result<(), Error> {
    let layer = layer(root);
    for path in DIRECTORIES.map(|name| layer.join(name)) {
        fs::create_dir_all(&path).map_err(Error::file("make directory", &path))?;
        allow(&path, 0o755)?;
    }
    for path in FILES.map(|name| layer.join(name)) {
        let made = OpenOptions::new().create(true).truncate(false).write(true).open(&path);
        made.map_err(Error::file("make", &path))?;
        allow(&path, 0o644)?;
    }
    Ok(())
}

/// Whatever the umask is: a container sees them as its own.
fn allow(path: &Path, mode: u32) -> Result<(), Error> {
    fs::set_permissions(path, Permissions::from_mode(mode)).map_err(Error::file("set the mode of", path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_layer_is_made_once_and_completed_when_something_is_missing() {
        let root = tempfile::tempdir().expect("directory");
        make(root.path()).expect("layer");
        let hosts = layer(root.path()).join("etc/hosts");
        assert_eq!(fs::metadata(&hosts).expect("file").permissions().mode() & 0o777, 0o644);
        fs::remove_file(&hosts).expect("remove");
        make(root.path()).expect("layer");
        assert!(hosts.is_file() && layer(root.path()).join("proc").is_dir());
    }
}
