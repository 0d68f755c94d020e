//! Record of the containers that a restart of all containers removes, in the pod's directory.
//!
//! The pod's status in the API is not sufficient. The status is written after the removal, and not at all while the API
//! server does not respond. Without the record, an agent that starts meanwhile would treat the removed containers as
//! lost. A pod with the policy Never would fail. Other containers would start at attempt 0 and write to the logs of
//! earlier attempts.

use std::io;
use std::path::{Path, PathBuf};

use crate::json_file;
use crate::pod::removed::RemovedContainers;

/// File name of the record.
const FILE: &str = "restarting.json";

/// Adds containers to the record of a pod. These containers replace recorded containers of the same names.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn add(pod_dir: &Path, removed: &RemovedContainers) -> io::Result<()> {
    let mut recorded = read(pod_dir);
    recorded.extend(removed.clone());
    json_file::write(&path(pod_dir), &recorded)
}

/// The recorded containers. Empty without a record.
pub(super) fn read(pod_dir: &Path) -> RemovedContainers {
    json_file::read(&path(pod_dir)).unwrap_or_default()
}

/// Removes the record after all of its containers run again. An error is logged. A record that could not be removed has
/// no effect on existing containers.
pub(crate) fn remove(pod_dir: &Path) {
    let path = path(pod_dir);
    if let Err(error) = coracle_tree::remove_file(&path) {
        tracing::warn!(%error, path = %path.display(), "cannot remove the record of a restart of all containers");
    }
}

fn path(pod_dir: &Path) -> PathBuf {
    pod_dir.join(FILE)
}
