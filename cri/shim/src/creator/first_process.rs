//! The container's first process from its fork to its program, step by step.

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
use super::masked_paths::MaskError;
use super::mounts::MountError;
use super::{CreateRequest, devices, masked_paths, mounts, place};
use crate::call_error;
use crate::identity::{self, IdentityError};
use crate::kernel::{self, Depth, READ_ONLY};
use crate::null;
use crate::overlay::{self, OverlayError};
use crate::program;
use crate::report::{Message, Reporter};
use crate::seccomp::Filter;
use crate::selinux;
use crate::terminal;

/// Arguments of the first process.
pub(super) struct FirstProcess<'a> {
    pub(super) request: &'a CreateRequest<'a>,
    pub(super) spec: &'a Spec,
    pub(super) root: Root<'a>,
    /// Socket to which the terminal's master is sent.
    pub(super) console: Option<&'a OwnedFd>,
    pub(super) reporter: Reporter,
}

/// The container's root file system.
#[derive(Clone, Copy)]
pub(super) enum Root<'a> {
    /// An overlay that this process mounts itself. The kernel unmounts it at the end of this mount namespace.
    Layers(&'a Overlay),
    Directory(&'a Path),
}

/// The step that failed.
#[derive(Debug, thiserror::Error)]
enum FirstError {
    #[error("the spec has no process")]
    NoProcess,
    #[error("cannot begin a session")]
    Session(#[source] nix::Error),
    #[error("cannot connect the standard streams")]
    Stdio(#[source] io::Error),
    #[error("cannot set the propagation of the container's mounts")]
    Propagation(#[source] nix::Error),
    #[error("cannot mount the root file system")]
    Overlay(#[source] OverlayError),
    #[error("cannot open the root file system {}", .path.display())]
    Root { path: PathBuf, source: io::Error },
    #[error(transparent)]
    Mount(#[from] MountError),
    #[error(transparent)]
    Device(#[from] DeviceError),
    #[error(transparent)]
    Mask(#[from] MaskError),
    #[error("cannot make the working directory {}", .path.display())]
    Cwd { path: PathBuf, source: io::Error },
    #[error("cannot enter the root file system")]
    Enter(#[source] io::Error),
    #[error("cannot set up the terminal of the container")]
    Terminal(#[source] io::Error),
    #[error("cannot make the root file system read-only")]
    ReadOnly(#[source] io::Error),
    #[error("cannot close the shim's descriptors")]
    Close(#[source] io::Error),
    #[error("cannot read the seccomp profile")]
    Filter(#[source] io::Error),
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// Runs the first process to its end.
pub(super) fn run(first: &FirstProcess<'_>) -> ! {
    let reporter = first.reporter;
    // The change of ids clears this setting, so it is set again below. If the shim exits between the two calls, this
    // process detects the closed start pipe.
    let _ = kernel::set_parent_death_signal();
    let prepared = prepare(first);
    let (process, env) = match prepared {
        Ok(prepared) => prepared,
        Err(error) => {
            reporter.send(&Message::Failed(Kind::Internal, call_error::chain(&error)));
            kernel::leave(255)
        }
    };
    // The pod's processes end with the shim. The signal for that is set again, because the change of ids clears it.
    let _ = kernel::set_parent_death_signal();
    reporter.send(&Message::Ready);
    if !is_started(first.request.start_pipe) {
        kernel::leave(255)
    }
    let (kind, message) = program::become_program(process.args().as_deref().unwrap_or_default(), &env);
    reporter.send(&Message::Failed(kind, message));
    kernel::leave(if kind == Kind::CommandNotFound { 127 } else { 126 })
}

/// Waits for the start byte. If the pipe is closed without a start byte, the shim has exited.
fn is_started(start_pipe: &OwnedFd) -> bool {
    loop {
        match nix::unistd::read(start_pipe, &mut [0]) {
            Err(nix::Error::EINTR) => {}
            read => return read == Ok(1),
        }
    }
}

fn prepare<'a>(first: &FirstProcess<'a>) -> Result<(&'a Process, Vec<CString>), FirstError> {
    let process = first.spec.process().as_ref().ok_or(FirstError::NoProcess)?;
    nix::unistd::setsid().map_err(FirstError::Session)?;
    connect(first.request).map_err(FirstError::Stdio)?;
    let before = umask(Mode::empty());
    let root = separate(first)?;
    fill_root(first, process, root.as_fd())?;
    coracle_fault::point("shim.creator-filled");
    // This step precedes the change of the root, because it needs the host's /proc. No process runs in the
    // container yet.
    take_own_null(root.as_fd()).map_err(FirstError::Stdio)?;
    umask(before);
    kernel::change_root(&root).map_err(FirstError::Enter)?;
    share_root(first.spec).map_err(FirstError::Propagation)?;
    if let Some(console) = first.console {
        // The terminal comes from the container's own devpts, so that the terminal has a path in the container.
        let own = terminal::set_up(&root, console, process.user().uid()).map_err(FirstError::Terminal)?;
        mount_console(root.as_fd(), &own).map_err(FirstError::Terminal)?;
    }
    if first.spec.root().as_ref().and_then(|root| root.readonly()) == Some(true) {
        kernel::set_attributes(&root, READ_ONLY, Depth::One).map_err(FirstError::ReadOnly)?;
    }
    drop(root);
    // No descriptor of the host is open when the container's own paths are resolved.
    let keep = [first.reporter.fd(), first.request.start_pipe.as_raw_fd()];
    kernel::close_all_but(&keep).map_err(FirstError::Close)?;
    let filter = Filter::of(first.spec, || Ok(first.request.seccomp_program.to_vec()));
    let env = identity::assume(process, filter.map_err(FirstError::Filter)?.as_ref())?;
    Ok((process, env))
}

fn connect(request: &CreateRequest<'_>) -> io::Result<()> {
    let ends = [&request.ends.stdin, &request.ends.stdout, &request.ends.stderr];
    for (end, standard) in ends.into_iter().zip(0..) {
        if let Some(end) = end {
            kernel::dup_to(end.as_raw_fd(), standard)?;
        }
    }
    Ok(())
}

/// Sets the propagation of this mount namespace to the propagation that the volumes require. Makes the root file system
/// a mount of this namespace.
fn separate(first: &FirstProcess<'_>) -> Result<OwnedFd, FirstError> {
    let flags = match propagation(first.spec) {
        "private" => Some(MsFlags::MS_PRIVATE),
        // Only "shared" volumes are shared; all other mounts are already slaves of the host's mounts.
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

/// Mounts and makes everything below the container's root: mounts, devices, working directory, masked paths.
fn fill_root(first: &FirstProcess<'_>, process: &Process, root: BorrowedFd<'_>) -> Result<(), FirstError> {
    let label = selinux::mount_label(first.spec);
    let mut own_dev = None;
    for entry in first.spec.mounts().iter().flatten() {
        mounts::mount(root, entry, label)?;
        own_dev = devices::own_file_system(root, entry)?.or(own_dev);
    }
    let nodes = if first.request.user.is_some() { Nodes::Bound } else { Nodes::Made };
    devices::fill(root, first.spec, nodes, own_dev)?;
    let cwd = process.cwd();
    match place::make_directories(root, cwd) {
        // The volume is read-only. The later chdir reports the missing directory.
        Err(error) if error.kind() != ErrorKind::ReadOnlyFilesystem => {
            return Err(FirstError::Cwd { path: cwd.clone(), source: error });
        }
        Ok(_) | Err(_) => {}
    }
    Ok(masked_paths::apply(root, first.spec)?)
}

/// Makes the root shared if a volume needs it: with a private root, the container's mounts would not propagate.
fn share_root(spec: &Spec) -> nix::Result<()> {
    if propagation(spec) != "shared" {
        return Ok(());
    }
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_SHARED, none)
}

/// Replaces standard streams that are the host's /dev/null by the container's /dev/null. CRIU can restore the mount of
/// the container's device node, but not the mount of the host's.
fn take_own_null(root: BorrowedFd<'_>) -> io::Result<()> {
    for standard in 0..3 {
        if null::is_null(kernel::borrow(standard))? {
            kernel::dup_to(null::open_in(root)?.as_raw_fd(), standard)?;
        }
    }
    Ok(())
}

/// Mounts the terminal at /dev/console.
fn mount_console(root: BorrowedFd<'_>, terminal: &OwnedFd) -> io::Result<()> {
    let place = console_place(root)?;
    kernel::attach_mount_at(&kernel::copy_mount_at(terminal, Depth::One)?, place)
}

/// Opens the mount point of the terminal, and makes the file if it is missing. Links are not followed (CVE-2025-52565).
fn console_place(root: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let console = Path::new("/dev/console");
    drop(place::make(root, console, place::Kind::File)?);
    kernel::open_plain_in_root(root, console, libc::O_PATH | libc::O_NOFOLLOW)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn cve_2025_52565_a_link_at_the_console_is_not_followed() {
        let base = std::env::temp_dir().join(format!("coracle-console-{}", std::process::id()));
        for [name, link, target] in
            [["of-console", "dev/console", "/volume/console"], ["of-dev", "dev", "/volume"]]
        {
            let root = base.join(name);
            std::fs::create_dir_all(root.join("volume")).unwrap();
            std::fs::write(root.join("volume/console"), "").unwrap();
            std::fs::create_dir_all(root.join(link).parent().unwrap()).unwrap();
            symlink(target, root.join(link)).unwrap();
            let open = File::open(&root).unwrap();
            // The link itself may be the mount point: a mount on it does not cover its target.
            let is_followed = console_place(open.as_fd())
                .is_ok_and(|place| !File::from(place).metadata().unwrap().file_type().is_symlink());
            assert!(!is_followed, "{name}");
        }
        let root = base.join("plain");
        std::fs::create_dir_all(root.join("dev")).unwrap();
        console_place(File::open(&root).unwrap().as_fd()).unwrap();
        assert!(root.join("dev/console").is_file());
        std::fs::remove_dir_all(base).unwrap();
    }
}
