//! The mounts of a container: file systems of the kernel, files of the pod, and volumes. Pure.

use std::path::Path;

use coracle_proto::cri::MountPropagation::PropagationBidirectional;
use coracle_proto::cri::{self, MountPropagation, NamespaceMode};
use oci_spec::runtime::Mount;

use super::inputs::SpecInputs;
use crate::namespaces;
use crate::sandbox::files::POD_FILES;
use crate::sandbox::user_namespace;

/// Root propagation and mounts of a container.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mounts {
    pub(super) list: Vec<Mount>,
    /// Propagation of the root: the widest propagation of the volumes. `private`, `slave` or `shared`.
    pub(super) propagation: &'static str,
}

/// All mounts. A volume replaces another mount with the same destination. Mounts of the pod are sorted among the volumes,
/// parents first: a volume at `/etc` does not hide the pod's `/etc/resolv.conf`. A volume at `/dev` replaces the mounts
/// below `/dev`, too.
pub(super) fn mounts(inputs: &SpecInputs<'_>) -> Mounts {
    let volumes = &inputs.config.mounts;
    let is_at = |path: &Path| volumes.iter().any(|volume| clean(&volume.container_path) == path);
    // A mount in a bidirectional volume would appear on the host.
    let is_in_shared = |place: &Path| {
        let mut shared = volumes.iter().filter(|volume| volume.propagation() == PropagationBidirectional);
        shared.any(|volume| place.starts_with(clean(&volume.container_path)))
    };
    let devices = Path::new("/dev");
    let mut list = kernel_mounts(inputs);
    list.retain(|mount| {
        let place = mount.destination();
        !(is_at(place) || place.starts_with(devices) && is_at(devices))
    });
    let mut nested = pod_mounts(inputs);
    nested.retain(|mount| !is_at(mount.destination()) && !is_in_shared(mount.destination()));
    nested.extend(volumes.iter().map(volume));
    nested.sort_by_key(|mount| mount.destination().components().count());
    list.extend(nested);
    Mounts { list, propagation: propagation(volumes) }
}

fn kernel_mounts(inputs: &SpecInputs<'_>) -> Vec<Mount> {
    let access = if inputs.privileged() { "rw" } else { "ro" };
    let sys = ["nosuid", "noexec", "nodev", access];
    // Only the owner of a network namespace may mount its sysfs.
    let sys = if inputs.mapping().is_some() && !namespaces::own_network(inputs.sandbox.config) {
        bind("/sys", Path::new("/sys"), &[&["rbind", "rprivate"][..], &sys].concat())
    } else {
        mount("/sys", "sysfs", "sysfs", &sys)
    };
    vec![
        mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount(
            "/dev/pts",
            "devpts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        mount("/dev/mqueue", "mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        sys,
        mount("/sys/fs/cgroup", "cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", access]),
    ]
}

/// The pod's shared memory, and its `/etc/hosts`, `/etc/hostname` and `/etc/resolv.conf`.
fn pod_mounts(inputs: &SpecInputs<'_>) -> Vec<Mount> {
    let shm = if inputs.own_ipc() { inputs.sandbox.shm_dir.as_path() } else { Path::new("/dev/shm") };
    let shm = bind("/dev/shm", shm, &["rbind", "rprivate", "nosuid", "noexec", "nodev"]);
    let read_only = inputs.security().is_some_and(|security| security.readonly_rootfs);
    let access = if read_only { "ro" } else { "rw" };
    let file = |name: &str| {
        bind(&format!("/etc/{name}"), &inputs.sandbox.dir.join(name), &["rbind", "rprivate", access])
    };
    POD_FILES.map(file).into_iter().chain([shm]).collect()
}

fn volume(volume: &cri::Mount) -> Mount {
    let propagation = match volume.propagation() {
        MountPropagation::PropagationPrivate => "rprivate",
        MountPropagation::PropagationHostToContainer => "rslave",
        MountPropagation::PropagationBidirectional => "rshared",
    };
    let access = match (volume.readonly, volume.recursive_read_only) {
        (_, true) => "rro",
        (true, false) => "ro",
        (false, false) => "rw",
    };
    let mut options = vec!["rbind", propagation, access];
    options.extend(volume.mount_options.iter().map(String::as_str));
    let mut mount =
        bind(&clean(&volume.container_path).to_string_lossy(), Path::new(&volume.host_path), &options);
    if !volume.uid_mappings.is_empty() {
        mount.set_uid_mappings(Some(user_namespace::to_oci(&volume.uid_mappings)));
        mount.set_gid_mappings(Some(user_namespace::to_oci(&volume.gid_mappings)));
    }
    mount
}

fn propagation(volumes: &[cri::Mount]) -> &'static str {
    let widest = volumes.iter().map(|volume| volume.propagation).max().unwrap_or_default();
    match MountPropagation::try_from(widest) {
        Ok(MountPropagation::PropagationBidirectional) => "shared",
        Ok(MountPropagation::PropagationHostToContainer) => "slave",
        Ok(MountPropagation::PropagationPrivate) | Err(_) => "private",
    }
}

/// The path without `.` and double slashes. `..` is kept: the mount call refuses it.
fn clean(path: &str) -> std::path::PathBuf {
    Path::new("/").join(path).components().collect()
}

fn mount(destination: &str, kind: &str, source: &str, options: &[&str]) -> Mount {
    let mut mount = Mount::default();
    mount.set_destination(destination.into());
    mount.set_typ(Some(kind.to_owned()));
    mount.set_source(Some(source.into()));
    mount.set_options(Some(options.iter().map(|option| (*option).to_owned()).collect()));
    mount
}

fn bind(destination: &str, source: &Path, options: &[&str]) -> Mount {
    mount(destination, "bind", &source.to_string_lossy(), options)
}

impl SpecInputs<'_> {
    fn own_ipc(&self) -> bool {
        let options = namespaces::options(self.sandbox.config);
        options.ipc() != NamespaceMode::Node
    }
}
