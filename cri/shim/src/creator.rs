//! The creator: a fork of the shim that makes one container and exits.
//!
//! It changes its own cgroups, namespaces, limits and dumpability, so it is a separate short-lived process. A
//! container's first process is made in one of two ways:
//!
//! - directly, for every spec that [`direct_support`] accepts: `launch` is the creator's part up to the fork,
//!   `first_process` runs from the fork to the program. This takes a few hundred system calls;
//! - by the container library, for all other specs: hooks, seccomp listeners, schedulers and other fields
//!   that a plugin may set. This takes about 2,000 system calls and waits for every cgroup.

mod access;
mod cgroup_mount;
mod cwd;
mod device;
mod device_program;
mod devices;
mod direct_support;
mod first_process;
mod launch;
mod library;
mod limits;
mod masked_paths;
mod mounts;
mod place;
mod propagation;
pub(crate) mod spec;
mod stage;
mod systemd_scope;
mod trace;

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

use crate::call_error;
use crate::cgroup::{self, Hierarchy};
use crate::host_mounts::HostMounts;
use crate::kernel;
use crate::overlay::{self, OverlayError};
use crate::process::PidNamespace;
use crate::report::{Message, Reporter};
use crate::seccomp;
use crate::selinux;
use crate::setup;
use crate::stdio::Ends;
use crate::user_namespace::UserNamespace;

use first_process::Root;
use launch::Launch;
use limits::LimitError;
use stage::{Stage, StageRequest, StagedRoot};
use systemd_scope::Unit;

/// Arguments of a creator, collected before the fork.
#[derive(Debug)]
pub(crate) struct CreateRequest<'a> {
    pub(crate) id: &'a str,
    /// The bundle directory with the runtime's config.json. The creator only reads this file.
    pub(crate) bundle: &'a Path,
    /// The container's own directory. The adjusted config.json is written there.
    pub(crate) dir: &'a Path,
    /// The container library's state directory.
    pub(crate) state: &'a Path,
    pub(crate) rootfs: Option<&'a Overlay>,
    pub(crate) console: Option<&'a Path>,
    pub(crate) ends: &'a Ends,
    /// The pod's directory. Mounts below it exist in the shim's mount namespace only.
    pub(crate) pod_dir: &'a Path,
    pub(crate) host_mounts: &'a HostMounts,
    pub(crate) hierarchies: &'a [Hierarchy],
    /// The pod's user namespace, if it is not the node's.
    pub(crate) user: Option<&'a UserNamespace>,
    pub(crate) images: &'a [ImageVolume],
    /// The spec's seccomp profile, compiled to a BPF program; empty if there is none.
    pub(crate) seccomp_program: &'a [u8],
    /// The shim's pid.
    pub(crate) shim: i32,
    /// The pid namespaces that the spec may join: the namespace of the pod's process 1, and the namespaces of the
    /// first processes of its containers.
    pub(crate) pid_namespaces: &'a [&'a PidNamespace],
    /// The start pipe: one byte starts the container.
    pub(crate) start_pipe: &'a OwnedFd,
}

/// The way in which the container is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Method {
    Direct,
    Library,
}

