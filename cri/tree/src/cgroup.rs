//! Trees of cgroups that a container can change.
//!
//! Root in a container without a seccomp profile can create a user namespace, and then cgroups below its own cgroup.
//! Their number and depth are not limited, and their paths can be longer than the kernel accepts.

use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, openat, openat2, unlinkat};
use rustix::io::Errno;

use crate::DIRECTORY;
use crate::walk::walk_directories;

/// Maximum cgroups that one call removes. So a process that creates cgroups during the call cannot prolong it without end.
const MAX_REMOVALS: u32 = 10_000;

/// Maximum processes that are open at a time while a cgroup gets a signal.
const MAX_OPEN_PROCESSES: usize = 64;

/// The processes in the cgroup at a path and in all cgroups below it. Empty if the cgroup is absent.
#[must_use]
pub fn processes(top: &Path) -> Vec<i32> {
    processes_of(top, usize::MAX)
}

/// The processes in the cgroup at a path and in at most `most` cgroups below it. `most` is at least one. Empty if the
/// cgroup is absent.
#[must_use]
pub fn processes_of(top: &Path, most: usize) -> Vec<i32> {
    let mut pids = Vec::new();
    each_file(top, most, "cgroup.procs", OFlags::RDONLY, |mut file| {
        let mut text = String::new();
        // A cgroup that is removed meanwhile has no processes.
        let _removed = file.read_to_string(&mut text);
        pids.extend(text.lines().filter_map(|line| line.parse::<i32>().ok()).filter(|pid| *pid > 0));
    });
    pids
}

/// Sends a signal to the listed processes of a cgroup. `list` returns the cgroup's processes in ascending order.
///
/// A process can end after it was listed, and its pid can be reused. So each process is opened first, and gets the signal
/// only if the cgroup still has its pid afterwards. At most 64 processes are open at a time.
pub fn signal_listed<P>(
    pids: &[i32],
    open: impl Fn(i32) -> Option<P>,
    list: impl Fn() -> Vec<i32>,
    send: impl Fn(&P),
) {
    for some in pids.chunks(MAX_OPEN_PROCESSES) {
        let opened: Vec<(i32, P)> = some.iter().filter_map(|pid| Some((*pid, open(*pid)?))).collect();
        let still = list();
        for (_, process) in opened.iter().filter(|(pid, _)| still.binary_search(pid).is_ok()) {
            send(process);
        }
    }
}

/// Thaws the cgroup at a path and all cgroups below it, in the v1 hierarchy `freezer`. Killed processes of a frozen
/// cgroup end only when it is thawed. An absent cgroup is not an error.
///
/// # Errors
/// The first error. The other cgroups are still thawed.
pub fn thaw(top: &Path) -> io::Result<()> {
    let mut result = Ok(());
    each_file(top, usize::MAX, "freezer.state", OFlags::WRONLY, |mut file| {
        let written = file.write_all(b"THAWED");
        if result.is_ok() {
            result = written;
        }
    });
    result
}

/// Removes the cgroup at a path and all cgroups below it. An absent cgroup is not an error.
///
/// # Errors
/// `ResourceBusy` if processes are left in a cgroup, or if more than 10,000 cgroups have to be removed. Then a later
/// call continues.
pub fn remove(top: &Path) -> io::Result<()> {
    match unlinkat(CWD, top, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => return Ok(()),
        Err(error) if is_in_use(error) => {}
        // On a read-only mount the kernel returns this error before it looks for the directory.
        Err(Errno::ROFS) if matches!(top.try_exists(), Ok(false)) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    match openat(CWD, top, DIRECTORY, Mode::empty()) {
        Ok(opened) => remove_below(opened)?,
        Err(Errno::NOENT) => return Ok(()),
        Err(error) => return Err(error.into()),
    }
    match unlinkat(CWD, top, AtFlags::REMOVEDIR) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        Err(error) if is_in_use(error) => Err(Errno::BUSY.into()),
        Err(error) => Err(error.into()),
    }
}

