//! Writes of limits to a cgroup's files, only if they differ.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use super::error::CgroupError;
use super::limits::{Limits, writes};

/// Sets the limits in each controller's directory of the cgroup.
///
/// A missing controller was logged at the start and is skipped here.
pub(crate) fn limits(dirs: &BTreeMap<String, PathBuf>, limits: &Limits, v2: bool) -> Result<(), CgroupError> {
    for write in writes(limits, v2) {
        let Some(dir) = dirs.get(write.controller) else { continue };
        write_file(&dir.join(write.file), &write.value)?;
    }
    Ok(())
}

/// Whether the cgroup exists and has these limits.
pub(crate) fn has_limits(dirs: &BTreeMap<String, PathBuf>, limits: &Limits, v2: bool) -> bool {
    let has_value = |dir: &PathBuf, file: &str, value: &str| {
        fs::read_to_string(dir.join(file)).is_ok_and(|text| text.trim() == value)
    };
    dirs.values().all(|dir| dir.exists())
        && writes(limits, v2).iter().all(|write| {
            dirs.get(write.controller).is_none_or(|dir| has_value(dir, write.file, &write.value))
        })
}

/// Writes a value to a file of a cgroup, unless it has this value. A file that the kernel does not have is skipped.
pub(super) fn write_file(path: &Path, value: &str) -> Result<(), CgroupError> {
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new().read(true).write(true).open(path)?;
        // The buffer is longer than all values. A read at an offset keeps the file position at the start.
        let mut start = [0; 64];
        let length = file.read_at(&mut start, 0).unwrap_or(0);
        if start.get(..length).is_some_and(|held| held.trim_ascii() == value.as_bytes()) {
            return Ok(());
        }
        file.write_all(value.as_bytes())
    };
    match write() {
        // With a kernel without the bandwidth controller, the cgroup does not have this file.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            tracing::debug!(path = %path.display(), "the kernel does not support this limit");
            Ok(())
        }
        Err(source) => Err(CgroupError::Write { path: path.to_owned(), value: value.to_owned(), source }),
        Ok(()) => Ok(()),
    }
}
