//! The `cgroup` mount of a container on v1.
//!
//! The container library looks up its parent process in the host's /proc, but by a pid of the container's pid
//! namespace. In a shared pid namespace that pid belongs to another process or to no process, and the mount fails. So a
//! `cgroup` mount is replaced by equivalent mounts: a small tmpfs that contains, for each hierarchy, a bind mount of
//! the container's own cgroup. On v2 no mount is replaced.

use std::path::Path;

use libcontainer::oci_spec::OciSpecError;
use libcontainer::oci_spec::runtime::{Mount, MountBuilder, Spec};

use crate::cgroup::Hierarchy;

/// Replaces each `cgroup` mount of the spec. Does nothing on v2.
pub(super) fn replace(spec: &mut Spec, hierarchies: &[Hierarchy], cgroup: &str) -> Result<(), OciSpecError> {
    let joined: Vec<&Hierarchy> = hierarchies.iter().filter(|h| !h.aliases().is_empty()).collect();
    if joined.is_empty() {
        return Ok(());
    }
    let Some(mounts) = spec.mounts().clone() else { return Ok(()) };
    let mut replaced = Vec::with_capacity(mounts.len() + joined.len());
    for mount in mounts {
        if mount.typ().as_deref() == Some("cgroup") {
            view(&mount, &joined, cgroup, &mut replaced)?;
        } else {
            replaced.push(mount);
        }
    }
    spec.set_mounts(Some(replaced));
    Ok(())
}

fn view(
    mount: &Mount,
    hierarchies: &[&Hierarchy],
    cgroup: &str,
    into: &mut Vec<Mount>,
) -> Result<(), OciSpecError> {
    let strings = |options: &[&str]| options.iter().map(|option| (*option).to_owned()).collect::<Vec<_>>();
    let tmpfs = MountBuilder::default()
        .destination(mount.destination())
        .typ("tmpfs")
        .source("tmpfs")
        .options(strings(&["nosuid", "nodev", "noexec", "mode=755", "size=64k"]));
    into.push(tmpfs.build()?);
    // The bind mounts are not recursive: mounts below the cgroup (the covers of `cgroup_entry`) are only for the
    // library.
    let mut options = strings(&["bind", "rprivate"]);
    options.extend(mount.options().iter().flatten().filter(|option| *option != "rw").cloned());
    for hierarchy in hierarchies {
        for alias in hierarchy.aliases() {
            let bind = MountBuilder::default()
                .destination(mount.destination().join(alias))
                .typ("bind")
                .source(hierarchy.mount.join(Path::new(cgroup.trim_start_matches('/'))))
                .options(options.clone());
            into.push(bind.build()?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_shows_the_containers_own_cgroup_of_each_hierarchy() {
        let mut spec: Spec = serde_json::from_value(serde_json::json!({
            "ociVersion": "1.2.0",
            "mounts": [{ "destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"] }],
        }))
        .unwrap();
        let hierarchies = [
            Hierarchy::new("/h/cpu,cpuacct", "cpu,cpuacct"),
            Hierarchy::new("/h/systemd", "name=systemd"),
            Hierarchy::new("/h/unified", ""),
        ];
        replace(&mut spec, &hierarchies, "/pods/c").unwrap();
        let mounts = spec.mounts().clone().unwrap();
        let places: Vec<_> = mounts.iter().map(|m| m.destination().to_string_lossy().into_owned()).collect();
        assert_eq!(
            places,
            ["/sys/fs/cgroup", "/sys/fs/cgroup/cpu,cpuacct", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpuacct"]
        );
        assert_eq!(mounts[1].source().as_deref(), Some(Path::new("/h/cpu,cpuacct/pods/c")));
        assert!(mounts[1].options().as_ref().unwrap().contains(&"ro".to_owned()));
    }
}
