//! The first process of a pod's shared pid namespace. It does nothing: the kernel reaps for a process that ignores
//! SIGCHLD.
//!
//! It is a fork of the shim, and shares the shim's memory. Where processes have SELinux labels it has the pod's, as
//! the first process of other runtimes' pods has: the pod's containers may then look at process 1. Only a process that
//! starts a program gets another label (policies let nobody change his own while he runs), so there it starts this
//! same program anew, under the name [`NAME`]. The policy of containers lets their processes begin with any program.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use coracle_proto::shim::SandboxConfig;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::kernel::{self, Fork};
use crate::report::note;
use crate::selinux;

/// What an init is called that is a program of its own.
pub(crate) const NAME: &std::ffi::CStr = c"coracle-init";

/// An init that is about to be.
#[derive(Debug)]
pub(crate) struct Init {
    /// None leaves it a fork of the shim's.
    relabelled: Option<Relabelled>,
}

#[derive(Debug)]
struct Relabelled {
    label: String,
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
        Ok(Self { relabelled: Some(Relabelled { label: config.process_label.clone(), listens, lives }) })
    }

    /// Starts it in a new pid namespace, and returns its pid.
    pub(crate) fn start(&self) -> io::Result<i32> {
        match kernel::clone(libc::CLONE_NEWPID, libc::SIGCHLD)? {
            Fork::Parent(pid) => Ok(pid),
            Fork::Child => self.run(),
        }
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
        let quiet = null.and_then(|null| (0..=2).try_for_each(|fd| kernel::place(null.as_raw_fd(), fd)));
        if quiet.is_err() || kernel::die_with_parent().is_err() || kernel::set_name(NAME).is_err() {
            kernel::leave(1);
        }
        kernel::close_all_but(&[]);
        kernel::ignore_children();
        loop {
            nix::unistd::pause();
        }
    }
}

impl Relabelled {
    /// Returns when it is refused.
    fn begin_anew(&self) -> io::Result<()> {
        selinux::exec_as(&self.label)?;
        let null = fs::OpenOptions::new().write(true).open("/dev/null")?;
        // The new program has three descriptors, of which a container's label may use the kind.
        let errors = kernel::duplicate(2)?;
        kernel::place(self.listens.as_raw_fd(), 0)?;
        (1..=2).try_for_each(|fd| kernel::place(null.as_raw_fd(), fd))?;
        let none: [&std::ffi::CStr; 0] = [];
        let Err(errno) = nix::unistd::execve(c"/proc/self/exe", &[NAME], &none);
        kernel::place(errors.as_raw_fd(), 2)?;
        Err(errno.into())
    }
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
    kernel::close_all_but(&[]);
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
