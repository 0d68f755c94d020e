//! The life of a container's first process, from its fork to its program: a straight line of steps.

use std::ffi::CString;
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use coracle_proto::shim::Overlay;
use coracle_proto::shim::error::Kind;
use libcontainer::oci_spec::runtime::{Process, Spec};
use nix::mount::{MsFlags, mount};
use nix::sys::stat::{Mode, umask};

use super::devices::{DeviceError, Nodes};
use super::hidden::HiddenError;
use super::mounts::MountError;
use super::{Plan, devices, hidden, mounts, place};
use crate::fault;
use crate::identity::{self, IdentityError};
use crate::kernel::{self, Depth, READ_ONLY};
use crate::null;
use crate::overlay::{self, OverlayError};
use crate::program;
use crate::report::{Speaker, Word};
use crate::seccomp::Filter;
use crate::selinux;
use crate::terminal;

/// What it was forked with.
pub(super) struct First<'a> {
    pub(super) plan: &'a Plan<'a>,
    pub(super) spec: &'a Spec,
    pub(super) root: Root<'a>,
    /// Where a terminal's master is sent to.
    pub(super) console: Option<&'a OwnedFd>,
    pub(super) speaker: Speaker,
}

/// The container's root file system.
#[derive(Clone, Copy)]
pub(super) enum Root<'a> {
    /// Still to be mounted, by ourselves: so it goes with our mount namespace.
    Layers(&'a Overlay),
    Directory(&'a Path),
}

/// The step that failed.
#[derive(Debug, thiserror::Error)]
enum FirstError {
    #[error("the spec has no process")]
    NoProcess,
    #[error("begin a session")]
    Session(#[source] nix::Error),
    #[error("connect the standard streams")]
    Stdio(#[source] io::Error),
    #[error("separate the mounts of the container")]
    Propagation(#[source] nix::Error),
    #[error("mount the root file system")]
    Overlay(#[source] OverlayError),
    #[error("open the root file system {}", .path.display())]
    Root { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Hidden(#[from] HiddenError),
    #[error("make the working directory {}", .path.display())]
    Cwd { path: PathBuf, source: io::Error },
    #[error("enter the root file system")]
    Enter(#[source] io::Error),
    #[error("take the terminal")]
    Terminal(#[source] io::Error),
    #[error("make the root file system read-only")]
    ReadOnly(#[source] io::Error),
    #[error("close the shim's descriptors")]
    Close(#[source] io::Error),
    #[error("read the seccomp profile")]
    Filter(#[source] io::Error),
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// The whole life.
pub(super) fn run(first: &First<'_>) -> ! {
    let speaker = first.speaker;
    // Until the change of ids; the gate's end tells what happens meanwhile.
    let _ = kernel::die_with_parent();
    let prepared = prepare(first);
    let (process, env) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            speaker.say(&Word::Failed(Kind::Internal, fault::chain(&error)));
            kernel::leave(255)
        }
    };
    // A pod ends with its shim. After the change of ids, which would clear it.
    let _ = kernel::die_with_parent();
    speaker.say(&Word::Ready);
    if !is_started(first.plan.gate) {
        kernel::leave(255)
    }
    let (kind, message) = program::become_program(process.args().as_deref().unwrap_or_default(), &env);
    speaker.say(&Word::Failed(kind, message));
    kernel::leave(if kind == Kind::CommandNotFound { 127 } else { 126 })
}

/// Waits for the start. A pipe that ends has no shim any more.
fn is_started(gate: &OwnedFd) -> bool {
    loop {
        match nix::unistd::read(gate, &mut [0]) {
            Err(nix::Error::EINTR) => {}
            read => return read == Ok(1),
        }
    }
}

fn prepare<'a>(first: &First<'a>) -> Result<(&'a Process, Vec<CString>), FirstError> {
    let process = first.spec.process().as_ref().ok_or(FirstError::NoProcess)?;
    nix::unistd::setsid().map_err(FirstError::Session)?;
    connect(first.plan).map_err(FirstError::Stdio)?;
    let before = umask(Mode::empty());
    let root = separate(first)?;
    furnish(first, process, root.as_fd())?;
    coracle_fault::point("shim.creator-furnished");
    // Before the root changes: the host's /proc is needed, and nothing runs in the container yet.
    take_own_null(root.as_fd()).map_err(FirstError::Stdio)?;
    umask(before);
    kernel::change_root(&root).map_err(FirstError::Enter)?;
    share_root(first.spec).map_err(FirstError::Propagation)?;
    if let Some(console) = first.console {
        // Made from the container's own devpts, so that it has a name in there.
        let own = terminal::take(&root, console, process.user().uid()).map_err(FirstError::Terminal)?;
        show_console(root.as_fd(), &own).map_err(FirstError::Terminal)?;
    }
    if first.spec.root().as_ref().and_then(|root| root.readonly()) == Some(true) {
        kernel::set_attributes(&root, READ_ONLY, Depth::One).map_err(FirstError::ReadOnly)?;
    }
    drop(root);
    // Nothing of the host is open any more when the container's own paths are walked.
    let keep = [first.speaker.fd(), first.plan.gate.as_raw_fd()];
    kernel::close_all_but(&keep).map_err(FirstError::Close)?;
    let filter = Filter::of(first.spec, || Ok(first.plan.seccomp_program.to_vec()));
    let env = identity::assume(process, filter.map_err(FirstError::Filter)?.as_ref())?;
    Ok((process, env))
}

fn connect(plan: &Plan<'_>) -> io::Result<()> {
    let ends = [&plan.ends.stdin, &plan.ends.stdout, &plan.ends.stderr];
    for (end, standard) in ends.into_iter().zip(0..) {
        if let Some(end) = end {
            kernel::place(end.as_raw_fd(), standard)?;
        }
    }
    Ok(())
}

/// Keeps what is mounted here from the pod, and as much of what is mounted there from here as the volumes
/// allow; and has the root as a mount of this namespace.
fn separate(first: &First<'_>) -> Result<OwnedFd, FirstError> {
    let flags = match propagation(first.spec) {
        "private" => Some(MsFlags::MS_PRIVATE),
        // What is shared is a volume that is to be; all else is the host's slave already.
        "shared" => None,
        _ => Some(MsFlags::MS_SLAVE),
    };
    let none = None::<&str>;
    if let Some(flags) = flags {
        mount(none, "/", none, MsFlags::MS_REC | flags, none).map_err(FirstError::Propagation)?;
    }
    let path = match first.root {
        Root::Layers(overlay) => {
            overlay::mount_at_target(overlay, selinux::mount_label(first.spec))
                .map_err(FirstError::Overlay)?;
            Path::new(&overlay.target)
        }
        Root::Directory(path) => {
            let failed = |source| FirstError::Root { path: path.to_owned(), source };
            let tree = kernel::copy_mounts(path).map_err(failed)?;
            kernel::attach_mount(&tree, path).map_err(failed)?;
            path
        }
    };
    let open = File::open(path).map(OwnedFd::from);
    open.map_err(|source| FirstError::Root { path: path.to_owned(), source })
}

fn propagation(spec: &Spec) -> &str {
    spec.linux().as_ref().and_then(|linux| linux.rootfs_propagation().as_deref()).unwrap_or_default()
}

/// Everything that the container finds in its root.
fn furnish(first: &First<'_>, process: &Process, root: BorrowedFd<'_>) -> Result<(), FirstError> {
    let label = selinux::mount_label(first.spec);
    for entry in first.spec.mounts().iter().flatten() {
        mounts::mount(root, entry, label)?;
    }
    let nodes = if first.plan.user.is_some() { Nodes::Bound } else { Nodes::Made };
    devices::fill(root, first.spec, nodes)?;
    let cwd = process.cwd();
    match place::make_directories(root, cwd) {
        // A read-only volume is what it is: entering says what is wrong with it.
        Err(error) if error.kind() != ErrorKind::ReadOnlyFilesystem => {
            return Err(FirstError::Cwd { path: cwd.clone(), source: error });
        }
        Ok(_) | Err(_) => {}
    }
    Ok(hidden::hide(root, first.spec)?)
}

/// For what is mounted in the container and is to be seen outside, which a private root would keep in.
fn share_root(spec: &Spec) -> nix::Result<()> {
    if propagation(spec) != "shared" {
        return Ok(());
    }
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_SHARED, none)
}

/// Makes a standard stream that is the host's /dev/null the container's, which is on a mount that CRIU knows.
fn take_own_null(root: BorrowedFd<'_>) -> io::Result<()> {
    for standard in 0..3 {
        if null::is_null(kernel::borrow(standard))? {
            kernel::place(null::open_in(root)?.as_raw_fd(), standard)?;
        }
    }
    Ok(())
}

/// Mounts the terminal at /dev/console, which must be no link (CVE-2025-52565).
fn show_console(root: BorrowedFd<'_>, terminal: &OwnedFd) -> io::Result<()> {
    let console = Path::new("/dev/console");
    drop(place::make(root, console, place::Kind::File)?);
    let place = kernel::open_plain_in_root(root, console, libc::O_PATH | libc::O_NOFOLLOW)?;
    kernel::attach_mount_at(&kernel::copy_mount_at(terminal, Depth::One)?, place)
}
