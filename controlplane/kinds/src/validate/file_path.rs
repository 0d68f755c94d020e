//! Paths of files in pods and volumes.

use serde_json::Value;

use super::{Causes, Path};

const HOST_PATH_TYPES: &[&str] =
    &["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];

/// Checks a relative path without `..`. It may be empty.
pub(super) fn relative(causes: &mut Causes, path: &Path, value: &str) {
    if value.starts_with('/') {
        causes.invalid(path, &value.into(), "must be a relative path");
    }
    if value.split('/').any(|part| part == "..") {
        causes.invalid(path, &value.into(), "must not contain '..'");
    }
}

/// Checks the type of a host path, in a pod or in a persistent volume.
pub(super) fn host_path_type(causes: &mut Causes, path: &Path, kind: &Value) {
    causes.optional_word(path, kind, HOST_PATH_TYPES);
}
