//! The creator: a fork of the shim that makes one container and ends.
//!
//! The only code that calls the container library. That library changes the process it runs in
//! (working directory, out-of-memory score, dumpability) and allocates between its own forks, so it
//! gets a single-threaded process that nobody misses.

mod cgroup_mount;
mod cwd;
mod propagation;
mod runner;
pub(crate) mod spec;
mod trace;

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use coracle_proto::shim::Overlay;
use coracle_proto::shim::error::Kind;
use libcontainer::container::builder::ContainerBuilder;
use libcontainer::error::LibcontainerError;
use libcontainer::oci_spec::OciSpecError;
use libcontainer::oci_spec::runtime::Spec;
use libcontainer::syscall::syscall::SyscallType;

use crate::cgroup::{self, Hierarchy};
use crate::fault;
use crate::kernel;
use crate::overlay::{self, OverlayError};
use crate::report::{Speaker, Word};
use crate::stdio::Ends;

/// Everything that a creator needs to know, gathered before the fork.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    pub(crate) id: &'a str,
    /// Holds the runtime's config.json, which is read and not changed.
    pub(crate) bundle: &'a Path,
    /// The container's own directory: the adjusted config.json goes there.
    pub(crate) dir: &'a Path,
    /// Where the library keeps its state.
    pub(crate) state: &'a Path,
    pub(crate) rootfs: Option<&'a Overlay>,
    pub(crate) console: Option<&'a Path>,
    pub(crate) ends: &'a Ends,
    pub(crate) host_mounts: &'a OwnedFd,
    pub(crate) hierarchies: &'a [Hierarchy],
    /// One of the shim's own cgroups.
    pub(crate) warming: Option<&'a PathBuf>,
}

