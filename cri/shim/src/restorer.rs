//! The restorer: a fork of the shim that executes CRIU to restore a container from a checkpoint.
//!
//! The container is created like any other. Its first process waits in its cgroup, with its root, mounts and streams.
//! CRIU takes the root, the external mounts (the pod's files, volumes, the cgroup) and the pipes from that process. All
//! other state is in CRIU's images. The restored first process is a child of the shim, like the process that it
//! replaces.

use std::ffi::CString;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use coracle_proto::shim::RestoreContainer;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::stat::fstat;

use crate::call_error;
use crate::cgroup::{self, CgroupError};
use crate::kernel::{self, Depth};
use crate::program;

/// File in the work directory to which CRIU writes the pid of the restored first process.
pub(crate) const PID_FILE: &str = "restore.pid";

/// Search path of CRIU, which itself runs tar and iptables.
const PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Arguments of a restorer, collected before the fork.
#[derive(Debug)]
pub(crate) struct RestoreRequest<'a> {
    pub(crate) restore: &'a RestoreContainer,
    /// The /proc directory of the container's waiting first process.
    pub(crate) waiting: &'a OwnedFd,
    pub(crate) cgroups: Vec<PathBuf>,
    /// A directory of the container, used as a mount point.
    pub(crate) stage: &'a Path,
    /// The shim's pid.
    pub(crate) shim: i32,
}

/// The step that failed.
#[derive(Debug, thiserror::Error)]
enum RestoreError {
    #[error("cannot write CRIU's output to {}", .path.display())]
    Log { path: PathBuf, source: io::Error },
    #[error("cannot close the shim's descriptors")]
    Close(#[source] io::Error),
    #[error("cannot open the container's streams")]
    Stream(#[source] io::Error),
    #[error("cannot join the container's cgroup")]
    Cgroup(#[source] CgroupError),
    #[error("cannot join the container's {0} namespace")]
    Namespace(&'static str, #[source] io::Error),
    #[error("cannot copy the mount at {}", .path.display())]
    Copy { path: PathBuf, source: io::Error },
    #[error("cannot make the restorer's mount namespace")]
    Separate(#[source] nix::Error),
    #[error("cannot mount at {}", .path.display())]
    Attach { path: PathBuf, source: io::Error },
    #[error("{0}")]
    Program(String),
}

/// A detached mount.
struct Tree {
    mount: OwnedFd,
    is_dir: bool,
}

impl RestoreRequest<'_> {
    fn of_waiting(&self, path: &str) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}/{path}", self.waiting.as_raw_fd()))
    }
}

/// Runs the restorer: executes CRIU, or writes the error to standard error and exits.
pub(crate) fn run(request: &RestoreRequest<'_>) -> ! {
    kernel::exit_with_parent(request.shim);
    kernel::reset_signals();
    let _ = kernel::set_name(c"coracle-restore");
    let closed = kernel::close_all_but(&[request.waiting.as_raw_fd()]).map_err(RestoreError::Close);
    let Err(error) = closed.and_then(|()| become_criu(request));
    let _ = writeln!(io::stderr(), "{}", call_error::chain(&error));
    kernel::leave(1)
}

fn become_criu(request: &RestoreRequest<'_>) -> Result<std::convert::Infallible, RestoreError> {
    redirect_output(&Path::new(&request.restore.work).join("restore.err"))?;
    let streams = streams(request).map_err(RestoreError::Stream)?;
    // This process enters the cgroup, because the cgroup is the root of the container's cgroup namespace.
    cgroup::enter(&request.cgroups).map_err(RestoreError::Cgroup)?;
    let (root, external) = copy_mounts(request)?;
    let stage = Stage::make(request.stage)?;
    let root = stage.attach("root", &root)?;
    let mut sources = Vec::new();
    for (number, (place, tree)) in external.iter().enumerate() {
        sources.push((place.clone(), stage.attach(&number.to_string(), tree)?));
    }
    let arguments = arguments(request.restore, &root, &sources, &streams);
    let environment = CString::new(PATH).into_iter().collect::<Vec<_>>();
    let (_, why) = program::become_program(&arguments, &environment);
    Err(RestoreError::Program(why))
}

/// Redirects standard output and error to a file, for the analysis of failures, and standard input to `/dev/null`.
fn redirect_output(path: &Path) -> Result<(), RestoreError> {
    let failed = |source| RestoreError::Log { path: path.to_owned(), source };
    let file = File::options().create(true).append(true).mode(0o600).open(path).map_err(failed)?;
    let null = File::open("/dev/null").map_err(failed)?;
    kernel::dup_to(null.as_raw_fd(), 0).map_err(failed)?;
    [1, 2].into_iter().try_for_each(|standard| kernel::dup_to(file.as_raw_fd(), standard)).map_err(failed)
}

/// Opens the container's ends of its streams. CRIU connects them to the processes in place of the pipes in
/// the checkpoint.
fn streams<'a>(request: &'a RestoreRequest<'_>) -> io::Result<Vec<(&'a str, OwnedFd)>> {
    let mut streams = Vec::new();
    for stream in &request.restore.streams {
        // The process may end at any time. The open /proc directory never shows another process.
        let path = request.of_waiting(&format!("fd/{}", stream.standard));
        let end = File::options().read(stream.standard == 0).write(stream.standard != 0).open(path)?;
        fcntl(&end, FcntlArg::F_SETFD(FdFlag::empty()))?;
        streams.push((stream.pipe.as_str(), OwnedFd::from(end)));
    }
    Ok(streams)
}

/// Copies the root and the external mounts, which is possible only in the container's mount namespace. The restorer
/// stays in the container's cgroup namespace.
fn copy_mounts(request: &RestoreRequest<'_>) -> Result<(Tree, Vec<(String, Tree)>), RestoreError> {
    let open = |name: &'static str, path: PathBuf| {
        File::open(path).map_err(|source| RestoreError::Namespace(name, source))
    };
    let outside = open("mnt", "/proc/self/ns/mnt".into())?;
    let mounts = open("mnt", request.of_waiting("ns/mnt"))?;
    let cgroups = open("cgroup", request.of_waiting("ns/cgroup"))?;
    let join = |name: &'static str, namespace: &File, flag| {
        setns(namespace.as_fd(), flag).map_err(|errno| RestoreError::Namespace(name, errno.into()))
    };
    join("cgroup", &cgroups, CloneFlags::CLONE_NEWCGROUP)?;
    join("mnt", &mounts, CloneFlags::CLONE_NEWNS)?;
    let root = copy(Path::new("/"))?;
    let mut external = Vec::new();
    for place in &request.restore.external {
        external.push((place.clone(), copy(Path::new(place))?));
    }
    join("mnt", &outside, CloneFlags::CLONE_NEWNS)?;
    Ok((root, external))
}

