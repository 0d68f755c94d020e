//! Runs CRIU in the namespaces of the container's pod. Shared resources of the pod (above all its network) then count as
//! external and are not dumped.
#![allow(unsafe_code, reason = "the child enters namespaces between its fork and its exec")]

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use coracle_tree::mountinfo::unescaped;
use nix::sched::{CloneFlags, setns};
use oci_spec::runtime::Spec;

use super::subject::{Connections, Subject};
use crate::error::checkpoint::CriuError;
use crate::pidfd::{self, Process};
use crate::shim_client::Shim;

/// Maximum lines of CRIU's errors in an error message.
const LINES: usize = 3;
/// Bytes of CRIU's log, from its end, that are searched for errors.
pub(super) const LOG_MAX: u64 = 1 << 20;
const LOG: &str = "dump.log";
/// File with CRIU's standard error.
const ERROR_OUTPUT: &str = "dump.err";

/// Dumps the processes of a frozen container to a directory. Log and statistics go to the build directory. Returns the external
/// mount points in the container.
pub(super) fn dump(
    subject: &Subject,
    build_dir: &Path,
    images: &Path,
    connections: Connections,
) -> Result<Vec<PathBuf>, CriuError> {
    // CRIU takes a pid. A frozen process does not end, so the pid is not reused.
    let process = Process::in_group(subject.pid, &subject.record.cgroup).map_err(CriuError::Mounts)?;
    let mountinfo = process.read("mountinfo").map_err(CriuError::Mounts)?;
    let spec = Spec::load(subject.bundle.join("config.json"));
    let spec = spec.map_err(|error| CriuError::Mounts(io::Error::other(error)))?;
    let external = external(&mountinfo, &own_mount_points(&spec));
    if let Some(place) = external.iter().find(|place| is_misread(place)) {
        return Err(CriuError::MountPoint(place.clone()));
    }
    let mut command = Command::new("criu");
    command.arg("dump").arg("--tree").arg(subject.pid.to_string());
    command.arg("--images-dir").arg(images).arg("--work-dir").arg(build_dir).args(["--log-file", LOG]);
    command.args(["--leave-running", "--manage-cgroups=ignore"]);
    // External connections and file locks are dumped instead of refused.
    command.args(["--ext-unix-sk", "--file-locks"]);
    command.arg(match connections {
        Connections::Kept => "--tcp-established",
        Connections::Ended => "--tcp-close",
    });
    // CRIU itself stops each process: it thaws the cgroup to reach the processes, and freezes the cgroup again at its
    // end.
    command.arg("--freeze-cgroup").arg(subject.freezer.dir());
    for place in &external {
        command.arg("--external").arg(format!("mnt[{0}]:{0}", place.display()));
    }
    enter(&mut command, &subject.shim).map_err(CriuError::Run)?;
    // CRIU's standard error is a file, not a pipe. If this process ended, a write to a pipe would kill CRIU and the
    // processes that it dumps.
    let beside = build_dir.join(ERROR_OUTPUT);
    let errors = File::create(&beside).map_err(CriuError::Run)?;
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
    coracle_open_files::restore_limit(&mut command);
    let status = command.status().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => CriuError::Absent,
        _ => CriuError::Run(error),
    })?;
    let errors = coracle_tree::read_end(&beside, LOG_MAX);
    fs::remove_file(&beside).map_err(CriuError::Run)?;
    if status.success() {
        return Ok(external);
    }
    let message = criu_errors(&build_dir.join(LOG), &errors);
    Err(CriuError::Failed(message.unwrap_or_else(|| status.to_string())))
}

/// The errors in CRIU's log, or else on its standard error.
pub(super) fn criu_errors(log: &Path, beside: &str) -> Option<String> {
    let log = coracle_tree::read_end(log, LOG_MAX);
    errors(&log).or_else(|| errors(beside))
}

/// Path of CRIU on this machine.
pub(crate) fn program() -> Result<PathBuf, CriuError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join("criu")).find(|file| file.is_file());
    found.ok_or(CriuError::Absent)
}

/// The pids of CRIU processes that work in a directory.
pub(super) fn running_criu(build_dir: &Path) -> Vec<i32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|process| process.file_name().to_str()?.parse().ok());
    pids.filter(|pid| has_working_directory(*pid, build_dir)).collect()
}

/// Recognises CRIU by its command line and its user. Processes of containers and of other users do not count: with the
/// command line of CRIU, they would keep a container frozen. A process that has ended has no command line.
fn has_working_directory(pid: i32, build_dir: &Path) -> bool {
    // The directory is one of the first arguments, so the part of the command line that is read contains it.
    let line = pidfd::command_line(pid);
    let mut words = line.split(|byte| *byte == 0);
    let wanted = build_dir.as_os_str().as_bytes();
    let is_named = words.next().is_some_and(|program| program.ends_with(b"criu"));
    is_named && words.any(|word| word == wanted) && pidfd::is_of_node(pid)
}

