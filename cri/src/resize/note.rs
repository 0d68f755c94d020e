//! What a change of a container's limits overwrites, noted in its bundle before the first write and forgotten when the
//! change is on record. What is noted and not on record, a runtime that died has left half-done: it is put back.

use std::io::{self, ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use coracle_proto::cri::LinuxContainerResources;
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};
use tracing::warn;

use crate::cgroup::Cgroups;
use crate::error::Error;
use crate::pidfd::Process;
use crate::records::{message, replace};

/// Its name in the bundle.
const FILE: &str = "resize.json";
/// The file of a process in /proc.
pub(super) const ADJUSTMENT: &str = "oom_score_adj";

/// One change.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Note {
    /// The files that change, with what they say, in the order in which they are written.
    pub(super) limits: Vec<Old>,
    /// The processes whose OOM score changes.
    pub(super) scores: Option<Scores>,
    /// What is on record when the change is complete.
    #[serde(with = "message")]
    pub(crate) after: LinuxContainerResources,
}

/// What a file said before.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Old {
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// OOM score adjustments that change.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Scores {
    from: i32,
    /// What they become.
    pub(crate) to: i32,
    pub(super) pids: Vec<i32>,
}

// === impl Note ===

impl Note {
    /// The note in a bundle; none when no change is under way, or it cannot be read.
    pub(crate) fn read(bundle: &Path) -> Option<Self> {
        let path = bundle.join(FILE);
        let text = std::fs::read(&path).ok()?;
        let note = serde_json::from_slice(&text);
        note.inspect_err(|error| warn!(path = %path.display(), %error, "a note of limits cannot be read"))
            .ok()
    }

    /// Puts it into a bundle.
    pub(super) fn write(&self, bundle: &Path) -> Result<(), Error> {
        let path = bundle.join(FILE);
        let text = serde_json::to_vec(self).map_err(|source| Error::Format {
            doing: "encode",
            path: path.clone(),
            source,
        })?;
        replace(&path, &text)
    }

    /// Removes that of a bundle, if there is one.
    pub(crate) fn forget(bundle: &Path) -> Result<(), Error> {
        let path = bundle.join(FILE);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(Error::file("remove", &path)(error)),
            _ => Ok(()),
        }
    }

    /// Removes that of a change which has come to its end, whose outcome is what the client is told. A note that stays is
    /// looked at by the next start, and replaced by the next change.
    pub(crate) fn done(bundle: &Path) {
        if let Err(error) = Self::forget(bundle) {
            warn!(error = error.chain(), "a note of limits stays");
        }
    }

    /// The score that commands begin with once the change is complete.
    pub(crate) fn score(&self) -> Option<i32> {
        self.scores.as_ref().map(|scores| scores.to)
    }

    /// Makes everything what it was. What is gone needs nothing.
    pub(crate) fn put_back(&self, cgroups: &Cgroups, group: &str) {
        // What the kernel checks against another file's value may have to wait for that file's turn.
        self.limits.iter().rev().for_each(|old| drop(put_back(old)));
        for old in self.limits.iter().rev() {
            if let Err(error) = put_back(old) {
                warn!(path = %old.path.display(), %error, "could not put a limit back");
            }
        }
        if let Some(scores) = &self.scores {
            // Only those that still are the container's: others may have their numbers.
            scores.pids.iter().for_each(|pid| scores.put_back(*pid, group));
        }
        if let Err(error) = cgroups.tell(group) {
            warn!(group, error = error.chain(), "could not tell of limits that were put back");
        }
    }
}

// === impl Scores ===

impl Scores {
    /// Of the processes that have the first of two adjustments. Others set their own, and keep it.
    pub(super) fn of(processes: &[i32], (from, to): (i32, i32)) -> Self {
        let pids = processes.iter().copied().filter(|pid| adjustment(*pid) == Some(from)).collect();
        Self { from, to, pids }
    }

    fn put_back(&self, pid: i32, group: &str) {
        if adjustment(pid) == Some(self.to)
            && let Err(error) = set_adjustment(pid, group, self.from)
            && error.kind() != ErrorKind::NotFound
        {
            warn!(pid, %error, "could not put an OOM score back");
        }
    }
}

/// Writes the adjustment of a process of the group; `NotFound` when it has ended, even if its pid is in use again.
pub(super) fn set_adjustment(pid: i32, group: &str, score: i32) -> io::Result<()> {
    let process = Process::in_group(pid, group)?;
    let mut file = process.file(ADJUSTMENT, OFlag::O_WRONLY)?;
    file.write_all(score.to_string().as_bytes())
}

fn adjustment(pid: i32) -> Option<i32> {
    std::fs::read_to_string(format!("/proc/{pid}/{ADJUSTMENT}")).ok()?.trim().parse().ok()
}

/// Some files hold a line for each device, and take one at a time.
fn put_back(old: &Old) -> io::Result<()> {
    match std::fs::read_to_string(&old.path) {
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Ok(now) if now == old.text => Ok(()),
        _ => {
            let mut lines = old.text.lines().filter(|line| !line.is_empty());
            lines.try_for_each(|line| std::fs::write(&old.path, line))
        }
    }
}
