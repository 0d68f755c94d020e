//! The mount point of each cgroup hierarchy. If a hierarchy has several mounts, one is chosen here and passed to the shims.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use coracle_tree::mountinfo::{cgroup_controllers, unescaped};

/// A hierarchy and the mount point of its root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Hierarchy {
    pub(super) mount: PathBuf,
    /// v1: the controllers or the name, comma-separated. v2: empty.
    pub(super) controllers: String,
}

/// Parses the hierarchies of a mountinfo (proc_pid_mountinfo(5)). Of each hierarchy, the first visible mount of its root is
/// chosen. `visible` gets the mount point and the device.
pub(super) fn parse(mountinfo: &str, visible: impl Fn(&Path, &str) -> bool) -> Vec<Hierarchy> {
    let mut found: Vec<Hierarchy> = Vec::new();
    for line in mountinfo.lines() {
        let Some((device, hierarchy)) = root_mount(line) else { continue };
        let is_new = !found.iter().any(|known| known.controllers == hierarchy.controllers);
        if is_new && visible(&hierarchy.mount, device) {
            found.push(hierarchy);
        }
    }
    found
}

/// Whether the file system at a mount point has this device. Otherwise another mount hides the hierarchy.
pub(super) fn is_visible(mount: &Path, device: &str) -> bool {
    let found = std::fs::metadata(mount).map(|found| found.dev());
    found.is_ok_and(|dev| device == format!("{}:{}", nix::libc::major(dev), nix::libc::minor(dev)))
}

/// The device and hierarchy of a line that mounts the root of a hierarchy.
fn root_mount(line: &str) -> Option<(&str, Hierarchy)> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(2);
    let (device, root, mount) = (left.next()?, left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (kind, options) = (right.next()?, right.nth(1).unwrap_or_default());
    let controllers = cgroup_controllers(kind, options)?;
    (root == "/").then(|| (device, Hierarchy { mount: unescaped(mount), controllers }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_visible_mount_of_the_root_is_chosen() {
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
    fn a_mount_is_visible_by_its_device() {
        let table = std::fs::read_to_string("/proc/self/mountinfo").expect("mountinfo");
        let root = table.lines().rev().find_map(|line| {
            let mut fields = line.split(' ').skip(2);
            let device = fields.next()?;
            (fields.nth(1)? == "/proc").then_some(device)
        });
        let device = root.expect("proc is mounted");
        assert!(is_visible(Path::new("/proc"), device));
        assert!(!is_visible(Path::new("/proc"), "0:0") && !is_visible(Path::new("/proc/absent"), device));
    }
}
