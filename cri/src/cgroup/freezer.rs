//! A group whose processes all stand still: `cgroup.freeze` on v2, the controller `freezer` on v1.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Seek as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Cgroups, below, processes};

/// How long a group may take to come to stand: a process may sleep in the kernel.
const LIMIT: Duration = Duration::from_secs(10);
/// How often one of v1 is looked at meanwhile.
const STEP: Duration = Duration::from_millis(2);

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
    /// The kernel's; `TimedOut` when it does not come to stand; `Interrupted` when somebody thaws it meanwhile.
    pub(crate) fn freeze(&self) -> io::Result<()> {
        self.write("1", "FROZEN")?;
        let until = Instant::now() + LIMIT;
        if self.unified { self.wait_until_told(until) } else { self.wait_looking(until) }
    }

    /// The kernel tells who polls `cgroup.events` of what is not yet as it was when he read it.
    fn wait_until_told(&self, until: Instant) -> io::Result<()> {
        let mut events = File::open(self.dir.join("cgroup.events"))?;
        loop {
            let mut text = String::new();
            events.rewind()?;
            events.read_to_string(&mut text)?;
            if text.lines().any(|line| line == "frozen 1") {
                return Ok(());
            }
            wait_for_news(&events, until)?;
        }
    }

    /// v1 has nothing to tell: it is a look at the state that makes a group frozen whose processes all stand
    /// (`freezer_read` of kernel/cgroup/legacy_freezer.c).
    fn wait_looking(&self, until: Instant) -> io::Result<()> {
        loop {
            match fs::read_to_string(self.dir.join("freezer.state"))?.trim() {
                "FROZEN" => return Ok(()),
                "THAWED" => return Err(io::Error::new(ErrorKind::Interrupted, "it was thawed meanwhile")),
                _ => {}
            }
            if Instant::now() >= until {
                return Err(ErrorKind::TimedOut.into());
            }
            #[expect(clippy::disallowed_methods, reason = "on a thread that may block")]
            std::thread::sleep(STEP);
        }
    }

    /// Whether what is killed while it is frozen ends only when it is thawed, as on v1.
    pub(crate) fn holds_killed(&self) -> bool {
        !self.unified
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
}

/// Returns when the kernel has changed a file since it was read.
fn wait_for_news(file: &File, until: Instant) -> io::Result<()> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLPRI)], left) {
            Ok(0) => return Err(ErrorKind::TimedOut.into()),
            Ok(_) => return Ok(()),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
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