/// Waits until no CRIU works in a directory.
pub(super) async fn ended(build_dir: &Path) -> io::Result<()> {
    loop {
        let pids = running_criu(build_dir);
        if pids.is_empty() {
            return Ok(());
        }
        for pid in pids {
            match pidfd::open(pid) {
                // The pid may have been reused, so the command line is read again.
                Ok(process) if has_working_directory(pid, build_dir) => {
                    drop(pidfd::watch(process)?.readable().await?)
                }
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
    }
}

/// Runs the command in the namespaces of a pod's shim, with the mounts that the shim made.
fn enter(command: &mut Command, shim: &Shim) -> io::Result<()> {
    let mut namespaces = Vec::new();
    for (name, kind) in [
        ("net", CloneFlags::CLONE_NEWNET),
        ("ipc", CloneFlags::CLONE_NEWIPC),
        ("uts", CloneFlags::CLONE_NEWUTS),
        ("mnt", CloneFlags::CLONE_NEWNS),
    ] {
        namespaces.push((File::open(format!("/proc/{}/ns/{name}", shim.pid()))?, kind));
    }
    if !shim.is_alive() {
        return Err(io::Error::other("the pod's shim has ended"));
    }
    let enter = move || {
        for (namespace, kind) in &namespaces {
            setns(namespace.as_fd(), *kind)?;
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure only makes system calls on descriptors that it owns.
    unsafe { command.pre_exec(enter) };
    Ok(())
}

/// Mount points of the container's own file systems: all except bind mounts and its cgroup.
fn own_mount_points(spec: &Spec) -> BTreeSet<PathBuf> {
    let mounts = spec.mounts().iter().flatten();
    let own = mounts.filter(|mount| {
        let bound =
            mount.options().iter().flatten().any(|option| matches!(option.as_str(), "bind" | "rbind"));
        !bound && !matches!(mount.typ().as_deref(), Some("bind" | "cgroup" | "cgroup2"))
    });
    own.map(|mount| mount.destination().clone()).chain([PathBuf::from("/")]).collect()
}

/// Mount points of a mountinfo (proc_pid_mountinfo(5)) with file systems that are not the container's own. Pure.
fn external(mountinfo: &str, own: &BTreeSet<PathBuf>) -> Vec<PathBuf> {
    let mounts = || mountinfo.lines().filter_map(mount_of);
    let devices: BTreeSet<&str> =
        mounts().filter(|(_, place)| own.contains(place)).map(|(device, _)| device).collect();
    mounts().filter(|(device, _)| !devices.contains(device)).map(|(_, place)| place).collect()
}

/// Whether CRIU misreads the name of an external mount point in its option `mnt[MOUNT POINT]:VALUE`. A symlink of an
/// image can give a mount point any name. So a restore could mount a directory of the host (CVE-2026-119101).
pub(super) fn is_misread(mount_point: &Path) -> bool {
    mount_point.as_os_str().as_bytes().windows(2).any(|pair| pair == b"]:")
}

/// The device and the mount point in a line of a mountinfo.
fn mount_of(line: &str) -> Option<(&str, PathBuf)> {
    let mut fields = line.split(' ').skip(2);
    let device = fields.next()?;
    let mount_point = fields.nth(1)?;
    Some((device, unescaped(mount_point)))
}

/// The last errors of a log, without time and source location.
fn errors(log: &str) -> Option<String> {
    let errors = log.lines().filter_map(|line| line.split_once("Error (")?.1.split_once("): "));
    let errors: Vec<&str> =
        errors.map(|(_, what)| what.trim()).filter(|what| !what.starts_with("exited")).collect();
    let last = &errors[errors.len().saturating_sub(LINES)..];
    (!last.is_empty()).then(|| last.join("; "))
}

/// Fuzz target: the mounts of a container's process.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(mountinfo: &str) {
    let places = external(mountinfo, &[PathBuf::from("/")].into());
    let misread = places.iter().filter(|place| is_misread(place)).count();
    assert!(misread <= places.len() && places.len() <= mountinfo.lines().count());
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn external_mounts_are_distinguished_from_own_mounts() {
        let mountinfo = "\
            10 1 0:29 / / rw - overlay overlay rw\n\
            11 10 0:32 / /proc rw - proc proc rw\n\
            12 11 0:32 /sys /proc/sys ro - proc proc rw\n\
            13 11 0:6 /null /proc/kcore rw - devtmpfs dev rw\n\
            14 10 0:33 / /dev rw - tmpfs tmpfs rw\n\
            15 10 0:28 / /dev/shm rw - tmpfs shm rw\n\
            16 10 0:24 /pod/c /sys/fs/cgroup ro - cgroup2 cgroup rw\n\
            17 10 0:25 /hosts /etc/hosts rw - tmpfs run rw\n\
            18 10 8:1 /data /my\\040data rw - ext4 disk rw\n\
            19 10 8:1 /logs /tab\\011\\012line rw - ext4 disk rw\n";
        let own = ["/", "/proc", "/dev"].map(PathBuf::from).into();
        let places = ["/proc/kcore", "/dev/shm", "/sys/fs/cgroup", "/etc/hosts", "/my data", "/tab\t\nline"];
        assert_eq!(external(mountinfo, &own), places.map(PathBuf::from));
    }

    /// CVE-2026-119101, CVE-2026-115520: the names of mount points in CRIU's options led to directories of the host.
    #[test]
    fn cve_2026_119101_a_mount_point_that_criu_misreads_is_recognised() {
        for place in ["/data]:/etc", "/]:", "/a/b]:c"] {
            assert!(is_misread(Path::new(place)), "{place}");
        }
        for place in ["/data", "/a]b", "/a:b]", "/[a]/:b", "/my data"] {
            assert!(!is_misread(Path::new(place)), "{place}");
        }
    }

    #[tokio::test]
    async fn a_criu_is_found_by_its_command_line_and_waited_for() {
        let [dir, other_dir] = [(); 2].map(|()| tempfile::tempdir().expect("directory"));
        // A process that waits for the end of its input.
        let start = |dir: &Path| {
            let mut command = Command::new("/bin/sh");
            command.arg0("/sbin/criu").args(["-c", "read x"]).arg(dir).stdin(Stdio::piped());
            let child = command.spawn().expect("a shell");
            // The kernel shows the command line a moment after the exec.
            let pid = i32::try_from(child.id()).expect("a pid");
            coracle_testing::eventually("the command line", 10, || running_criu(dir) == [pid]);
            child
        };
        let [mut child, mut other] = [start(dir.path()), start(other_dir.path())];
        ended(Path::new("/another")).await.expect("no CRIU in this directory");
        let mut end = Box::pin(ended(dir.path()));
        drop(other.stdin.take());
        tokio::select! {
            biased;
            _early = &mut end => panic!("CRIU still works"),
            done = ended(other_dir.path()) => done.expect("the end of the other process"),
        }
        other.wait().expect("its end");
        drop(child.stdin.take());
        // The process is a zombie, as with a parent that does not wait for it.
        end.await.expect("its end");
        assert_eq!(running_criu(dir.path()), Vec::<i32>::new());
        child.wait().expect("its end");
    }

    #[test]
    fn processes_of_containers_and_of_other_users_are_not_taken_for_criu() {
        let dir = tempfile::tempdir().expect("directory");
        let program = dir.path().join("criu");
        std::os::unix::fs::symlink("/bin/sh", &program).expect("link");
        let mut of_container = Command::new("unshare");
        of_container.args(["--pid", "--fork", "--kill-child"]).arg(&program);
        let mut of_user = Command::new("/bin/sh");
        of_user.arg0("/sbin/criu").uid(65534);
        for mut command in [of_container, of_user] {
            command.args(["-c", "echo; read x"]).arg(dir.path());
            command.stdin(Stdio::piped()).stdout(Stdio::piped());
            let mut child = command.spawn().expect("it starts");
            child.stdout.take().expect("output").read_exact(&mut [0]).expect("it runs");
            let found = running_criu(dir.path());
            drop(child.stdin.take());
            child.wait().expect("its end");
            assert_eq!(found, Vec::<i32>::new(), "{command:?}");
        }
    }

    #[test]
    fn the_last_errors_are_shown_without_time_and_location() {
        let log = "(0.1) Error (criu/util.c:642): exited, status=1\n(0.2) Dumping\n\
                   (3.3) Error (criu/files.c:4): Can't dump it\n(3.4) Error (criu/cr-dump.c:2053): Dumping FAILED.\n";
        assert_eq!(errors(log).as_deref(), Some("Can't dump it; Dumping FAILED."));
        assert_eq!(errors("all is well\n"), None);
    }

    #[test]
    fn the_end_of_a_long_log_of_criu_is_read() {
        let dir = tempfile::tempdir().expect("directory");
        let log = dir.path().join(LOG);
        let (first, last) = ("(0.1) Error (a.c:1): the first\n", "(0.2) Error (a.c:2): the last\n");
        fs::write(&log, format!("{first}{}\n{last}", "x".repeat(1 << 20))).expect("write");
        assert_eq!(criu_errors(&log, "").as_deref(), Some("the last"));
    }
}
