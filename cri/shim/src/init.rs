//! The first process of a pod's shared pid namespace. It does nothing: the kernel reaps for a process that ignores
//! SIGCHLD.
//!
//! It is a fork of the shim, and shares the shim's memory. Where processes have SELinux labels it has the pod's, as
//! the first process of other runtimes' pods has: the pod's containers may then look at process 1. Only a process that
//! starts a program gets another label (policies let nobody change his own while he runs), so there it starts this
//! same program anew, under the name [`NAME`]. The policy of containers lets their processes begin with any program.
//!
//! It becomes whom the pod's configuration says, and takes its profiles ([`confine`]); what it could not take the shim
//! hears, and does not become a pod. A filter forbids at most what it has left to do: to wait.
//!
//! It lives in the shim's mounts, which are the node's, and a container that may trace processes reaches it. So it has
//! an empty root directory, and no right but that to trace: who reaches it has that one, and gains no other.

use std::fs;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use coracle_proto::shim::{InitProcess, SandboxConfig};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{chdir, fchdir};
use prost::Message as _;

use self::confine::Confinement;
use crate::fault;
use crate::kernel::{self, Fork};
use crate::report::note;
use crate::selinux;

mod confine;

/// What an init is called that is a program of its own.
pub(crate) const NAME: &std::ffi::CStr = c"coracle-init";

/// A directory that shows what a process has open, of which it has next to nothing.
const EMPTY: &str = "/proc/self/fdinfo";

/// The descriptor that it says its word to. The third of three: a container's label may use no other kind, and who
/// looks finds no more.
const SAYS: RawFd = 2;
/// What it says when it is what it was to become. Else it says why not.
const SETTLED: u8 = b'+';
/// The most that it says: what a pipe takes at once.
const LONGEST_WORD: usize = 4096;

/// An init that is about to be.
#[derive(Debug)]
pub(crate) struct Init {
    confinement: Confinement,
    /// None leaves it a fork of the shim's.
    relabelled: Option<Relabelled>,
    /// Its word, and where it says it.
    hears: OwnedFd,
    says: OwnedFd,
}

#[derive(Debug)]
struct Relabelled {
    label: String,
    /// The pod's shared memory, a mount with the pod's label; empty if it has none of its own.
    shm_dir: String,
    /// What it becomes, for the new program.
    process: InitProcess,
    /// Its end means the end of the shim. The kernel forgets what is to be sent when a parent dies as it gives a
    /// process another label, and the shim may die before it is told again.
    listens: OwnedFd,
    lives: OwnedFd,
}

// === impl Init ===

impl Init {
    /// None where the pod has no pid namespace for all.
    pub(crate) fn of(config: &SandboxConfig) -> io::Result<Option<Self>> {
        if !config.share_pid {
            return Ok(None);
        }
        let process = config.init.clone().unwrap_or_default();
        let (hears, says) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let relabelled = match config.process_label.as_str() {
            "" => None,
            label => Some(Relabelled::of(label, config, process.clone())?),
        };
        Ok(Some(Self { confinement: Confinement::of(process)?, relabelled, hears, says }))
    }

    /// Starts it in a new pid namespace, and returns its pid.
    pub(crate) fn start(&self) -> io::Result<i32> {
        match kernel::clone(libc::CLONE_NEWPID, libc::SIGCHLD)? {
            Fork::Parent(pid) => Ok(pid),
            Fork::Child => self.run(),
        }
    }

    /// The pod is made, so one that waits for that goes on. Returns when it is what it was to become, with what the
    /// shim keeps for as long as it lives.
    pub(crate) fn go_on(self) -> io::Result<Option<OwnedFd>> {
        let Self { relabelled, hears, says, .. } = self;
        // Or its end would not be heard.
        drop(says);
        if let Some(relabelled) = &relabelled {
            relabelled.go_on()?;
        }
        let mut word = [0; LONGEST_WORD];
        match nix::unistd::read(&hears, &mut word)? {
            0 => Err(io::Error::other("it ended before it could wait")),
            _ if word[0] == SETTLED => Ok(relabelled.map(|relabelled| relabelled.lives)),
            len => Err(io::Error::other(String::from_utf8_lossy(&word[..len]).into_owned())),
        }
    }

    /// Is the init, to its end.
    pub(crate) fn run(&self) -> ! {
        kernel::reset_signals();
        if let Some(relabelled) = &self.relabelled
            && let Err(error) = relabelled.begin_anew(self.says.as_raw_fd())
        {
            // With the shim's own label the pod is as good, but for looking at process 1.
            note(&format!("start an init with the label {}: {error}", relabelled.label));
        }
        settle(self.settle_down());
        loop {
            stay(&mut []);
        }
    }

