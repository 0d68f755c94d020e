//! The creator: a fork of the shim that makes one container and ends.
//!
//! It changes the process that it runs in (cgroups, namespaces, limits, dumpability), so that is one that
//! nobody misses. Two ways lead from the spec to the container's first process:
//!
//! - ours, for every spec that is [`ordinary`]: `launch`, the creator's part up to the fork, and `first`, the
//!   first process's life up to its program, by a few hundred system calls;
//! - the container library's, for the rest: hooks, seccomp listeners, schedulers and whatever else a plugin
//!   may ask for. It takes some 2,000, and a wait for every cgroup.

mod access;
mod cgroup_mount;
mod cwd;
mod device;
mod device_program;
mod devices;
mod first;
mod hidden;
mod launch;
mod library;
mod limits;
mod mounts;
mod ordinary;
mod place;
mod propagation;
pub(crate) mod spec;
mod stage;
mod trace;
mod unit;

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use coracle_proto::shim::error::Kind;
use coracle_proto::shim::{ImageVolume, Overlay};
use coracle_systemd::Scope;
use libcontainer::error::LibcontainerError;
use libcontainer::oci_spec::OciSpecError;
use libcontainer::oci_spec::runtime::Spec;

use crate::cgroup::{self, Hierarchy};
use crate::fault;
use crate::host_mounts::HostMounts;
use crate::kernel;
use crate::overlay::{self, OverlayError};
use crate::process::PidNamespace;
use crate::report::{Speaker, Word};
use crate::seccomp;
use crate::selinux;
use crate::setup;
use crate::stdio::Ends;
use crate::user_namespace::UserNamespace;

use limits::LimitError;
use unit::Unit;

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
    /// The pod's directory: what is mounted below it is mounted in the shim's namespace alone.
    pub(crate) pod_dir: &'a Path,
    pub(crate) host_mounts: &'a HostMounts,
    pub(crate) hierarchies: &'a [Hierarchy],
    /// The pod's user namespace, if it is not the node's.
    pub(crate) user: Option<&'a UserNamespace>,
    pub(crate) images: &'a [ImageVolume],
    /// The profile of the spec, compiled.
    pub(crate) seccomp_program: &'a [u8],
    /// The shim's pid.
    pub(crate) shim: i32,
    /// The pid namespaces of the pod that the spec may name, by its process 1 or by a container's first process.
    pub(crate) pid_namespaces: &'a [&'a PidNamespace],
    /// One byte of it starts the container.
    pub(crate) gate: &'a OwnedFd,
}

/// Who makes the container.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Ours,
    Library,
}

