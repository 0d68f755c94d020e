//! Which mounts are the cgroup hierarchies, where there may be several of one: the shims are told of those that are
//! chosen here.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

/// A hierarchy, and where the whole of it is mounted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hierarchy {
    pub(super) mount: PathBuf,
    /// Of v1: its controllers, or its name, comma-separated. Empty for v2.
    pub(super) controllers: String,
}

/// The hierarchies of a mountinfo (proc_pid_mountinfo(5)): of each the first mount that is `seen`, by its place and its
/// device, and has the whole.
pub(super) fn parse(mountinfo: &str, seen: impl Fn(&Path, &str) -> bool) -> Vec<Hierarchy> {
    let mut found: Vec<Hierarchy> = Vec::new();
    for line in mountinfo.lines() {
        let Some((device, hierarchy)) = whole(line) else { continue };
        let is_new = !found.iter().any(|known| known.controllers == hierarchy.controllers);
        if is_new && seen(&hierarchy.mount, device) {
            found.push(hierarchy);
        }
    }
    found
}

/// Whether what is at a place has that device: another mount may hide it.
pub(super) fn is_seen(mount: &Path, device: &str) -> bool {
    let there = std::fs::metadata(mount).map(|found| found.dev());
    there.is_ok_and(|dev| device == format!("{}:{}", nix::libc::major(dev), nix::libc::minor(dev)))
}

/// The device of a line, and its hierarchy, if it is the whole of one.
fn whole(line: &str) -> Option<(&str, Hierarchy)> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(2);
    let (device, root, mount) = (left.next()?, left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (kind, options) = (right.next()?, right.nth(1).unwrap_or_default());
    let controllers = match kind {
        "cgroup2" => String::new(),
        "cgroup" => {
            let names =
                options.split(',').filter(|o| !matches!(*o, "rw" | "ro" | "xattr" | "clone_children"));
            names.collect::<Vec<_>>().join(",")
        }
        _ => return None,
    };
    let mount = PathBuf::from(mount.replace("\\040", " ").replace("\\134", "\\"));
    (root == "/").then_some((device, Hierarchy { mount, controllers }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_several_mounts_the_first_that_is_whole_and_seen_is_taken() {
        let mountinfo = "\
            2 1 0:9 / /hidden rw - cgroup2 cgroup2 rw\n\
            3 1 0:2 /pod /mnt/part rw - cgroup2 cgroup2 rw\n\
            4 1 0:2 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n\
            5 1 0:2 / /mnt/again rw - cgroup2 cgroup2 rw\n\
            6 1 0:2 /pod /mnt/later rw - cgroup2 cgroup2 rw\n";
        let found = parse(mountinfo, |_, device| device == "0:2");
        let expected = Hierarchy { mount: "/sys/fs/cgroup".into(), controllers: String::new() };
        assert_eq!(found, [expected]);
    }

    #[test]
    fn what_is_mounted_here_is_seen_as_what_it_is() {
        let table = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let root = table.lines().rev().find_map(|line| {
            let mut fields = line.split(' ').skip(2);
            let device = fields.next()?;
            (fields.nth(1)? == "/proc").then_some(device)
        });
        let device = root.expect("proc is mounted");
        assert!(is_seen(Path::new("/proc"), device));
        assert!(!is_seen(Path::new("/proc"), "0:0") && !is_seen(Path::new("/proc/absent"), device));
    }
}
