//! Record of the containers that the agent stops, in the pod's directory: a probe or a post-start hook has failed, or
//! the container starts again with another image or other resources. A restarted agent stops the recorded containers
//! that still run.
//!
//! The exit code alone does not decide whether such a container starts again. Without the record, an agent that starts
//! after the stop would treat the exit as if the container had ended by itself. A failed probe could then end the pod.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::json_file;
use crate::pod::state::KillRequest;

/// File name of the record.
const FILE: &str = "stops.json";

/// The containers that the agent stops, by id.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Stops {
    /// Requests to kill containers, by container id.
    pub(crate) kill_requests: BTreeMap<String, KillRequest>,
    /// Ids of containers that start again with another image.
    pub(crate) redefined: BTreeSet<String>,
    /// Ids of containers that start again with other resources.
    #[serde(default)]
    pub(crate) resized: BTreeSet<String>,
}

/// Writes the record of a pod, before the containers are stopped.
///
/// # Errors
/// When the file cannot be written.
pub(crate) fn write(pod_dir: &Path, stops: &Stops) -> io::Result<()> {
    json_file::write(&path(pod_dir), stops)
}

/// The recorded containers. Some of these containers may be gone.
pub(crate) fn read(pod_dir: &Path) -> Stops {
    json_file::read(&path(pod_dir)).unwrap_or_default()
}

/// Removes the record after its containers are removed. An error is logged. A record that could not be removed has no
/// effect on other containers.
pub(crate) fn remove(pod_dir: &Path) {
    let path = path(pod_dir);
    if let Err(error) = coracle_tree::remove_file(&path) {
        tracing::warn!(%error, path = %path.display(), "cannot remove the record of stopped containers");
    }
}

fn path(pod_dir: &Path) -> PathBuf {
    pod_dir.join(FILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stops_are_read_back_until_they_are_removed() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()), Stops::default());
        let request = KillRequest { why: "failed liveness probe".into(), grace: Some(3), restarts: true };
        let stops = Stops {
            kill_requests: [("a0".to_owned(), request)].into(),
            redefined: ["b0".to_owned()].into(),
            resized: ["c0".to_owned()].into(),
        };
        write(dir.path(), &stops).unwrap();
        assert_eq!(read(dir.path()), stops);
        remove(dir.path());
        remove(dir.path());
        assert_eq!(read(dir.path()), Stops::default());
    }

    /// A record of an earlier version. Do not change it: pods outlive an upgrade of the agent.
    #[test]
    fn earlier_records_are_read() {
        let dir = tempfile::tempdir().unwrap();
        let text = r#"{"kill_requests":{"a0":{"why":"w","grace":null,"restarts":true}},"redefined":["b0"]}"#;
        std::fs::write(dir.path().join(FILE), text).unwrap();
        let request = KillRequest { why: "w".into(), grace: None, restarts: true };
        let kill_requests = [("a0".to_owned(), request)].into();
        let redefined = ["b0".to_owned()].into();
        assert_eq!(read(dir.path()), Stops { kill_requests, redefined, ..Stops::default() });
    }
}
