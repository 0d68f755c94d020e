//! Writing limits into a cgroup's files, only where they differ.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::CgroupError;
use super::limits::{Limits, writes};

/// Sets the limits in the cgroup that each controller has at its directory.
///
/// A controller that the machine lacks was named once at the start and is passed over here.
pub(crate) fn limits(dirs: &BTreeMap<String, PathBuf>, limits: &Limits, v2: bool) -> Result<(), CgroupError> {
    for write in writes(limits, v2) {
        let Some(dir) = dirs.get(write.controller) else { continue };
        one(&dir.join(write.file), &write.value)?;
    }
    Ok(())
}

/// Whether the cgroup is there, with these limits.
pub(crate) fn holds(dirs: &BTreeMap<String, PathBuf>, limits: &Limits, v2: bool) -> bool {
    let is_held = |dir: &PathBuf, file: &str, value: &str| {
        fs::read_to_string(dir.join(file)).is_ok_and(|held| held.trim() == value)
    };
    dirs.values().all(|dir| dir.exists())
        && writes(limits, v2)
            .iter()
            .all(|write| dirs.get(write.controller).is_none_or(|dir| is_held(dir, write.file, &write.value)))
}

fn one(path: &Path, value: &str) -> Result<(), CgroupError> {
    if fs::read_to_string(path).is_ok_and(|held| held.trim() == value) {
        return Ok(());
    }
    match fs::write(path, value) {
        // A kernel built without the bandwidth controller has the cgroup but not this file of it.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            tracing::debug!(path = %path.display(), "this kernel has no such limit");
            Ok(())
        }
        Err(source) => Err(CgroupError::Write { path: path.to_owned(), value: value.to_owned(), source }),
        Ok(()) => Ok(()),
    }
}
