//! Shims whose sandbox has no directory any more, for example because the run directory was removed while the node was
//! stopped. No client can reach them, and their pods are started again. Without this they would run forever.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsStr;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use tokio::time::timeout;

use super::process;
use super::timeouts::Timeouts;
use crate::pidfd;

/// Kills the shims of directories in `parent` that are not among the known ones, with the first processes of their
/// containers.
pub(super) async fn kill(parent: &Path, known: HashSet<String>, timeouts: Timeouts) {
    let wanted = parent.to_owned();
    let search = tokio::task::spawn_blocking(move || find(&wanted, &known));
    // A path of a foreign process may be on a file system that does not respond.
    let Ok(Ok(strays)) = timeout(timeouts.death, search).await else { return };
    for (dir, children) in strays {
        process::kill_unreachable(&dir, timeouts).await;
        for child in &children {
            // Most end with their shim. A program that has changed its user does not.
            let _ended = pidfd::send(child, libc::SIGKILL);
        }
    }
}

/// The directories of strays, with the children of their shims.
fn find(parent: &Path, known: &HashSet<String>) -> BTreeMap<PathBuf, Vec<OwnedFd>> {
    let mut strays: BTreeMap<PathBuf, Vec<OwnedFd>> = BTreeMap::new();
    for pid in process::all() {
        let Some(dir) = process::shim_directory(&pidfd::command_line(pid)) else { continue };
        let is_known = dir.file_name().and_then(OsStr::to_str).is_some_and(|name| known.contains(name));
        if !is_known && dir.parent() == Some(parent) && has_same(pid, parent) {
            strays.entry(dir).or_default().extend(children(pid));
        }
    }
    strays
}

/// Whether the process sees the same directory at this path. A node in a container may use the same paths.
fn has_same(pid: i32, dir: &Path) -> bool {
    let identity = |path: &Path| std::fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let below_root = dir.strip_prefix("/").unwrap_or(dir);
    let seen = Path::new("/proc").join(pid.to_string()).join("root").join(below_root);
    identity(dir).is_some_and(|own| identity(&seen) == Some(own))
}

/// The children of a process.
fn children(pid: i32) -> Vec<OwnedFd> {
    let list = || -> HashSet<i32> {
        let text = std::fs::read(format!("/proc/{pid}/task/{pid}/children")).unwrap_or_default();
        let words = text.split(|byte| *byte == b' ').map(OsStr::from_bytes);
        words.filter_map(|word| word.to_str()?.parse().ok()).collect()
    };
    let opened: Vec<(i32, OwnedFd)> =
        list().into_iter().filter_map(|child| Some((child, pidfd::open(child).ok()?))).collect();
    // The number of a child that ended before it was opened may belong to another process.
    let still = list();
    opened.into_iter().filter(|(child, _)| still.contains(child)).map(|(_, opened)| opened).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Starts a process with the command line of the shim of a directory, and a child of it.
    fn start(place: &Path, dir: &Path) -> (Child, Vec<OwnedFd>) {
        std::fs::write(place.join("shim"), "sleep 1000 & echo; wait").expect("script");
        let mut command = Command::new("sh");
        command.args(["shim", "--dir"]).arg(dir).current_dir(place).stdout(Stdio::piped());
        let mut shim = command.spawn().expect("sh");
        shim.stdout.take().expect("output").read_exact(&mut [0]).expect("it has a child");
        let children = children(shim.id().cast_signed());
        (shim, children)
    }

    #[tokio::test]
    async fn a_shim_without_a_directory_is_killed_with_its_children() {
        let place = tempfile::tempdir().expect("directory");
        let parent = place.path().join("sandboxes");
        std::fs::create_dir(&parent).expect("directory");
        let (mut stray, strays_children) = start(place.path(), &parent.join("lost"));
        let (mut kept, kept_children) = start(place.path(), &parent.join("known"));
        let (mut foreign, foreign_children) = start(place.path(), &place.path().join("other/lost"));
        kill(&parent, HashSet::from(["known".to_owned()]), Timeouts::default()).await;
        let _reaped_meanwhile = stray.wait();
        let [child] = strays_children.as_slice() else { panic!("{strays_children:?}") };
        while pidfd::is_alive(child) {
            tokio::task::yield_now().await;
        }
        let others = [kept.try_wait(), foreign.try_wait()];
        for shim in [&mut kept, &mut foreign] {
            shim.kill().and_then(|()| shim.wait()).expect("killed");
        }
        for child in kept_children.iter().chain(&foreign_children) {
            pidfd::send(child, libc::SIGKILL).expect("killed");
        }
        assert!(others.into_iter().all(|ended| ended.is_ok_and(|status| status.is_none())));
    }
}
