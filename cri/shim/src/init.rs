//! The first process of a pod's shared pid namespace. It does nothing: the kernel reaps for a process that ignores
//! SIGCHLD.
//!
//! It is a fork of the shim, and shares the shim's memory. Where processes have SELinux labels it has the pod's, as
//! the first process of other runtimes' pods has: the pod's containers may then look at process 1. Only a process that
//! starts a program gets another label (policies let nobody change his own while he runs), so there it starts this
//! same program anew, under the name [`NAME`]. The policy of containers lets their processes begin with any program.
//!
//! It lives in the shim's mounts, which are the node's, and a container that may trace processes reaches it. So it has
//! an empty root directory, and no right but that to trace: who reaches it has that one, and gains no other.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use caps::{CapSet, Capability};
use coracle_proto::shim::SandboxConfig;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{chdir, chroot, fchdir};

use crate::kernel::{self, Fork};
use crate::report::note;
use crate::selinux;

/// What an init is called that is a program of its own.
pub(crate) const NAME: &std::ffi::CStr = c"coracle-init";

/// A directory that shows what a process has open, of which it has next to nothing.
const EMPTY: &str = "/proc/self/fdinfo";

/// An init that is about to be.
#[derive(Debug)]
pub(crate) struct Init {
    /// None leaves it a fork of the shim's.
    relabelled: Option<Relabelled>,
}

#[derive(Debug)]
struct Relabelled {
    label: String,
    /// The pod's shared memory, a mount with the pod's label; empty if it has none of its own.
    shm_dir: String,
    /// Its end means the end of the shim. The kernel forgets what is to be sent when a parent dies as it gives a
    /// process another label, and the shim may die before it is told again.
    listens: OwnedFd,
    lives: OwnedFd,
}

// === impl Init ===

impl Init {
    pub(crate) fn of(config: &SandboxConfig) -> io::Result<Self> {
        if config.process_label.is_empty() {
            return Ok(Self { relabelled: None });
        }
        let (listens, lives) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let (label, shm_dir) = (config.process_label.clone(), config.shm_dir.clone());
        Ok(Self { relabelled: Some(Relabelled { label, shm_dir, listens, lives }) })
    }

    /// Starts it in a new pid namespace, and returns its pid.
    pub(crate) fn start(&self) -> io::Result<i32> {
        match kernel::clone(libc::CLONE_NEWPID, libc::SIGCHLD)? {
            Fork::Parent(pid) => Ok(pid),
            Fork::Child => self.run(),
        }
    }

    /// The pod is made, so one that waits for that goes on.
    pub(crate) fn go_on(&self) -> io::Result<()> {
        let Some(relabelled) = &self.relabelled else { return Ok(()) };
        Ok(nix::unistd::write(&relabelled.lives, b"g").map(drop)?)
    }

    /// What the shim keeps for as long as it lives.
    pub(crate) fn into_lifeline(self) -> Option<OwnedFd> {
        self.relabelled.map(|relabelled| relabelled.lives)
    }

    /// Is the init, to its end.
    pub(crate) fn run(&self) -> ! {
        kernel::reset_signals();
        if let Some(relabelled) = &self.relabelled
            && let Err(error) = relabelled.begin_anew()
        {
            // With the shim's own label the pod is as good, but for looking at process 1.
            note(&format!("start an init with the label {}: {error}", relabelled.label));
        }
        let null = fs::OpenOptions::new().read(true).write(true).open("/dev/null");
        if let Err(error) = chdir(EMPTY).map_err(io::Error::from).and_then(|()| confine()) {
            note(&format!("confine the pod's init: {error}"));
            kernel::leave(1);
        }
        let quiet = null.and_then(|null| (0..=2).try_for_each(|fd| kernel::place(null.as_raw_fd(), fd)));
        if quiet.is_err() || kernel::die_with_parent().is_err() || kernel::set_name(NAME).is_err() {
            kernel::leave(1);
        }
        if let Err(error) = kernel::close_all_but(&[]) {
            note(&format!("close the shim's descriptors in the pod's init: {error}"));
            kernel::leave(1);
        }
        kernel::ignore_children();
        loop {
            nix::unistd::pause();
        }
    }
}

impl Relabelled {
    /// Returns when it is refused.
    fn begin_anew(&self) -> io::Result<()> {
        // Without the other end, or it would wait for itself.
        kernel::close_all_but(&[self.listens.as_raw_fd()])?;
        // An init that is made inside a user namespace is there before the pod's mounts.
        if nix::unistd::read(&self.listens, &mut [0]) != Ok(1) {
            kernel::leave(1);
        }
        selinux::exec_as(&self.label)?;
        let null = fs::OpenOptions::new().write(true).open("/dev/null")?;
        let root = self.root().unwrap_or(null.try_clone()?);
        // The new program has three descriptors, of which a container's label may use the kind.
        let errors = kernel::duplicate(2)?;
        kernel::place(self.listens.as_raw_fd(), 0)?;
        kernel::place(root.as_raw_fd(), 1)?;
        kernel::place(null.as_raw_fd(), 2)?;
        let none: [&std::ffi::CStr; 0] = [];
        let Err(errno) = nix::unistd::execve(c"/proc/self/exe", &[NAME], &none);
        kernel::place(errors.as_raw_fd(), 2)?;
        Err(errno.into())
    }

    /// What containers look for in process 1 are mounts with a label of the pod's.
    fn root(&self) -> Option<fs::File> {
        let mut how = fs::OpenOptions::new();
        how.read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY);
        how.open(&self.shm_dir).ok().filter(|_| Path::new(&self.shm_dir).is_absolute())
    }
}

/// Makes the working directory the root, and gives up all rights but one. What is without rights anybody may trace that
/// has its user's id: he would be rid of his seccomp profile and of his limits.
fn confine() -> io::Result<()> {
    let rooted = chroot(".").map_err(io::Error::from);
    // Or whoever traces it has it start something as root.
    kernel::no_new_privileges()?;
    let all = caps::read(None, CapSet::Permitted).map_err(io::Error::other)?;
    let kept = all.into_iter().filter(|right| *right == Capability::CAP_SYS_PTRACE).collect();
    for set in [CapSet::Inheritable, CapSet::Effective, CapSet::Permitted] {
        caps::set(None, set, &kept).map_err(io::Error::other)?;
    }
    rooted
}

/// Whether this program was started to be an init.
pub(crate) fn is_called() -> bool {
    std::env::args_os().next().is_some_and(|name| name.as_encoded_bytes() == NAME.to_bytes())
}

/// Is the init, until the shim ends.
pub(crate) fn main() -> ! {
    if kernel::die_with_parent().is_err() || kernel::set_name(NAME).is_err() {
        kernel::leave(1);
    }
    // A policy may forbid it, which confines by itself.
    if fchdir(io::stdout()).or_else(|_no_directory| chdir(EMPTY)).is_ok() {
        drop(confine());
    }
    if kernel::close_all_but(&[]).is_err() {
        kernel::leave(1);
    }
    kernel::ignore_children();
    let line = io::stdin();
    loop {
        // Nothing is ever written: what comes is the end.
        let mut ends = [PollFd::new(line.as_fd(), PollFlags::empty())];
        if poll(&mut ends, PollTimeout::NONE).is_ok_and(|ended| ended > 0) {
            kernel::leave(0);
        }
    }
}