/// Opens a file of the cgroup at a path and of at most `most` cgroups below it, parents first. Cgroups without the file
/// are skipped.
fn each_file(top: &Path, most: usize, name: &str, flags: OFlags, mut each: impl FnMut(File)) {
    let flags = flags.union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);
    if let Ok(file) = openat(CWD, top.join(name), flags, Mode::empty()) {
        each(file.into());
    }
    // The link count of a cgroup is 2 plus the number of cgroups below it. Usually there are none.
    if std::fs::metadata(top).is_ok_and(|found| found.nlink() == 2) {
        return;
    }
    let _absent = walk_directories(top, most, |found| {
        let path = [found.name.to_bytes(), b"/".as_slice(), name.as_bytes()].concat();
        if let Ok(file) = openat(found.dir, path, flags, Mode::empty()) {
            each(file.into());
        }
    });
}

/// Removes everything below a cgroup. Only two directories are open at a time. A cgroup cannot be moved to another
/// parent, so its `..` is always the parent that the removal came from.
fn remove_below(top: OwnedFd) -> Result<(), Errno> {
    let (mut at, mut depth, mut left) = (top, 0_usize, MAX_REMOVALS);
    let mut is_first_scan = true;
    loop {
        let before = left;
        if let Some(child) = remove_children(&at, &mut left)? {
            (at, depth, is_first_scan) = (child, depth + 1, true);
            continue;
        }
        if left != before {
            // The directory is scanned again, because a file system may skip entries of a directory that changes.
            is_first_scan = false;
            continue;
        }
        if is_first_scan {
            // The cgroup could not be removed, and no cgroup is below it. So it has processes.
            return Err(Errno::BUSY);
        }
        if depth == 0 {
            return Ok(());
        }
        at = match openat(&at, "..", DIRECTORY, Mode::empty()) {
            // Another process has removed it.
            Err(Errno::NOENT) => return Err(Errno::BUSY),
            above => above?,
        };
        (depth, is_first_scan) = (depth - 1, false);
    }
}

