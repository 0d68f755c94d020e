//! Process 1 of a pod's shared pid namespace. It waits for the end of the shim; the kernel reaps for a process that
//! ignores SIGCHLD.
//!
//! A container of the pod that may trace reaches everything that process 1 has. So it has next to nothing:
//! - [`root`]: a mount namespace of its own, whose only mount is a read-only tmpfs with the program;
//! - [`program`]: an executable of its own, in which nothing of the shim's memory and of the node's files is left;
//! - [`confine`]: the user and the profiles that the pod asks for, and no capability but that to trace;
//! - two pipes as its standard streams.
//!
//! Where processes have SELinux labels it has the pod's, as the first process of other runtimes' pods has: the pod's
//! containers may then look at process 1. A process gets another label only when it starts a program.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};

use coracle_proto::shim::SandboxConfig;
use nix::fcntl::OFlag;

use self::confine::{ConfineError, Confinement};
use crate::fault;
use crate::kernel::{self, Fork};
use crate::process::PidNamespace;
use crate::report::note;
use crate::selinux;

mod confine;
mod program;
mod root;

/// Name of the process and of its program.
const NAME: &std::ffi::CStr = c"coracle-init";
/// The program in the root directory of process 1.
const PROGRAM: &std::ffi::CStr = c"/coracle-init";

/// Descriptor whose end ends the program.
const LIFELINE: RawFd = 0;
/// Descriptors of the word that the program waits, or of the reason why it does not.
const WORD: [RawFd; 2] = [1, 2];
/// The word of the program when it waits.
const SETTLED: u8 = b'+';
/// Most bytes of an error: what a pipe takes at once.
const LONGEST_WORD: usize = 4096;

/// A process 1 to be started.
#[derive(Debug)]
pub(crate) struct Init {
    confinement: Confinement,
    /// SELinux labels of the process and of its files; empty without SELinux.
    process_label: String,
    mount_label: String,
    /// The kernel forgets the parent-death signal when a process gets another SELinux label. The pipe's end stays.
    listens: OwnedFd,
    lives: OwnedFd,
    /// The word, and where it is said.
    hears: OwnedFd,
    says: OwnedFd,
}

/// Process 1 of the pod.
#[derive(Debug)]
pub(crate) struct Process1 {
    pid: i32,
    pidfd: OwnedFd,
    namespace: PidNamespace,
    /// The pipe whose end ends the program.
    _lifeline: OwnedFd,
}

/// The step that failed.
#[derive(Debug, thiserror::Error)]
enum InitError {
    #[error("connect the standard streams of process 1")]
    Streams(#[source] io::Error),
    #[error("give process 1 a root directory of its own")]
    Root(#[source] io::Error),
    #[error(transparent)]
    Confine(#[from] ConfineError),
    #[error("start the program of process 1")]
    Program(#[source] nix::Error),
}

// === impl Init ===

impl Init {
    /// `None` for a pod without a shared pid namespace.
    pub(crate) fn of(config: &SandboxConfig) -> io::Result<Option<Self>> {
        if !config.share_pid {
            return Ok(None);
        }
        let (hears, says) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let (listens, lives) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        Ok(Some(Self {
            confinement: Confinement::of(config.init.clone().unwrap_or_default())?,
            process_label: config.process_label.clone(),
            mount_label: config.mount_label.clone(),
            listens,
            lives,
            hears,
            says,
        }))
    }

    /// Starts it in a new pid namespace, and returns its pid.
    pub(crate) fn start(&self) -> io::Result<i32> {
        match kernel::clone(libc::CLONE_NEWPID, libc::SIGCHLD)? {
            Fork::Parent(pid) => Ok(pid),
            Fork::Child => self.run(),
        }
    }

    /// Returns when the program waits. `pid` is the started process, which is not reaped yet.
    pub(crate) fn settled(self, pid: i32) -> io::Result<Process1> {
        let Self { hears, says, lives, .. } = self;
        // With a copy of this end open, the end of process 1 would not be heard.
        drop(says);
        let mut word = [0; LONGEST_WORD];
        match nix::unistd::read(&hears, &mut word)? {
            0 => Err(io::Error::other("process 1 ended before it could wait")),
            _ if word[0] == SETTLED => Process1::of_child(pid, lives),
            len => Err(io::Error::other(String::from_utf8_lossy(&word[..len]).into_owned())),
        }
    }

    /// The whole life of process 1 up to its program.
    pub(crate) fn run(&self) -> ! {
        kernel::reset_signals();
        let Err(error) = self.become_program();
        let why = fault::chain(&error);
        let _unheard =
            nix::unistd::write(kernel::borrow(WORD[0]), &why.as_bytes()[..why.len().min(LONGEST_WORD)]);
        kernel::leave(1)
    }

    fn become_program(&self) -> Result<std::convert::Infallible, InitError> {
        self.take_label();
        self.connect().map_err(InitError::Streams)?;
        kernel::ignore_children();
        // Needs /proc, which is out of reach from the new root.
        self.confinement.take_profile()?;
        let label = Some(self.mount_label.as_str()).filter(|label| !label.is_empty());
        root::enter(label).map_err(InitError::Root)?;
        self.confinement.take()?;
        let none: [&std::ffi::CStr; 0] = [];
        let Err(errno) = nix::unistd::execve(PROGRAM, &[NAME], &none);
        Err(InitError::Program(errno))
    }

    /// Of a pod without a label, and where the policy refuses, process 1 has the shim's own label. All that the pod
    /// loses is that its containers may look at process 1.
    fn take_label(&self) {
        if self.process_label.is_empty() {
            return;
        }
        if let Err(error) = selinux::exec_as(&self.process_label) {
            note(&format!("start an init with the label {}: {error}", self.process_label));
        }
    }

    fn connect(&self) -> io::Result<()> {
        kernel::place(self.listens.as_raw_fd(), LIFELINE)?;
        WORD.into_iter().try_for_each(|fd| kernel::place(self.says.as_raw_fd(), fd))
    }
}

// === impl Process1 ===

impl Process1 {
    fn of_child(pid: i32, lifeline: OwnedFd) -> io::Result<Self> {
        let pidfd = kernel::pidfd_open(pid)?;
        let ended = || io::Error::other("process 1 has ended");
        let namespace = PidNamespace::of_child(pid).ok_or_else(ended)?;
        Ok(Self { pid, pidfd, namespace, _lifeline: lifeline })
    }

    /// Its number, which is another process's once it has ended.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    pub(crate) fn namespace(&self) -> &PidNamespace {
        &self.namespace
    }

    /// The kernel kills all processes of its namespace with it.
    pub(crate) fn kill(&self) {
        let _ended_meanwhile = kernel::send_signal(&self.pidfd, libc::SIGKILL);
    }
}
