//! Paths of files in pods and volumes.

use serde_json::Value;

use super::{Causes, Path};

const HOST_PATH_TYPES: &[&str] =
    &["", "BlockDevice", "CharDevice", "Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket"];

/// Checks a relative path without `..`. The path may be empty.
pub(super) fn relative(causes: &mut Causes, path: &Path, value: &str) {
    if value.starts_with('/') {
        causes.invalid(path, &value.into(), "must be a relative path");
    }
    if has_backstep(value) {
        causes.invalid(path, &value.into(), "must not contain '..'");
    }
}

/// Checks a relative path. No element may be `..`, and the first element may not begin with `..`. The path may be
/// empty.
pub(super) fn local(causes: &mut Causes, path: &Path, value: &str) {
    relative(causes, path, value);
    if value.starts_with("..") && !value.starts_with("../") && value != ".." {
        causes.invalid(path, &value.into(), "must not start with '..'");
    }
}

/// Whether an element of a path is `..`.
pub fn has_backstep(value: &str) -> bool {
    value.split('/').any(|part| part == "..")
}

/// Checks the type of a host path, in a pod or in a persistent volume.
pub(super) fn host_path_type(causes: &mut Causes, path: &Path, kind: &Value) {
    causes.optional_word(path, kind, HOST_PATH_TYPES);
}