/// Removes the cgroups directly below a cgroup. Returns the first one that cannot be removed: it has processes, or
/// cgroups below it. `left` is the number of cgroups that may still be removed.
fn remove_children(at: &OwnedFd, left: &mut u32) -> Result<Option<OwnedFd>, Errno> {
    let mut children = Dir::read_from(at)?;
    while let Some(entry) = children.read() {
        let entry = entry?;
        let name = entry.file_name();
        let is_directory = matches!(entry.file_type(), FileType::Directory | FileType::Unknown);
        if !is_directory || name == c"." || name == c".." {
            continue;
        }
        match unlinkat(at, name, AtFlags::REMOVEDIR) {
            Ok(()) => *left = left.checked_sub(1).ok_or(Errno::BUSY)?,
            Err(Errno::NOENT | Errno::NOTDIR) => {}
            Err(error) if is_in_use(error) => {
                match openat2(at, name, DIRECTORY, Mode::empty(), ResolveFlags::NO_XDEV) {
                    Err(Errno::NOENT) => {}
                    opened => return opened.map(Some),
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// Whether the error of rmdir(2) says that a directory has processes or directories in it.
fn is_in_use(error: Errno) -> bool {
    matches!(error, Errno::BUSY | Errno::NOTEMPTY | Errno::EXIST)
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::fs;
    use std::rc::Rc;

    use nix::mount::{MsFlags, mount};

    use super::*;
    use crate::scratch::{deep, in_memory, with_few_resources};

    #[test]
    fn a_cgroup_gets_a_signal_while_few_of_its_processes_are_open() {
        let pids: Vec<i32> = (2..1_000).collect();
        let process = Rc::new(());
        let (most, received) = (Cell::new(0), RefCell::new(Vec::new()));
        // A process has ended before it is opened, and another one before it gets the signal.
        let open = |pid: i32| (pid != 3).then(|| (pid, Rc::clone(&process)));
        let list = || -> Vec<i32> {
            most.set(most.get().max(Rc::strong_count(&process) - 1));
            pids.iter().copied().filter(|pid| *pid != 5).collect()
        };
        signal_listed(&pids, open, list, |(pid, _)| received.borrow_mut().push(*pid));
        assert_eq!(most.get(), 64);
        let others: Vec<i32> = pids.iter().copied().filter(|pid| ![3, 5].contains(pid)).collect();
        assert_eq!(received.into_inner(), others);
    }

    // Directories in memory stand for cgroups, and files in them for processes.

    #[test]
    fn a_tree_with_longer_paths_than_the_kernel_accepts_is_read_thawed_and_removed() {
        let place = in_memory();
        let top = place.path().join("top");
        // `deep` moves this directory to the bottom.
        let bottom = top.join("down");
        fs::create_dir_all(&bottom).expect("make");
        fs::write(bottom.join("cgroup.procs"), "7\n8\n").expect("write");
        fs::write(bottom.join("freezer.state"), "FROZEN").expect("write");
        fs::write(top.join("cgroup.procs"), "6\n0\n").expect("write");
        let state = File::open(bottom.join("freezer.state")).expect("open");
        deep(&top, 25_000);
        with_few_resources(|| {
            assert_eq!(processes(&top), [6, 7, 8]);
            thaw(&top).expect("thaw");
            assert_eq!(io::read_to_string(&state).expect("read"), "THAWED");
            fs::remove_file(top.join("cgroup.procs")).expect("remove");
            assert_eq!(remove(&top).expect_err("a file at the bottom").kind(), io::ErrorKind::ResourceBusy);
        });
        crate::remove(&top).expect("remove");
        deep(&top, 25_000);
        with_few_resources(|| {
            let mut calls = 1;
            while let Err(error) = remove(&top) {
                assert_eq!(error.kind(), io::ErrorKind::ResourceBusy);
                calls += 1;
            }
            assert_eq!(calls, 3, "one call removes 10,000");
        });
        assert!(!top.exists());
    }

    #[test]
    fn the_processes_of_a_limited_number_of_groups_are_listed() {
        let place = in_memory();
        let top = place.path().join("top");
        for (number, group) in ["", "a", "a/b", "a/b/c", "d", "e"].iter().enumerate() {
            let dir = top.join(group);
            fs::create_dir_all(&dir).expect("make");
            fs::write(dir.join("cgroup.procs"), format!("{}\n", number + 1)).expect("write");
        }
        assert_eq!(processes_of(&top, 3).len(), 4, "three groups below the top, and the top itself");
        assert_eq!(processes_of(&top, 5).len(), 6);
        assert_eq!(processes(&top).len(), 6);
    }

    #[test]
    fn a_wide_tree_is_removed_and_an_absent_one_is_not_an_error() {
        let place = in_memory();
        let top = place.path().join("top");
        for number in 0..300 {
            fs::create_dir_all(top.join(format!("{number}/a/b"))).expect("make");
            fs::create_dir_all(top.join(format!("{number}/c"))).expect("make");
        }
        remove(&top).expect("remove");
        assert!(!top.exists());
        remove(&top).expect("nothing to remove");
        assert!(processes(&top).is_empty());
        thaw(&top).expect("nothing to thaw");
    }

    #[test]
    fn an_absent_cgroup_of_a_read_only_mount_is_not_an_error() {
        let place = in_memory();
        fs::create_dir(place.path().join("made")).expect("make");
        let (absent, made) = std::thread::scope(|scope| {
            let apart = scope.spawn(|| {
                // The mounts exist only in the namespace of this thread.
                nix::sched::unshare(nix::sched::CloneFlags::CLONE_NEWNS).expect("root");
                let (none, at) = (None::<&str>, place.path());
                mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none).expect("private mounts");
                mount(Some(at), at, none, MsFlags::MS_BIND, none).expect("mount");
                let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
                mount(none, at, none, read_only, none).expect("read-only");
                (remove(&at.join("absent")), remove(&at.join("made")))
            });
            apart.join().expect("the thread")
        });
        absent.expect("nothing to remove");
        assert_eq!(made.expect_err("read-only").kind(), io::ErrorKind::ReadOnlyFilesystem);
    }

    #[test]
    fn a_cgroup_with_processes_is_busy() {
        let place = in_memory();
        let top = place.path().join("top");
        fs::create_dir_all(top.join("a/b")).expect("make");
        for used in ["a/b/process", "a/process", "process"] {
            fs::write(top.join(used), "").expect("write");
        }
        for used in ["a/b/process", "a/process", "process"] {
            assert_eq!(remove(&top).expect_err(used).kind(), io::ErrorKind::ResourceBusy);
            fs::remove_file(top.join(used)).expect("end");
        }
        remove(&top).expect("remove");
        assert!(!top.exists());
    }
}
