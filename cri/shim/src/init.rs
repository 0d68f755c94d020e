//! Process 1 of a pod's shared pid namespace. The process waits until the shim ends. It ignores SIGCHLD, so that the
//! kernel reaps orphans.
//!
//! A container with CAP_SYS_PTRACE can reach all resources of process 1. So process 1 has as few resources as possible:
//! - [`root`]: a mount namespace of its own, whose only mount is a read-only tmpfs with the program;
//! - [`program`]: an executable of its own, without memory of the shim or files of the node;
//! - [`confine`]: the user and the profiles that the pod requests, and no capability except CAP_SYS_PTRACE;
//! - two pipes as its standard streams.
//!
//! With SELinux process 1 gets the pod's label, like the pause process of other runtimes. So the pod's containers may
//! inspect process 1. A process changes its label only when it executes a program.

use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd, RawFd};

use coracle_proto::shim::SandboxConfig;
use nix::fcntl::OFlag;

use self::confine::{ConfineError, Confinement};
use crate::call_error;
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

/// Descriptor of the stop pipe: standard input of the program. The program ends when the shim closes the pipe.
const STOP_FD: RawFd = 0;
/// Descriptors of the report pipe. The program reports through this pipe that it waits. If the program cannot be
/// started, the forked process writes the error into the pipe.
const REPORT_FDS: [RawFd; 2] = [1, 2];
/// The program's report that it waits.
const WAITING: u8 = b'+';
/// Maximum bytes of an error text: the size of an atomic write to a pipe (PIPE_BUF).
const MAX_REPORT: usize = 4096;

/// Arguments of a process 1.
#[derive(Debug)]
pub(crate) struct Init {
    confinement: Confinement,
    /// SELinux labels of the process and of its files; empty without SELinux.
    process_label: String,
    mount_label: String,
    /// Read end of the stop pipe. A pipe is used, because the kernel clears the parent-death signal when the SELinux
    /// label changes.
    stop_read: OwnedFd,
    stop_write: OwnedFd,
    /// The report pipe.
    report_read: OwnedFd,
    report_write: OwnedFd,
}

/// Process 1 of the pod.
#[derive(Debug)]
pub(crate) struct Process1 {
    pid: i32,
    pidfd: OwnedFd,
    namespace: PidNamespace,
    /// Write end of the stop pipe: closing it ends the program.
    _stop_write: OwnedFd,
}

/// The step that failed.
#[derive(Debug, thiserror::Error)]
enum InitError {
    #[error("cannot connect the standard streams of process 1")]
    Streams(#[source] io::Error),
    #[error("cannot give process 1 its own root directory")]
    Root(#[source] io::Error),
    #[error(transparent)]
    Confine(#[from] ConfineError),
    #[error("cannot start the program of process 1")]
    Program(#[source] nix::Error),
}

// === impl Init ===

impl Init {
    /// The arguments for this pod. `None` for a pod without a shared pid namespace.
    pub(crate) fn of(config: &SandboxConfig) -> io::Result<Option<Self>> {
        if !config.share_pid {
            return Ok(None);
        }
        let (report_read, report_write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let (stop_read, stop_write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        Ok(Some(Self {
            confinement: Confinement::of(config.init.clone().unwrap_or_default())?,
            process_label: config.process_label.clone(),
            mount_label: config.mount_label.clone(),
            stop_read,
            stop_write,
            report_read,
            report_write,
        }))
    }

    /// Forks process 1 in a new pid namespace and returns its pid.
    pub(crate) fn start(&self) -> io::Result<i32> {
        match kernel::clone(libc::CLONE_NEWPID, libc::SIGCHLD)? {
            Fork::Parent(pid) => Ok(pid),
            Fork::Child => self.run(),
        }
    }

    /// Waits for the report of the program. `pid` is the forked process, which is not reaped yet.
    pub(crate) fn wait_until_ready(self, pid: i32) -> io::Result<Process1> {
        let Self { report_read, report_write, stop_write, .. } = self;
        // Close this copy of the write end. Otherwise a read never returns the end of file.
        drop(report_write);
        let mut report = [0; MAX_REPORT];
        match nix::unistd::read(&report_read, &mut report)? {
            0 => Err(io::Error::other("process 1 ended before it was ready")),
            _ if report[0] == WAITING => Process1::of_child(pid, stop_write),
            len => Err(io::Error::other(String::from_utf8_lossy(&report[..len]).into_owned())),
        }
    }

    /// Runs process 1 up to the execution of its program.
    pub(crate) fn run(&self) -> ! {
        kernel::reset_signals();
        let Err(error) = self.become_program();
        let why = call_error::chain(&error);
        let _report_failed =
            nix::unistd::write(kernel::borrow(REPORT_FDS[0]), &why.as_bytes()[..why.len().min(MAX_REPORT)]);
        kernel::leave(1)
    }

    fn become_program(&self) -> Result<std::convert::Infallible, InitError> {
        self.set_label();
        self.connect().map_err(InitError::Streams)?;
        kernel::ignore_children();
        // This step needs /proc, which is not in the new root.
        self.confinement.set_apparmor_profile()?;
        let label = Some(self.mount_label.as_str()).filter(|label| !label.is_empty());
        root::enter(label).map_err(InitError::Root)?;
        self.confinement.apply()?;
        let none: [&std::ffi::CStr; 0] = [];
        let Err(errno) = nix::unistd::execve(PROGRAM, &[NAME], &none);
        Err(InitError::Program(errno))
    }

    /// Sets the pod's SELinux label for the program. Without a label, or if the policy refuses the label, process 1
    /// keeps the shim's label. Then the pod's containers cannot inspect process 1.
    fn set_label(&self) {
        if self.process_label.is_empty() {
            return;
        }
        if let Err(error) = selinux::exec_as(&self.process_label) {
            note(&format!("cannot start process 1 with the SELinux label {}: {error}", self.process_label));
        }
    }

    fn connect(&self) -> io::Result<()> {
        kernel::dup_to(self.stop_read.as_raw_fd(), STOP_FD)?;
        REPORT_FDS.into_iter().try_for_each(|fd| kernel::dup_to(self.report_write.as_raw_fd(), fd))
    }
}

// === impl Process1 ===

impl Process1 {
    fn of_child(pid: i32, stop_write: OwnedFd) -> io::Result<Self> {
        let pidfd = kernel::pidfd_open(pid)?;
        let ended = || io::Error::other("process 1 has ended");
        let namespace = PidNamespace::of_child(pid).ok_or_else(ended)?;
        Ok(Self { pid, pidfd, namespace, _stop_write: stop_write })
    }

    /// The pid of process 1. The kernel may reuse the pid after the end of process 1.
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    pub(crate) fn namespace(&self) -> &PidNamespace {
        &self.namespace
    }

    /// Kills process 1. The kernel then kills all processes of its namespace.
    pub(crate) fn kill(&self) {
        let _already_ended = kernel::send_signal(&self.pidfd, libc::SIGKILL);
    }
}