    fn settle_down(&self) -> Result<(), Box<dyn std::error::Error>> {
        let null = fs::OpenOptions::new().read(true).write(true).open("/dev/null")?;
        (0..SAYS).try_for_each(|fd| kernel::place(null.as_raw_fd(), fd))?;
        // All but these three are closed below, whoever owns them.
        drop(null);
        kernel::place(self.says.as_raw_fd(), SAYS)?;
        chdir(EMPTY)?;
        kernel::set_name(NAME)?;
        kernel::ignore_children();
        self.confinement.take()??;
        Ok(self.confinement.close()?)
    }
}

impl Relabelled {
    fn of(label: &str, config: &SandboxConfig, process: InitProcess) -> io::Result<Self> {
        let (listens, lives) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        Ok(Self { label: label.to_owned(), shm_dir: config.shm_dir.clone(), process, listens, lives })
    }

    /// What it becomes is less than what a pipe holds: a filter is 32 KiB at most.
    fn go_on(&self) -> io::Result<()> {
        let process = self.process.encode_length_delimited_to_vec();
        let mut lives = fs::File::from(self.lives.try_clone()?);
        io::Write::write_all(&mut lives, &[b"g", process.as_slice()].concat())
    }

    /// Returns when it is refused.
    fn begin_anew(&self, says: RawFd) -> io::Result<()> {
        // Without the other end, or it would wait for itself.
        kernel::close_all_but(&[self.listens.as_raw_fd(), says])?;
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
        kernel::place(says, SAYS)?;
        let none: [&std::ffi::CStr; 0] = [];
        let Err(errno) = nix::unistd::execve(c"/proc/self/exe", &[NAME], &none);
        kernel::place(errors.as_raw_fd(), SAYS)?;
        Err(errno.into())
    }

    /// What containers look for in process 1 are mounts with a label of the pod's.
    fn root(&self) -> Option<fs::File> {
        let mut how = fs::OpenOptions::new();
        how.read(true).custom_flags(libc::O_PATH | libc::O_DIRECTORY);
        how.open(&self.shm_dir).ok().filter(|_| Path::new(&self.shm_dir).is_absolute())
    }
}

/// Says how it went, and ends where it did not.
fn settle(settled: Result<(), Box<dyn std::error::Error>>) {
    let says = kernel::borrow(SAYS);
    match settled {
        // The profile may forbid it, and then nobody hears that it is settled.
        Ok(()) => {
            if nix::unistd::write(says, &[SETTLED]).is_err() {
                kernel::leave(1);
            }
        }
        Err(why) => {
            let why = fault::chain(why.as_ref());
            let _unheard = nix::unistd::write(says, &why.as_bytes()[..why.len().min(LONGEST_WORD)]);
            kernel::leave(1);
        }
    }
}

/// Waits, or ends where it is not let: it would never rest.
fn stay(ends: &mut [PollFd<'_>]) {
    match poll(ends, PollTimeout::NONE) {
        Ok(0) | Err(Errno::EINTR) => {}
        // Nothing is ever written: what comes is the end.
        Ok(_) => kernel::leave(0),
        Err(_) => kernel::leave(1),
    }
}

/// Whether this program was started to be an init.
pub(crate) fn is_called() -> bool {
    std::env::args_os().next().is_some_and(|name| name.as_encoded_bytes() == NAME.to_bytes())
}

/// Is the init, until the shim ends.
pub(crate) fn main() -> ! {
    settle(settle_down());
    let line = io::stdin();
    loop {
        stay(&mut [PollFd::new(line.as_fd(), PollFlags::empty())]);
    }
}

fn settle_down() -> Result<(), Box<dyn std::error::Error>> {
    kernel::set_name(NAME)?;
    kernel::ignore_children();
    let process = read_process(&mut io::stdin().lock())?;
    let confinement = Confinement::of(process)?;
    fchdir(io::stdout()).or_else(|_no_directory| chdir(EMPTY))?;
    // A policy may forbid it, which confines by itself.
    let _rooted = confinement.take()?;
    Ok(confinement.close()?)
}

/// What the shim wrote: a length, and as many bytes. Not a byte more, or it would wait for the end.
fn read_process(line: &mut impl io::Read) -> io::Result<InitProcess> {
    let mut prefix = Vec::new();
    loop {
        let mut byte = [0];
        line.read_exact(&mut byte)?;
        prefix.push(byte[0]);
        // The last byte of a varint has no highest bit.
        if byte[0] & 0x80 == 0 {
            break;
        }
    }
    let len = prost::decode_length_delimiter(prefix.as_slice())?;
    let mut bytes = vec![0; len];
    line.read_exact(&mut bytes)?;
    Ok(InitProcess::decode(bytes.as_slice())?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_it_becomes_is_read_and_nothing_after_it() {
        let process = InitProcess { uid: 7, seccomp_program: vec![1; 4096 * 8], ..InitProcess::default() };
        let mut told = process.encode_length_delimited_to_vec();
        told.extend(b"rest");
        let mut told = told.as_slice();
        assert_eq!(read_process(&mut told).unwrap(), process);
        assert_eq!(told, b"rest");
        assert!(read_process(&mut &b"\x05ab"[..]).is_err(), "torn");
    }
}