/// Copies the single mount at a path of the container's mount namespace.
fn copy(place: &Path) -> Result<Tree, RestoreError> {
    let copied = || {
        let root = File::open("/")?;
        let found = kernel::open_plain_in_root(&root, place, libc::O_PATH)?;
        let is_dir = fstat(&found)?.st_mode & libc::S_IFMT == libc::S_IFDIR;
        Ok(Tree { mount: kernel::copy_mount_at(&found, Depth::One)?, is_dir })
    };
    copied().map_err(|source| RestoreError::Copy { path: place.to_owned(), source })
}

/// A tmpfs to which the copies are attached, in a mount namespace of the restorer.
struct Stage<'a>(&'a Path);

impl Stage<'_> {
    fn make(place: &Path) -> Result<Stage<'_>, RestoreError> {
        unshare(CloneFlags::CLONE_NEWNS).map_err(RestoreError::Separate)?;
        let none = None::<&str>;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount(none, "/", none, private, none).map_err(RestoreError::Separate)?;
        mount(Some("tmpfs"), place, Some("tmpfs"), MsFlags::empty(), none)
            .map_err(|errno| RestoreError::Attach { path: place.to_owned(), source: errno.into() })?;
        Ok(Stage(place))
    }

    fn attach(&self, name: &str, tree: &Tree) -> Result<PathBuf, RestoreError> {
        let path = self.0.join(name);
        let made = if tree.is_dir { fs::create_dir(&path) } else { File::create(&path).map(drop) };
        let attached = made.and_then(|()| kernel::attach_mount(&tree.mount, &path));
        // Later mounts below the copy must not propagate to the container's mount.
        let none = None::<&str>;
        let alone = attached.and_then(|()| Ok(mount(none, &path, none, MsFlags::MS_PRIVATE, none)?));
        alone.map_err(|source| RestoreError::Attach { path: path.clone(), source })?;
        Ok(path)
    }
}

/// CRIU's command line. No I/O.
fn arguments(
    restore: &RestoreContainer,
    root: &Path,
    sources: &[(String, PathBuf)],
    streams: &[(&str, OwnedFd)],
) -> Vec<String> {
    let text = |path: &Path| path.to_string_lossy().into_owned();
    let mut arguments = vec![restore.program.clone(), "restore".to_owned()];
    let mut with = |name: &str, value: String| arguments.extend([name.to_owned(), value]);
    with("--images-dir", restore.images.clone());
    with("--work-dir", restore.work.clone());
    with("--log-file", "restore.log".to_owned());
    with("--pidfile", PID_FILE.to_owned());
    with("--root", text(root));
    for (place, source) in sources {
        with("--external", format!("mnt[{place}]:{}", source.display()));
    }
    for (pipe, end) in streams {
        with("--inherit-fd", format!("fd[{}]:{pipe}", end.as_raw_fd()));
    }
    // The restored process becomes a child of CRIU's parent, the shim, and stays in CRIU's cgroup.
    let rest = ["--restore-detached", "--restore-sibling", "--manage-cgroups=ignore"];
    arguments.extend(rest.map(str::to_owned));
    // The pod's address has changed, so TCP connections are restored as closed.
    arguments.extend(["--tcp-close", "--ext-unix-sk", "--file-locks"].map(str::to_owned));
    arguments
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_arguments_name_images_mounts_and_streams() {
        let restore = RestoreContainer {
            program: "/sbin/criu".into(),
            images: "/i".into(),
            work: "/w".into(),
            ..Default::default()
        };
        let sources = [("/etc/hosts".to_owned(), PathBuf::from("/s/0"))];
        let null = File::open("/dev/null").unwrap();
        let number = null.as_raw_fd();
        let line =
            arguments(&restore, Path::new("/s/root"), &sources, &[("pipe:[7]", null.into())]).join(" ");
        let begin = "/sbin/criu restore --images-dir /i --work-dir /w ";
        assert!(line.starts_with(begin), "{line}");
        for part in ["--root /s/root", "--external mnt[/etc/hosts]:/s/0", &format!("fd[{number}]:pipe:[7]")] {
            assert!(line.contains(part), "{part} is missing: {line}");
        }
    }
}
