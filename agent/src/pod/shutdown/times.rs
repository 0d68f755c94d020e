//! Begin and end of the last graceful shutdown. The times are stored, because their metrics are mostly read after the
//! next boot. Source: `pkg/kubelet/nodeshutdown/storage.go`.

use std::path::{Path, PathBuf};

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::task::JoinHandle;

use crate::json_file;

/// Times in seconds since the epoch; 0 if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct ShutdownTimes {
    pub(super) start_time: i64,
    pub(super) end_time: i64,
}

/// File of the times in the state directory.
pub(super) fn path(state_dir: &Path) -> PathBuf {
    state_dir.join("agent").join("graceful-shutdown.json")
}

// === impl ShutdownTimes ===

impl ShutdownTimes {
    /// A shutdown that begins now.
    pub(super) fn begin() -> Self {
        Self { start_time: Timestamp::now().as_second(), end_time: 0 }
    }

    /// The shutdown with the current time as its end.
    pub(super) fn ended(self) -> Self {
        Self { end_time: Timestamp::now().as_second(), ..self }
    }

    /// The times of the last shutdown. None if there was no shutdown.
    pub(super) async fn read(path: PathBuf) -> Option<Self> {
        let read = coracle_threads::spawn_blocking(move || json_file::read(&path));
        read.await.ok().flatten()
    }

    /// Writes the times in the background.
    pub(super) fn store(self, path: PathBuf) -> JoinHandle<()> {
        coracle_threads::spawn_blocking(move || {
            if let Err(error) = json_file::write(&path, &self) {
                tracing::warn!(%error, path = %path.display(), "cannot store the times of the shutdown");
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_times_of_a_shutdown_are_read_after_the_next_boot() {
        let dir = tempfile::tempdir().unwrap();
        let file = || path(dir.path());
        assert_eq!(ShutdownTimes::read(file()).await, None);
        let begun = ShutdownTimes::begin();
        begun.store(file()).await.unwrap();
        assert_eq!(ShutdownTimes::read(file()).await, Some(begun), "the power was cut before the end");
        let ended = begun.ended();
        ended.store(file()).await.unwrap();
        assert_eq!(ShutdownTimes::read(file()).await, Some(ended));
        assert!(begun.end_time == 0 && ended.end_time >= ended.start_time);
    }
}
