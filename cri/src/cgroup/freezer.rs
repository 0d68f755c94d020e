//! A group whose processes all stand still: `cgroup.freeze` on v2, the controller `freezer` on v1.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{Cgroups, below, processes};

/// How often a group that is being frozen is looked at, and how long in all: a process may sleep in the kernel.
const STEP: Duration = Duration::from_millis(2);
const LIMIT: Duration = Duration::from_secs(10);

/// A group that can be frozen.
#[derive(Debug, Clone)]
pub(crate) struct Freezer {
    dir: PathBuf,
    unified: bool,
}

// === impl Freezer ===

impl Freezer {
    /// The group's directory where it is frozen.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The processes of the group and of all below it.
    pub(crate) fn processes(&self) -> Vec<i32> {
        processes(&self.dir)
    }

    /// Freezes it, and returns when all of it stands still. Blocks.
    ///
    /// # Errors
    /// The kernel's; `TimedOut` when it does not come to stand.
    pub(crate) fn freeze(&self) -> io::Result<()> {
        self.write("1", "FROZEN")?;
        let mut waited = Duration::ZERO;
        while !self.is_frozen()? {
            if waited >= LIMIT {
                return Err(io::Error::from(ErrorKind::TimedOut));
            }
            #[expect(clippy::disallowed_methods, reason = "on a thread that may block")]
            std::thread::sleep(STEP);
            waited += STEP;
        }
        Ok(())
    }

    /// Lets it go on. One that is gone, or was not frozen, is a success.
    pub(crate) fn thaw(&self) -> io::Result<()> {
        match self.write("0", "THAWED") {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            thawed => thawed,
        }
    }

    fn write(&self, unified: &str, v1: &str) -> io::Result<()> {
        let (file, word) = if self.unified { ("cgroup.freeze", unified) } else { ("freezer.state", v1) };
        fs::OpenOptions::new()
            .write(true)
            .open(self.dir.join(file))
            .and_then(|mut file| io::Write::write_all(&mut file, word.as_bytes()))
    }

    fn is_frozen(&self) -> io::Result<bool> {
        if self.unified {
            let events = fs::read_to_string(self.dir.join("cgroup.events"))?;
            return Ok(events.lines().any(|line| line == "frozen 1"));
        }
        Ok(fs::read_to_string(self.dir.join("freezer.state"))?.trim() == "FROZEN")
    }
}

impl Cgroups {
    /// What freezes a group. None where nothing can, or for what is not below a hierarchy's root.
    pub(crate) fn freezer(&self, group: &str) -> Option<Freezer> {
        let (mount, unified) = match &self.v2 {
            Some(mount) => (mount, true),
            None => (self.v1.get("freezer")?, false),
        };
        Some(Freezer { dir: below(mount, group)?, unified })
    }
}
