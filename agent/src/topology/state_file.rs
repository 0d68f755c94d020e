//! State files of the CPU manager and the memory manager, with the kubelet's names, format and checks.
//!
//! A state of another policy prevents the start, as upstream: running containers may hold resources that the new policy
//! does not know. A state of the same policy without resources of containers is replaced without a check. The checksum
//! is 0, which the kubelet accepts. A file is replaced atomically, so it is never incomplete.

use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::{bounded, json_file};

/// Maximum size in bytes.
const MAX_SIZE: u64 = 16 << 20;

/// The reason why a state file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StateFileError {
    /// The file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write {path}")]
    Write {
        /// The file.
        path: PathBuf,
        /// Cause.
        #[source]
        source: io::Error,
    },
    /// The content does not fit the configuration or the machine.
    #[error(
        "cannot use the state in {path}: {problem}; drain the node and delete this file before the next start"
    )]
    Unusable {
        /// The file.
        path: PathBuf,
        /// The reason why the content cannot be used.
        problem: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Header {
    policy_name: String,
}

/// Reads a state file. None if there is no file.
///
/// # Errors
/// When the file cannot be read or parsed, or has the state of another policy.
pub(crate) fn read<T: DeserializeOwned>(path: &Path, policy: &str) -> Result<Option<T>, StateFileError> {
    let Some(content) = checked(path, policy)? else { return Ok(None) };
    serde_json::from_slice(&content).map(Some).map_err(|error| unusable(path, error.to_string()))
}

/// Checks that there is no state of another policy.
///
/// # Errors
/// See [`read`].
pub(crate) fn check_policy(path: &Path, policy: &str) -> Result<(), StateFileError> {
    checked(path, policy).map(drop)
}

/// Replaces a state file, if the state differs from the stored state.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write<T: Serialize>(path: &Path, state: &T) -> Result<(), StateFileError> {
    json_file::write(path, state).map_err(|source| StateFileError::Write { path: path.to_owned(), source })
}

/// An error about the content of a file.
pub(crate) fn unusable(path: &Path, problem: String) -> StateFileError {
    StateFileError::Unusable { path: path.to_owned(), problem }
}

/// The content of a file with the state of this policy.
fn checked(path: &Path, policy: &str) -> Result<Option<Vec<u8>>, StateFileError> {
    let content = match bounded::read(path, MAX_SIZE) {
        Ok(content) => content,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(StateFileError::Read { path: path.to_owned(), source }),
    };
    let header: Header =
        serde_json::from_slice(&content).map_err(|error| unusable(path, error.to_string()))?;
    if header.policy_name != policy {
        let problem = format!(
            "configured policy {policy:?} differs from state checkpoint policy {:?}",
            header.policy_name
        );
        return Err(unusable(path, problem));
    }
    Ok(Some(content))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_state_of_another_policy_prevents_the_start() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cpu_manager_state");
        assert!(check_policy(&path, "none").is_ok() && !path.exists());
        write(&path, &serde_json::json!({"policyName": "static", "x": 1})).unwrap();
        let read_back: Option<serde_json::Value> = read(&path, "static").unwrap();
        assert_eq!(read_back.unwrap()["x"], 1);
        let error = check_policy(&path, "none").unwrap_err().to_string();
        let text = "configured policy \"none\" differs from state checkpoint policy \"static\"";
        assert!(error.contains(text) && error.contains("delete this file"), "{error}");
        std::fs::write(&path, "{").unwrap();
        assert!(check_policy(&path, "static").is_err());
    }
}
