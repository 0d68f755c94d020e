//! Shims whose sandbox has no directory any more, for example because the run directory was removed while the node was
//! stopped. No client can reach them, and their pods are started again. If they were not killed here, they would run
//! forever.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use tokio::time::timeout;

use super::process;
use super::timeouts::Timeouts;
use crate::pidfd;

/// Kills the shims of directories in `parent` that are not in `known`, with the processes of their containers.
pub(super) async fn kill(parent: &Path, known: HashSet<String>, timeouts: Timeouts) {
    let wanted = parent.to_owned();
    let search = coracle_threads::spawn_blocking(move || find(&wanted, &known));
    // A path of a foreign process may be on a file system that does not respond.
    let Ok(Ok(strays)) = timeout(timeouts.death, search).await else {
        tracing::warn!(dir = %parent.display(), "cannot search for shims whose directory was removed");
        return;
    };
    for (pid, dir) in strays {
        let descendants = coracle_threads::spawn_blocking(move || descendants(pid)).await.unwrap_or_default();
        if !process::kill_shim(pid, &dir, timeouts).await {
            // The shim has ended meanwhile, and another process may have its pid.
            continue;
        }
        for process in &descendants {
            // The first process of a container ends with its shim, except a program that has changed its user. If the
            // container uses the node's pid namespace, its other processes do not end with the first process.
            let _ended = pidfd::send(process, libc::SIGKILL);
        }
    }
}

/// Whether the shim of any directory in `parent` runs.
pub(super) fn exist(parent: &Path) -> bool {
    !find(parent, &HashSet::new()).is_empty()
}

/// The processes of strays, with their directories.
fn find(parent: &Path, known: &HashSet<String>) -> Vec<(i32, PathBuf)> {
    let stray = |pid| {
        let dir = process::shim_directory(&pidfd::command_line(pid))?;
        let is_known = dir.file_name().and_then(OsStr::to_str).is_some_and(|name| known.contains(name));
        let is_stray =
            !is_known && dir.parent() == Some(parent) && pidfd::is_of_node(pid) && has_same(pid, parent);
        is_stray.then_some((pid, dir))
    };
    process::all().filter_map(stray).collect()
}

/// Whether the process sees the same directory at this path. A node in a container may use the same paths.
fn has_same(pid: i32, dir: &Path) -> bool {
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let below_root = dir.strip_prefix("/").unwrap_or(dir);
    let of_process = Path::new("/proc").join(pid.to_string()).join("root").join(below_root);
    identity(dir).is_some_and(|own| identity(&of_process) == Some(own))
}

/// The descendants of a process.
fn descendants(pid: i32) -> Vec<OwnedFd> {
    let Ok(first) = pidfd::open(pid) else { return Vec::new() };
    let (mut known, mut left, mut found) = (HashSet::from([pid]), vec![(pid, first)], Vec::new());
    while let Some((parent, process)) = left.pop() {
        left.extend(children(parent, &process).into_iter().filter(|(child, _)| known.insert(*child)));
        if parent != pid {
            found.push(process);
        }
    }
    found
}

/// The children of an opened process. Empty if the process has ended.
fn children(pid: i32, process: &OwnedFd) -> Vec<(i32, OwnedFd)> {
    let opened: Vec<(i32, OwnedFd)> =
        list(pid).into_iter().filter_map(|child| Some((child, pidfd::open(child).ok()?))).collect();
    // If a child ended before it was opened, its pid can belong to another process.
    let still = list(pid);
    if !pidfd::is_alive(process) {
        // The pid of the parent can belong to another process, too.
        return Vec::new();
    }
    opened.into_iter().filter(|(child, _)| still.contains(child)).collect()
}

/// The pids of the children that the threads of a process have.
fn list(pid: i32) -> HashSet<i32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut pids = HashSet::new();
    for thread in threads {
        let text = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        pids.extend(text.split_whitespace().filter_map(|word| word.parse::<i32>().ok()));
    }
    pids
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A command with the command line of the shim of a directory.
    fn shim(place: &Path, dir: &Path) -> Command {
        let mut command = Command::new("sh");
        command.args(["shim", "--dir"]).arg(dir).current_dir(place).stdout(Stdio::piped());
        command
    }

    /// Starts the command. Returns it and its descendants.
    fn start(command: &mut Command) -> (Child, Vec<OwnedFd>) {
        let mut shim = command.spawn().expect("sh");
        shim.stdout.take().expect("output").read_exact(&mut [0]).expect("it has descendants");
        let descendants = descendants(shim.id().cast_signed());
        assert_eq!(descendants.len(), 2);
        (shim, descendants)
    }

    #[tokio::test]
    async fn a_shim_without_a_directory_is_killed_with_its_descendants() {
        use std::os::unix::fs::PermissionsExt as _;
        use std::os::unix::process::CommandExt as _;
        // Any user can enter this directory.
        let place = tempfile::tempdir_in("/dev/shm").expect("directory");
        std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o755)).expect("mode");
        // The shim has a child, and the child has a child.
        std::fs::write(place.path().join("shim"), "(sleep 1000 & echo; wait) & wait").expect("script");
        let parent = place.path().join("sandboxes");
        std::fs::create_dir(&parent).expect("directory");
        let (mut stray, strays_descendants) = start(&mut shim(place.path(), &parent.join("lost")));
        let mut others = [
            start(&mut shim(place.path(), &parent.join("known"))),
            start(&mut shim(place.path(), &place.path().join("other/lost"))),
            start(shim(place.path(), &parent.join("another-user")).uid(65534)),
        ];
        assert!(exist(&parent) && !exist(&place.path().join("another")));
        kill(&parent, HashSet::from(["known".to_owned()]), Timeouts::default()).await;
        let _reaped_meanwhile = stray.wait();
        for process in &strays_descendants {
            coracle_testing::until("the end of a descendant", 10, || !pidfd::is_alive(process)).await;
        }
        let running = others.each_mut().map(|(shim, _)| shim.try_wait().is_ok_and(|ended| ended.is_none()));
        for (shim, descendants) in &mut others {
            shim.kill().and_then(|()| shim.wait()).expect("killed");
            for process in descendants {
                pidfd::send(process, libc::SIGKILL).expect("killed");
            }
        }
        assert_eq!(running, [true; 3]);
    }
}
