//! The note of a limit change: the overwritten values. It is written to the bundle before the first change, and removed when
//! the change is recorded. After a crash, an unrecorded change is reverted by its note.

use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use coracle_proto::cri::LinuxContainerResources;
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::cgroup::Cgroups;
use crate::error::Error;
use crate::json_file::replace_json;
use crate::pidfd::Process;
use crate::records::message;

/// File name of the note in the bundle.
const FILE: &str = "resize.json";
/// File of a process in /proc.
pub(super) const ADJUSTMENT: &str = "oom_score_adj";

/// A change of limits.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Note {
    /// The changed files with their previous contents, in the order of the writes.
    pub(super) limits: Vec<OldValue>,
    /// The processes with a changed OOM score.
    pub(super) scores: Option<Scores>,
    /// The limits on record after the change.
    #[serde(with = "message")]
    pub(crate) after: LinuxContainerResources,
}

/// The previous contents of a file.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct OldValue {
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// A change of OOM score adjustments.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Scores {
    from: i32,
    /// The new adjustment.
    pub(crate) to: i32,
    pub(super) pids: Vec<i32>,
}

// === impl Note ===

impl Note {
    /// Reads the note of a bundle. `None` if no change is in progress or the note is unreadable.
    pub(crate) fn read(bundle: &Path) -> Option<Self> {
        let path = bundle.join(FILE);
        let text = std::fs::read(&path).ok()?;
        let note = serde_json::from_slice(&text);
        note.inspect_err(|error| warn!(path = %path.display(), %error, "cannot read a note of limits")).ok()
    }

    /// Writes the note to a bundle.
    pub(super) fn write(&self, bundle: &Path) -> Result<(), Error> {
        replace_json(&bundle.join(FILE), self)
    }

    /// Removes the note of a bundle, if there is one.
    pub(crate) fn try_remove(bundle: &Path) -> Result<(), Error> {
        let path = bundle.join(FILE);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::file("remove", &path)(error)),
            _ => Ok(()),
        }
    }

    /// Removes the note of a finished change. A failure is only logged, because it does not alter the outcome of the
    /// change. If the note remains, the next start examines it, and the next change replaces it.
    pub(crate) fn remove(bundle: &Path) {
        if let Err(error) = Self::try_remove(bundle) {
            warn!(error = error.chain(), "cannot remove a note of limits");
        }
    }

    /// The OOM score of new execs after the change.
    pub(crate) fn score(&self) -> Option<i32> {
        self.scores.as_ref().map(|scores| scores.to)
    }

    /// Reverts the change. Files and processes that are gone are skipped.
    pub(crate) fn revert(&self, cgroups: &Cgroups, group: &str) {
        // Two passes: the kernel checks some values against values of other files, which may be reverted later.
        self.limits.iter().rev().for_each(|old| drop(revert(old)));
        for old in self.limits.iter().rev() {
            if let Err(error) = revert(old) {
                warn!(path = %old.path.display(), %error, "cannot revert a limit");
            }
        }
        if let Some(scores) = &self.scores {
            // `set_adjustment` skips pids that were reused outside of the container.
            scores.pids.iter().for_each(|pid| scores.revert(*pid, group));
        }
        if let Err(error) = cgroups.update_unit(group) {
            warn!(group, error = error.chain(), "cannot update the systemd unit of reverted limits");
        }
    }
}

// === impl Scores ===

impl Scores {
    /// The processes with the adjustment `from`. Other processes have set their own adjustment, and keep it.
    pub(super) fn of(processes: &[i32], from: i32, to: i32) -> Self {
        let pids = processes.iter().copied().filter(|pid| adjustment(*pid) == Some(from)).collect();
        Self { from, to, pids }
    }

    fn revert(&self, pid: i32, group: &str) {
        if adjustment(pid) == Some(self.to)
            && let Err(error) = set_adjustment(pid, group, self.from)
            && error.kind() != ErrorKind::NotFound
        {
            warn!(pid, %error, "cannot revert an OOM score");
        }
    }
}

/// Sets the adjustment of a process of the group; `NotFound` if it has ended, even if its pid is reused.
pub(super) fn set_adjustment(pid: i32, group: &str, score: i32) -> io::Result<()> {
    let process = Process::in_group(pid, group)?;
    let mut file = process.file(ADJUSTMENT, OFlag::O_WRONLY)?;
    file.write_all(score.to_string().as_bytes())
}

fn adjustment(pid: i32) -> Option<i32> {
    std::fs::read_to_string(format!("/proc/{pid}/{ADJUSTMENT}")).ok()?.trim().parse().ok()
}

/// Restores a file. Some files have one line per device, and accept one line per write.
fn revert(old: &OldValue) -> io::Result<()> {
    match std::fs::read_to_string(&old.path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Ok(now) if now == old.text => Ok(()),
        _ => {
            let mut lines = old.text.lines().filter(|line| !line.is_empty());
            lines.try_for_each(|line| std::fs::write(&old.path, line))
        }
    }
}
