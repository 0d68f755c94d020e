//! Device nodes of the host for a container: the requested nodes, or all nodes for a privileged container.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use coracle_proto::cri;
use nix::sys::stat::{major, minor};
use oci_spec::runtime::{LinuxDevice, LinuxDeviceCgroup, LinuxDeviceType};

use crate::error::Error;

/// Names in `/dev` that are skipped: the container has its own, or the directory contains no device nodes. In a
/// container `ptmx` is a link to its own devpts. In a user namespace, a mount of the host's `ptmx` would prevent it.
const OWN: [&str; 7] = ["pts", "ptmx", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts"];

/// A device node, and the access of the container.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) device: LinuxDevice,
    pub(crate) access: String,
}

// === impl Node ===

impl Node {
    /// The node with the access of other users (the last three bits of its mode). `None` if they have no access.
    fn for_others(self) -> Option<Self> {
        let mode = self.device.file_mode().unwrap_or_default();
        let access = [(0o4, 'r'), (0o2, 'w')].into_iter().filter(|(bit, _)| mode & bit != 0);
        let access: String = access.map(|(_, letter)| letter).collect();
        (!access.is_empty()).then_some(Self { access, ..self })
    }

    /// The cgroup rule that allows the access.
    pub(crate) fn rule(&self) -> LinuxDeviceCgroup {
        let mut rule = rule(true, &self.access);
        rule.set_typ(Some(self.device.typ()));
        rule.set_major(Some(self.device.major()));
        rule.set_minor(Some(self.device.minor()));
        rule
    }
}

/// A rule for all devices.
pub(crate) fn rule(allow: bool, access: &str) -> LinuxDeviceCgroup {
    let mut rule = LinuxDeviceCgroup::default();
    rule.set_allow(allow);
    rule.set_typ(Some(LinuxDeviceType::A));
    rule.set_access(Some(access.to_owned()));
    rule
}

/// The requested nodes. A directory means all nodes in it.
pub(crate) fn requested(devices: &[cri::Device]) -> Result<Vec<Node>, Error> {
    let mut nodes = Vec::new();
    for device in devices {
        let host = Path::new(&device.host_path);
        let inside = if device.container_path.is_empty() { host } else { Path::new(&device.container_path) };
        let access = if device.permissions.is_empty() { "rwm" } else { &device.permissions };
        let real = host.canonicalize().map_err(Error::file("find device", host))?;
        let before = nodes.len();
        walk(&real, inside, &[], &mut |host, inside| nodes.extend(node(host, inside, access)));
        if nodes.len() == before && !real.is_dir() {
            return Err(Error::invalid("devices", format!("{} is not a device", host.display())));
        }
    }
    Ok(nodes)
}

/// All device nodes of the host.
pub(crate) fn all() -> Vec<Node> {
    let mut nodes = Vec::new();
    walk(Path::new("/dev"), Path::new("/dev"), &OWN, &mut |host, inside| {
        // The container has its own console.
        if inside != Path::new("/dev/console") {
            nodes.extend(node(host, inside, "rwm"));
        }
    });
    nodes
}

/// The device nodes of a privileged container in a user namespace: the requested nodes, and all nodes of the host that
/// any user may open. Root of the namespace is an ordinary user of the host. As upstream, it cannot open the disks.
pub(crate) fn all_in_user_namespace(devices: &[cri::Device]) -> Result<Vec<Node>, Error> {
    let mut nodes = requested(devices)?;
    let others = all().into_iter().filter_map(Node::for_others);
    let others = others.filter(|other| nodes.iter().all(|node| node.device.path() != other.device.path()));
    let others: Vec<Node> = others.collect();
    nodes.extend(others);
    Ok(nodes)
}

fn walk(host: &Path, inside: &Path, skip: &[&str], found: &mut impl FnMut(&Path, &Path)) {
    let mut todo: Vec<(PathBuf, PathBuf)> = vec![(host.to_owned(), inside.to_owned())];
    while let Some((host, inside)) = todo.pop() {
        let Ok(metadata) = std::fs::symlink_metadata(&host) else { continue };
        if !metadata.is_dir() {
            found(&host, &inside);
            continue;
        }
        let Ok(entries) = std::fs::read_dir(&host) else { continue };
        for entry in entries.flatten() {
            let name = entry.file_name();
            if !skip.iter().any(|skipped| name == *skipped) {
                todo.push((host.join(&name), inside.join(&name)));
            }
        }
    }
}

fn node(host: &Path, inside: &Path, access: &str) -> Option<Node> {
    let metadata = std::fs::symlink_metadata(host).ok()?;
    let kind = metadata.file_type();
    let typ = if kind.is_char_device() {
        LinuxDeviceType::C
    } else if kind.is_block_device() {
        LinuxDeviceType::B
    } else {
        return None;
    };
    let mut device = LinuxDevice::default();
    device.set_path(inside.to_owned());
    device.set_typ(typ);
    device.set_major(i64::try_from(major(metadata.rdev())).ok()?);
    device.set_minor(i64::try_from(minor(metadata.rdev())).ok()?);
    device.set_file_mode(Some(metadata.mode() & 0o7777));
    device.set_uid(Some(metadata.uid()));
    device.set_gid(Some(metadata.gid()));
    Some(Node { device, access: access.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_found_and_a_file_is_refused() {
        let null = cri::Device {
            host_path: "/dev/null".into(),
            container_path: "/dev/nix".into(),
            permissions: "r".into(),
        };
        let nodes = requested(&[null]).expect("null");
        assert_eq!((nodes[0].device.major(), nodes[0].device.minor()), (1, 3));
        assert_eq!(nodes[0].device.path(), Path::new("/dev/nix"));
        assert_eq!(nodes[0].access, "r");
        let file = cri::Device { host_path: "/etc/passwd".into(), ..Default::default() };
        assert!(requested(&[file]).is_err());
        let absent = cri::Device { host_path: "/dev/absent".into(), ..Default::default() };
        assert!(requested(&[absent]).is_err());
    }

    #[test]
    fn in_a_user_namespace_a_node_has_the_access_of_other_users() {
        let access = |mode: u32| {
            let mut device = LinuxDevice::default();
            device.set_file_mode(Some(mode));
            Node { device, access: "rwm".to_owned() }.for_others().map(|node| node.access)
        };
        assert_eq!([0o666, 0o664, 0o622].map(access), ["rw", "r", "w"].map(|text| Some(text.to_owned())));
        assert_eq!([0o660, 0o600, 0o771].map(access), [None, None, None]);
        let null =
            cri::Device { host_path: "/dev/null".into(), permissions: "r".into(), ..Default::default() };
        let nodes = all_in_user_namespace(&[null]).expect("nodes");
        let null: Vec<_> = nodes.iter().filter(|node| node.device.path() == Path::new("/dev/null")).collect();
        assert_eq!((null.len(), null[0].access.as_str()), (1, "r"), "the request has precedence");
        assert!(nodes[1..].iter().all(|node| node.device.file_mode().is_some_and(|mode| mode & 0o6 != 0)));
        assert!(
            nodes.iter().all(|node| node.device.path() != Path::new("/dev/ptmx")),
            "the container has a link"
        );
    }
}
