//! Freezing all processes of a cgroup: `cgroup.freeze` on v2, the controller `freezer` on v1.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Read as _, Seek as _};
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Cgroups, below};

/// Timeout for the freeze of all processes: a process may be in uninterruptible sleep.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the state is polled on v1.
const STEP: Duration = Duration::from_millis(2);

/// A cgroup that can be frozen.
#[derive(Debug, Clone)]
pub(crate) struct Freezer {
    dir: PathBuf,
    unified: bool,
}

// === impl Freezer ===

impl Freezer {
    /// The cgroup's directory in the freezer's hierarchy.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The processes of the cgroup and its descendants.
    pub(crate) fn processes(&self) -> Vec<i32> {
        coracle_tree::cgroup::processes(&self.dir)
    }

    /// Freezes the cgroup and returns when all processes are frozen. Blocks.
    ///
    /// # Errors
    /// Errors of the kernel. `TimedOut` after the timeout. `Interrupted` if the cgroup is thawed meanwhile.
    pub(crate) fn freeze(&self) -> io::Result<()> {
        self.write("1", "FROZEN")?;
        let until = Instant::now() + TIMEOUT;
        if self.unified { self.wait_for_event(until) } else { self.poll_state(until) }
    }

    /// v2: waits for a change of `cgroup.events`. The kernel wakes a poll if the file changed since it was read.
    fn wait_for_event(&self, until: Instant) -> io::Result<()> {
        let mut events = File::open(self.dir.join("cgroup.events"))?;
        loop {
            let mut text = String::new();
            events.rewind()?;
            events.read_to_string(&mut text)?;
            if text.lines().any(|line| line == "frozen 1") {
                return Ok(());
            }
            wait_for_change(&events, until)?;
        }
    }

    /// v1: polls the state, because there is no notification. The kernel marks a cgroup as frozen when the state is
    /// read and all its processes are frozen (`freezer_read` of kernel/cgroup/legacy_freezer.c).
    fn poll_state(&self, until: Instant) -> io::Result<()> {
        loop {
            match fs::read_to_string(self.dir.join("freezer.state"))?.trim() {
                "FROZEN" => return Ok(()),
                "THAWED" => return Err(io::Error::new(ErrorKind::Interrupted, "thawed by another process")),
                _ => {}
            }
            if Instant::now() >= until {
                return Err(ErrorKind::TimedOut.into());
            }
            #[expect(clippy::disallowed_methods, reason = "on a thread for blocking calls")]
            std::thread::sleep(STEP);
        }
    }

    /// Thaws the cgroup. An absent or thawed cgroup is not an error.
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

/// Waits until the kernel has changed a file since it was read.
fn wait_for_change(file: &File, until: Instant) -> io::Result<()> {
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
    /// The freezer of a group. `None` without a freezer, or for a path that is not below a hierarchy's root.
    pub(crate) fn freezer(&self, group: &str) -> Option<Freezer> {
        let (mount, unified) = match &self.v2 {
            Some(mount) => (mount, true),
            None => (self.v1.get("freezer")?, false),
        };
        Some(Freezer { dir: below(mount, group)?, unified })
    }
}