#[derive(Debug, thiserror::Error)]
enum CreateError {
    #[error("read {}", .path.display())]
    Read { path: PathBuf, source: OciSpecError },
    #[error("the spec has no {0}")]
    Missing(&'static str),
    #[error("the cgroup {0:?} is not below the root of its hierarchy")]
    Cgroup(String),
    #[error("join the namespace {}: the pod has no process {pid} that runs", .path.display())]
    NotOfThePod { path: PathBuf, pid: i32 },
    #[error("mount the root file system")]
    Rootfs(#[source] OverlayError),
    #[error("make the working directory {}", .path.display())]
    Cwd { path: PathBuf, source: io::Error },
    #[error("open the pod's namespaces")]
    Namespaces(#[source] io::Error),
    #[error("prepare the volumes")]
    Stage(#[source] stage::StageError),
    #[error("set kernel parameters")]
    Parameters(#[source] setup::SetupError),
    #[error("adjust the spec")]
    Build(#[source] OciSpecError),
    #[error("write {}", .path.display())]
    Write { path: PathBuf, source: OciSpecError },
    #[error("keep the seccomp profile")]
    Filter(#[source] io::Error),
    #[error("duplicate a descriptor")]
    Duplicate(#[source] io::Error),
    #[error("close the shim's descriptors")]
    Close(#[source] io::Error),
    #[error("create the container")]
    Library(#[source] Box<LibcontainerError>),
    #[error("make the container's cgroup")]
    Unit(#[from] coracle_systemd::Error),
    #[error(transparent)]
    Limit(#[from] LimitError),
    #[error(transparent)]
    Launch(#[from] launch::LaunchError),
}

/// The child's whole life.
pub(crate) fn run(plan: &Plan<'_>, speaker: Speaker) -> ! {
    // Whoever cleans up after a shim that died must find all that there will be.
    kernel::die_with(plan.shim);
    kernel::reset_signals();
    let _ = kernel::set_name(c"coracle-create");
    let ends = [&plan.ends.stdin, &plan.ends.stdout, &plan.ends.stderr];
    let mut keep: Vec<RawFd> = ends.into_iter().flatten().map(AsRawFd::as_raw_fd).collect();
    keep.extend([speaker.fd(), plan.gate.as_raw_fd(), plan.host_mounts.as_raw_fd()]);
    keep.extend(plan.user.map(|user| user.fd.as_raw_fd()));
    keep.extend(plan.pid_namespaces.iter().map(|namespace| namespace.fd.as_raw_fd()));
    let closed = kernel::close_all_but(&keep).map_err(CreateError::Close);
    if let Err(error) = closed.and_then(|()| create(plan, speaker)) {
        speaker.say(&Word::Failed(kind(&error), fault::chain(&error)));
    }
    kernel::leave(0)
}

fn kind(error: &CreateError) -> Kind {
    match error {
        CreateError::Read { .. } | CreateError::Missing(_) | CreateError::Cgroup(_) => Kind::Invalid,
        CreateError::Stage(stage::StageError::SubPath { .. }) => Kind::Invalid,
        CreateError::NotOfThePod { .. } => Kind::WrongState,
        CreateError::Library(error) => match **error {
            LibcontainerError::InvalidSpec(_) => Kind::Invalid,
            _ => Kind::Internal,
        },
        _ => Kind::Internal,
    }
}

fn create(plan: &Plan<'_>, speaker: Speaker) -> Result<(), CreateError> {
    let path = plan.bundle.join("config.json");
    let mut spec = spec::load(&path).map_err(|source| CreateError::Read { path, source })?;
    let (cgroup, scope) = take_cgroup(&mut spec)?;
    speaker.say(&Word::Cgroup(cgroup.clone()));
    if !spec::has_own_pids(&spec) {
        speaker.say(&Word::SharesPids);
    }

    spec::hold_namespaces(&mut spec, plan.shim, plan.pid_namespaces)?;
    spec::adjust(&mut spec, &spec::Host::look());
    set_parameters(&mut spec, plan.user)?;
    let way = if ordinary::is_ordinary(&spec) { Way::Ours } else { Way::Library };
    let root = mount_all(plan, &mut spec, way)?;
    coracle_fault::point("shim.creator-mounted");
    if way == Way::Library {
        selinux::prepare_for_library(&mut spec);
    }
    cgroup_mount::replace(&mut spec, plan.hierarchies, &cgroup).map_err(CreateError::Build)?;
    give_to_user(&spec, plan.ends);
    let path = plan.dir.join("config.json");
    spec.save(&path).map_err(|source| CreateError::Write { path, source })?;
    if !plan.seccomp_program.is_empty() {
        fs::write(plan.dir.join(seccomp::FILE), plan.seccomp_program).map_err(CreateError::Filter)?;
    }
    let mut unit = scope.map(|scope| Unit::start(&scope, plan.hierarchies, &spec)).transpose()?;
    coracle_fault::point("shim.creator-scope");
    match way {
        Way::Ours => {
            let root = match plan.rootfs.filter(|_| plan.user.is_none()) {
                Some(overlay) => first::Root::Layers(overlay),
                None => first::Root::Directory(&root),
            };
            Ok(launch::launch(plan, &spec, (root, &cgroup), unit.as_mut(), speaker)?)
        }
        Way::Library => {
            trace::install(speaker);
            limits::filter_for_library(plan.hierarchies, &cgroup, &spec)?;
            let pid = library::build(plan, speaker)?;
            unit.as_mut().map_or(Ok(()), Unit::tell)?;
            [Word::Pid(pid), Word::ByLibrary].iter().for_each(|word| speaker.say(word));
            Ok(())
        }
    }
}

/// The container's cgroup, and the scope that systemd makes of it where the spec asks for that. From here on the
/// spec names its path, wherever it comes from.
fn take_cgroup(spec: &mut Spec) -> Result<(String, Option<Scope>), CreateError> {
    let linux = spec.linux_mut().as_mut();
    let linux = linux.ok_or(CreateError::Missing("cgroupsPath"))?;
    let named = linux.cgroups_path().clone().ok_or(CreateError::Missing("cgroupsPath"))?;
    let named = named.to_string_lossy().into_owned();
    let scope = Scope::parse(&named);
    let cgroup = scope.as_ref().map_or(named, Scope::path);
    if !cgroup::is_below_root(&cgroup) {
        return Err(CreateError::Cgroup(cgroup));
    }
    linux.set_cgroups_path(Some(cgroup.clone().into()));
    Ok((cgroup, scope))
}

/// What is mounted ahead: volumes that need a stage; and for a pod with a user namespace, whose root may not, all
/// that is not the container's own. Returns where the root file system is.
fn mount_all(plan: &Plan<'_>, spec: &mut Spec, way: Way) -> Result<PathBuf, CreateError> {
    let label = selinux::mount_label(spec).map(str::to_owned);
    let wanted = stage::Wanted {
        label: label.as_deref(),
        dir: plan.dir,
        pod_dir: plan.pod_dir,
        host_mounts: plan.host_mounts,
        user: plan.user,
        images: plan.images,
    };
    // The library has it in the shim's mount namespace: it goes when that goes.
    if let (Some(overlay), None, Way::Library) = (plan.rootfs, plan.user, way) {
        overlay::mount_at_target(overlay, selinux::mount_label(spec)).map_err(CreateError::Rootfs)?;
    }
    propagation::prepare(spec);
    let stage = stage::Stage::enter(spec, &wanted).map_err(CreateError::Stage)?;
    let mut root = plan.rootfs.map(|overlay| PathBuf::from(&overlay.target));
    let mut shown = root.clone();
    if let (Some(stage), Some(user), Some(overlay)) = (&stage, plan.user, plan.rootfs) {
        let (now, then) = stage.root(overlay, user).map_err(CreateError::Stage)?;
        (root, shown) = (Some(now), Some(then));
    }
    if let (Some(shown), Some(root)) = (&shown, spec.root_mut()) {
        root.set_path(shown.clone());
    }
    let in_spec = spec.root().as_ref().ok_or(CreateError::Missing("root"))?.path().clone();
    let root = root.unwrap_or_else(|| plan.bundle.join(&in_spec));
    if way == Way::Library {
        let owner = plan.user.map_or((0, 0), |user| user.mapping.root());
        cwd::make(spec, &root, owner).map_err(|(path, source)| CreateError::Cwd { path, source })?;
    }
    let shown = shown.unwrap_or(root);
    let Some(stage) = stage else { return Ok(shown) };
    stage.volumes(spec, &wanted).map_err(CreateError::Stage)?;
    if let Some(user) = plan.user {
        stage.devices(spec, &user.mapping).map_err(CreateError::Stage)?;
        if way == Way::Library {
            spec::join_user_namespace(spec, user).map_err(CreateError::Namespaces)?;
        }
    }
    stage.show().map_err(CreateError::Stage)?;
    Ok(shown)
}

/// Kernel parameters of the pod's namespaces, in which this process is. The library takes a container that joins
/// them for one in the host's, and refuses; whoever wrote the spec has seen to it that they are the pod's own.
fn set_parameters(spec: &mut Spec, user: Option<&UserNamespace>) -> Result<(), CreateError> {
    let Some(linux) = spec.linux_mut() else { return Ok(()) };
    let parameters = linux.sysctl().clone().unwrap_or_default();
    if !parameters.is_empty() {
        setup::set_parameters(&parameters.iter().collect(), user).map_err(CreateError::Parameters)?;
        linux.set_sysctl(None);
    }
    Ok(())
}

/// Gives the pipes to the container's user, who could not open /dev/stdout otherwise. Never the
/// host's /dev/null, which is what no input is.
fn give_to_user(spec: &Spec, ends: &Ends) {
    let Some(process) = spec.process() else { return };
    let owner = spec::host_uid(spec, process.user().uid());
    for end in [&ends.stdin, &ends.stdout, &ends.stderr].into_iter().flatten() {
        let is_pipe =
            nix::sys::stat::fstat(end).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFIFO);
        if is_pipe {
            // A refusal costs only the opening by name.
            let _ = nix::unistd::fchown(end, Some(owner.into()), None);
        }
    }
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