#[derive(Debug, thiserror::Error)]
enum CreateError {
    #[error("read {}", .path.display())]
    Read { path: PathBuf, source: OciSpecError },
    #[error("the spec has no {0}")]
    Missing(&'static str),
    #[error("the cgroup {0:?} is not below the root of its hierarchy")]
    Cgroup(String),
    #[error("mount the root file system")]
    Rootfs(#[source] OverlayError),
    #[error("make the working directory {}", .path.display())]
    Cwd { path: PathBuf, source: io::Error },
    #[error("prepare the volumes' propagation")]
    Propagation(#[source] propagation::PropagationError),
    #[error("adjust the spec")]
    Build(#[source] OciSpecError),
    #[error("write {}", .path.display())]
    Write { path: PathBuf, source: OciSpecError },
    #[error("duplicate a descriptor")]
    Duplicate(#[source] io::Error),
    #[error("create the container")]
    Library(#[source] Box<LibcontainerError>),
}

/// The child's whole life.
pub(crate) fn run(plan: &Plan<'_>, speaker: Speaker) -> ! {
    kernel::reset_signals();
    let _ = kernel::set_name(c"coracle-create");
    let ends = [&plan.ends.stdin, &plan.ends.stdout, &plan.ends.stderr];
    let mut keep: Vec<RawFd> = ends.into_iter().flatten().map(AsRawFd::as_raw_fd).collect();
    keep.extend([speaker.fd(), plan.host_mounts.as_raw_fd()]);
    kernel::close_all_but(&keep);
    trace::install(speaker);
    warm(plan.warming);
    match create(plan, speaker) {
        Ok(pid) => speaker.say(&Word::Pid(pid)),
        Err(error) => speaker.say(&Word::Failed(kind(&error), fault::chain(&error))),
    }
    kernel::leave(0)
}

/// The library's first move into a cgroup waits for an RCU grace period. A move that changes nothing
/// begins that wait now, beside all that is to be done before; refused, it costs only the time.
fn warm(cgroup: Option<&PathBuf>) {
    if let Some(cgroup) = cgroup {
        let _ = kernel::fork_briefly(|| drop(cgroup::put(std::slice::from_ref(cgroup), 0)));
    }
}

fn kind(error: &CreateError) -> Kind {
    match error {
        CreateError::Read { .. } | CreateError::Missing(_) | CreateError::Cgroup(_) => Kind::Invalid,
        CreateError::Library(error) => match **error {
            LibcontainerError::InvalidSpec(_) => Kind::Invalid,
            _ => Kind::Internal,
        },
        _ => Kind::Internal,
    }
}

fn create(plan: &Plan<'_>, speaker: Speaker) -> Result<i32, CreateError> {
    let path = plan.bundle.join("config.json");
    let mut spec = Spec::load(&path).map_err(|source| CreateError::Read { path, source })?;
    let cgroup = spec.linux().as_ref().and_then(|linux| linux.cgroups_path().clone());
    let cgroup = cgroup.ok_or(CreateError::Missing("cgroupsPath"))?;
    let cgroup = cgroup.to_string_lossy().into_owned();
    if !cgroup::is_below_root(&cgroup) {
        return Err(CreateError::Cgroup(cgroup));
    }
    speaker.say(&Word::Cgroup(cgroup.clone()));

    if let Some(overlay) = plan.rootfs {
        // Still in the shim's mount namespace: it goes when the shim goes.
        overlay::mount_at_target(overlay).map_err(CreateError::Rootfs)?;
        if let Some(root) = spec.root_mut() {
            root.set_path(PathBuf::from(&overlay.target));
        }
    }
    spec::adjust(&mut spec, &spec::Host::look());
    let root = spec.root().as_ref().ok_or(CreateError::Missing("root"))?.path().clone();
    let root = plan.bundle.join(root);
    cwd::make(&spec, &root).map_err(|(path, source)| CreateError::Cwd { path, source })?;
    propagation::prepare(&mut spec, plan.dir, plan.host_mounts).map_err(CreateError::Propagation)?;
    cgroup_mount::replace(&mut spec, plan.hierarchies, &cgroup).map_err(CreateError::Build)?;
    give_to_user(&spec, plan.ends);
    let path = plan.dir.join("config.json");
    spec.save(&path).map_err(|source| CreateError::Write { path, source })?;
    build(plan, speaker)
}

/// Gives the pipes to the container's user, who could not open /dev/stdout otherwise. Never the
/// host's /dev/null, which is what no input is.
fn give_to_user(spec: &Spec, ends: &Ends) {
    let Some(process) = spec.process() else { return };
    let user = process.user().uid();
    let mappings = spec.linux().as_ref().and_then(|linux| linux.uid_mappings().clone()).unwrap_or_default();
    let inside = mappings.iter().find(|m| user >= m.container_id() && user - m.container_id() < m.size());
    let owner = inside.map_or(user, |m| m.host_id() + (user - m.container_id()));
    for end in [&ends.stdin, &ends.stdout, &ends.stderr].into_iter().flatten() {
        let is_pipe =
            nix::sys::stat::fstat(end).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFIFO);
        if is_pipe {
            // A refusal costs only the opening by name.
            let _ = nix::unistd::fchown(end, Some(owner.into()), None);
        }
    }
}

fn build(plan: &Plan<'_>, speaker: Speaker) -> Result<i32, CreateError> {
    let library = |error| CreateError::Library(Box::new(error));
    let mut builder = ContainerBuilder::new(plan.id.to_owned(), SyscallType::default())
        .with_root_path(plan.state)
        .map_err(library)?
        .with_executor(runner::Runner { speaker })
        .with_console_socket(plan.console);
    if let Some(stdin) = &plan.ends.stdin {
        builder = builder.with_stdin(own(stdin)?);
    }
    if let Some(stdout) = &plan.ends.stdout {
        builder = builder.with_stdout(own(stdout)?);
    }
    if let Some(stderr) = &plan.ends.stderr {
        builder = builder.with_stderr(own(stderr)?);
    }
    let container = builder
        .as_init(plan.dir)
        .with_systemd(false)
        .with_detach(true)
        .as_sibling(true)
        .build()
        .map_err(library)?;
    container.pid().map(|pid| pid.as_raw()).ok_or(CreateError::Missing("process"))
}

/// The library takes ownership, and this process is a copy whose owners never drop.
fn own(fd: &OwnedFd) -> Result<OwnedFd, CreateError> {
    let borrowed: BorrowedFd<'_> = kernel::borrow(fd.as_raw_fd());
    borrowed.try_clone_to_owned().map_err(CreateError::Duplicate)
}

/// Removes what the library and the creator left of a container.
pub(crate) fn forget(dir: &Path, state: &Path) -> io::Result<()> {
    for path in [dir, state] {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
