//! The directories of writable layers.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};
use tracing::debug;

use super::Records;
use super::file::{names, remove};
use crate::error::Error;

/// Number of parts of the disk over which writable layers are spread.
const PARTS: u8 = 16;

// === impl Records ===

impl Records {
    /// The directory of all writable layers.
    pub(crate) fn layers_dir(&self) -> &Path {
        &self.layers
    }

    /// The directory of a container's writable layer.
    pub(crate) fn layer_dir(&self, id: &str) -> PathBuf {
        self.layers.join(id)
    }

    /// Creates the directory of a container's writable layer.
    pub(crate) fn make_layer(&self, id: &str) -> Result<PathBuf, Error> {
        let layer = self.layer_dir(id);
        let Some(parts) = &self.parts else {
            std::fs::create_dir_all(&layer).map_err(Error::file("create directory", &layer))?;
            return Ok(layer);
        };
        let number = id.bytes().fold(0, u8::wrapping_add) % PARTS;
        let created = parts.join(number.to_string()).join(id);
        std::fs::create_dir_all(&created).map_err(Error::file("create directory", &created))?;
        let Err(error) = std::fs::rename(&created, &layer) else { return Ok(layer) };
        let _next_start_removes_it = std::fs::remove_dir(&created);
        if error.kind() != ErrorKind::CrossesDevices {
            return Err(Error::file("rename into", &layer)(error));
        }
        // The layers are on another file system than the parts.
        std::fs::create_dir_all(&layer).map_err(Error::file("create directory", &layer))?;
        Ok(layer)
    }

    pub(crate) fn remove_layer(&self, id: &str) -> Result<(), Error> {
        remove(&self.layer_dir(id))
    }

    /// Ids of the existing writable layers.
    pub(crate) fn layers(&self) -> Result<Vec<String>, Error> {
        names(&self.layers)
    }
}

/// Directories in different parts of the disk, if ext4 supports it (chattr(1), `T`). A container's files stay in the
/// part where its layer was created, even after a rename. If all containers shared one part, each new file would cost a
/// search past every inode that was freed in the last five minutes. If each container had its own part, each new file
/// would cost reads of unused areas of the disk.
pub(super) fn make_parts(parts: PathBuf) -> Option<PathBuf> {
    let make = || -> std::io::Result<()> {
        std::fs::create_dir_all(&parts)?;
        let top = std::fs::File::open(&parts)?;
        let flags = ioctl_getflags(&top)?;
        if !flags.contains(IFlags::TOPDIR) {
            ioctl_setflags(&top, flags | IFlags::TOPDIR)?;
        }
        for part in (0..PARTS).map(|number| parts.join(number.to_string())) {
            std::fs::create_dir_all(&part)?;
            // These directories are left from a crash between creation and rename.
            std::fs::read_dir(&part)?.try_for_each(|left| std::fs::remove_dir(left?.path()))?;
        }
        Ok(())
    };
    let made = make();
    made.inspect_err(|error| debug!(%error, "cannot spread writable layers over the disk")).ok()?;
    Some(parts)
}

#[cfg(test)]
mod tests {
    use super::super::tests::records;
    use super::*;

    #[test]
    fn layers_are_spread_on_supported_file_systems() {
        let dir = tempfile::tempdir().unwrap();
        let records = records(dir.path());
        // EXT4_SUPER_MAGIC. ext2 and ext3 have the same number.
        let can = rustix::fs::statfs(&records.layers).unwrap().f_type == 0xEF53;
        assert_eq!(records.parts.is_some(), can);
        for records in [Records { parts: None, ..records.clone() }, records] {
            let layer = records.make_layer("c1").unwrap();
            assert!(layer.is_dir() && layer == records.layer_dir("c1"));
            assert_eq!(records.layers().unwrap(), ["c1"]);
            records.remove_layer("c1").unwrap();
        }
    }

    #[test]
    fn layers_on_another_file_system_are_created_there() {
        let dir = tempfile::tempdir().unwrap();
        let other = tempfile::tempdir_in("/dev/shm").unwrap();
        let device = |path: &Path| std::os::unix::fs::MetadataExt::dev(&path.metadata().unwrap());
        if device(dir.path()) == device(other.path()) {
            return println!("there is only one file system");
        }
        let records = records(dir.path());
        let records = Records { parts: Some(other.path().to_owned()), ..records };
        assert!(records.make_layer("c1").unwrap().is_dir());
        let left = std::fs::read_dir(other.path())
            .unwrap()
            .flatten()
            .flat_map(|part| std::fs::read_dir(part.path()));
        assert_eq!(left.flatten().count(), 0);
    }
}