#[derive(Debug, thiserror::Error)]
enum CreateError {
    #[error("cannot read {}", .path.display())]
    Read { path: PathBuf, source: OciSpecError },
    #[error("the spec has no {0}")]
    Missing(&'static str),
    #[error("the cgroup {0:?} is not below the root of its hierarchy")]
    Cgroup(String),
    #[error("cannot join the namespace {}: the pod has no process {pid}", .path.display())]
    NotOfThePod { path: PathBuf, pid: i32 },
    #[error("cannot mount the root file system")]
    Rootfs(#[source] OverlayError),
    #[error("cannot make the working directory {}", .path.display())]
    Cwd { path: PathBuf, source: io::Error },
    #[error("cannot open the pod's namespaces")]
    Namespaces(#[source] io::Error),
    #[error("cannot prepare the volumes")]
    Stage(#[source] stage::StageError),
    #[error("cannot set kernel parameters")]
    Parameters(#[source] setup::SetupError),
    #[error("cannot change the spec of the container")]
    Build(#[source] OciSpecError),
    #[error("cannot write {}", .path.display())]
    Write { path: PathBuf, source: OciSpecError },
    #[error("cannot save the seccomp profile")]
    Filter(#[source] io::Error),
    #[error("cannot duplicate a descriptor")]
    Duplicate(#[source] io::Error),
    #[error("cannot close the shim's descriptors")]
    Close(#[source] io::Error),
    #[error(
        "cannot set the user: on 32-bit ARM, hooks and seccomp notifications need ids below 65536 and one supplementary group at most"
    )]
    User,
    #[error("cannot create the container")]
    Library(#[source] Box<LibcontainerError>),
    #[error("cannot make the container's cgroup")]
    Unit(#[from] coracle_systemd::Error),
    #[error(transparent)]
    Limit(#[from] LimitError),
    #[error(transparent)]
    Launch(#[from] launch::LaunchError),
}

/// Runs the creator process to its end.
pub(crate) fn run(request: &CreateRequest<'_>, reporter: Reporter) -> ! {
    // Cleanup after the shim's death must find all processes, so the creator must not outlive the shim.
    kernel::exit_with_parent(request.shim);
    kernel::reset_signals();
    let _ = kernel::set_name(c"coracle-create");
    // Each container gets its own keyring, so that the containers of a pod do not share keys. If the call fails, the
    // container uses the pod's keyring.
    let _ = kernel::new_session_keyring();
    let ends = [&request.ends.stdin, &request.ends.stdout, &request.ends.stderr];
    let mut keep: Vec<RawFd> = ends.into_iter().flatten().map(AsRawFd::as_raw_fd).collect();
    keep.extend([reporter.fd(), request.start_pipe.as_raw_fd(), request.host_mounts.as_raw_fd()]);
    keep.extend(request.user.map(|user| user.fd.as_raw_fd()));
    keep.extend(request.pid_namespaces.iter().map(|namespace| namespace.fd.as_raw_fd()));
    let closed = kernel::close_all_but(&keep).map_err(CreateError::Close);
    if let Err(error) = closed.and_then(|()| create(request, reporter)) {
        reporter.send(&Message::Failed(kind(&error), call_error::chain(&error)));
    }
    kernel::leave(0)
}

fn kind(error: &CreateError) -> Kind {
    match error {
        CreateError::Read { .. } | CreateError::Missing(_) | CreateError::Cgroup(_) | CreateError::User => {
            Kind::Invalid
        }
        CreateError::Stage(stage::StageError::SubPath { .. }) => Kind::Invalid,
        CreateError::NotOfThePod { .. } => Kind::WrongState,
        CreateError::Library(error) => match **error {
            LibcontainerError::InvalidSpec(_) => Kind::Invalid,
            _ => Kind::Internal,
        },
        _ => Kind::Internal,
    }
}

fn create(request: &CreateRequest<'_>, reporter: Reporter) -> Result<(), CreateError> {
    let path = request.bundle.join("config.json");
    let mut spec = spec::load(&path).map_err(|source| CreateError::Read { path, source })?;
    let (cgroup, scope) = take_cgroup(&mut spec)?;
    reporter.send(&Message::Cgroup(cgroup.clone()));
    if !spec::has_own_pids(&spec) {
        reporter.send(&Message::SharesPids);
    }

    spec::hold_namespaces(&mut spec, request.shim, request.pid_namespaces)?;
    spec::adjust(&mut spec, &spec::Host::detect());
    set_parameters(&mut spec, request.user)?;
    let method = if direct_support::is_supported(&spec) { Method::Direct } else { Method::Library };
    let root = mount_all(request, &mut spec, method)?;
    coracle_fault::point("shim.creator-mounted");
    if method == Method::Library {
        selinux::prepare_for_library(&mut spec);
    }
    cgroup_mount::replace(&mut spec, request.hierarchies, &cgroup).map_err(CreateError::Build)?;
    chown_pipes(&spec, request.ends);
    let path = request.dir.join("config.json");
    spec.save(&path).map_err(|source| CreateError::Write { path, source })?;
    if !request.seccomp_program.is_empty() {
        fs::write(request.dir.join(seccomp::FILE), request.seccomp_program).map_err(CreateError::Filter)?;
    }
    let mut unit = scope.map(|scope| Unit::start(&scope, request.hierarchies, &spec)).transpose()?;
    coracle_fault::point("shim.creator-scope");
    match method {
        Method::Direct => {
            let root = match request.rootfs.filter(|_| request.user.is_none()) {
                Some(overlay) => Root::Layers(overlay),
                None => Root::Directory(&root),
            };
            let launch = Launch { request, spec: &spec, root, cgroup: &cgroup };
            Ok(launch::launch(&launch, unit.as_mut(), reporter)?)
        }
        Method::Library => {
            if !spec.process().as_ref().is_none_or(|process| library::can_set(process.user())) {
                return Err(CreateError::User);
            }
            trace::install(reporter);
            limits::restrict_devices_for_library(request.hierarchies, &cgroup, &spec)?;
            let pid = library::build(request, reporter)?;
            unit.as_mut().map_or(Ok(()), Unit::set_limits)?;
            [Message::Pid(pid), Message::ByLibrary].iter().for_each(|word| reporter.send(word));
            Ok(())
        }
    }
}

/// Returns the container's cgroup path, and the systemd scope if the spec requests one. Afterwards the spec has the
/// plain path in both cases.
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

/// Prepares the container's mounts: root file system, working directory and staged volumes. Returns the final
/// path of the root file system.
fn mount_all(request: &CreateRequest<'_>, spec: &mut Spec, method: Method) -> Result<PathBuf, CreateError> {
    let label = selinux::mount_label(spec).map(str::to_owned);
    let staging = StageRequest {
        label: label.as_deref(),
        dir: request.dir,
        pod_dir: request.pod_dir,
        host_mounts: request.host_mounts,
        user: request.user,
        images: request.images,
    };
    // With a user namespace the root is mounted on the stage. In a direct creation the first process mounts the root.
    // Otherwise the root is mounted here, in the shim's mount namespace, and is unmounted when the shim ends.
    if let (Some(overlay), None, Method::Library) = (request.rootfs, request.user, method) {
        overlay::mount_at_target(overlay, label.as_deref()).map_err(CreateError::Rootfs)?;
    }
    propagation::prepare(spec);
    let stage = Stage::enter(spec, &staging).map_err(CreateError::Stage)?;
    let root = locate_root(request, spec, stage.as_ref())?;
    if method == Method::Library {
        let owner = request.user.map(|user| user.mapping.root()).unwrap_or_default();
        cwd::make(spec, &root.current, owner).map_err(|(path, source)| CreateError::Cwd { path, source })?;
    }
    if let Some(stage) = stage {
        fill_stage(stage, spec, &staging, method)?;
    }
    Ok(root.final_path)
}

/// Finds the root file system and enters its final path in the spec. For a pod with a user namespace the root file
/// system is mounted on the stage.
fn locate_root(
    request: &CreateRequest<'_>,
    spec: &mut Spec,
    stage: Option<&Stage>,
) -> Result<StagedRoot, CreateError> {
    let in_spec = spec.root_mut().as_mut().ok_or(CreateError::Missing("root"))?;
    let Some(overlay) = request.rootfs else {
        return Ok(StagedRoot::in_place(request.bundle.join(in_spec.path())));
    };
    let root = match (stage, request.user) {
        (Some(stage), Some(user)) => stage.mount_root(overlay, user).map_err(CreateError::Stage)?,
        _ => StagedRoot::in_place(PathBuf::from(&overlay.target)),
    };
    in_spec.set_path(root.final_path.clone());
    Ok(root)
}

/// Puts volumes on the stage and, for a pod with a user namespace, device nodes. Then moves the stage to its final
/// path.
fn fill_stage(
    stage: Stage,
    spec: &mut Spec,
    staging: &StageRequest<'_>,
    method: Method,
) -> Result<(), CreateError> {
    stage.stage_volumes(spec, staging).map_err(CreateError::Stage)?;
    if let Some(user) = staging.user {
        stage.make_devices(spec, &user.mapping).map_err(CreateError::Stage)?;
        if method == Method::Library {
            spec::join_user_namespace(spec, user).map_err(CreateError::Namespaces)?;
        }
    }
    stage.move_to_final_path().map_err(CreateError::Stage)
}

/// Sets the kernel parameters of the pod's namespaces, which this process is in. The library refuses kernel parameters
/// for a container that joins namespaces, because the namespaces could be the host's. The runtime that wrote the spec
/// has checked that the namespaces are the pod's own.
fn set_parameters(spec: &mut Spec, user: Option<&UserNamespace>) -> Result<(), CreateError> {
    let Some(linux) = spec.linux_mut() else { return Ok(()) };
    let parameters = linux.sysctl().clone().unwrap_or_default();
    if !parameters.is_empty() {
        setup::set_parameters(&parameters.iter().collect(), user).map_err(CreateError::Parameters)?;
        linux.set_sysctl(None);
    }
    Ok(())
}

/// Makes the container's user the owner of the pipes. Otherwise that user cannot open /dev/stdout. Without input stdin
/// is the host's /dev/null, whose owner is never changed.
fn chown_pipes(spec: &Spec, ends: &Ends) {
    let Some(process) = spec.process() else { return };
    let owner = spec::host_uid(spec, process.user().uid());
    for end in [&ends.stdin, &ends.stdout, &ends.stderr].into_iter().flatten() {
        let is_pipe =
            nix::sys::stat::fstat(end).is_ok_and(|stat| stat.st_mode & libc::S_IFMT == libc::S_IFIFO);
        if is_pipe {
            // A failure is ignored. The program then cannot open the stream by its name, but can use its descriptor.
            let _ = nix::unistd::fchown(end, Some(owner.into()), None);
        }
    }
}

/// Removes the files that the library and the creator left of a container.
pub(crate) fn remove_files(dir: &Path, state: &Path) -> io::Result<()> {
    for path in [dir, state] {
        match fs::remove_dir_all(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
