//! `emptyDir`: an empty directory of the pod, on disk or in memory.

use std::fs;
use std::path::{Path, PathBuf};

use coracle_values::quantity::value_of;
use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, Pod};

use super::empty_dir_quota::EmptyDirQuota;
use super::error::SetUpError;
use super::{Target, mounts, ownership};
use crate::cgroup::resources::pod_limits;

pub(super) const PLUGIN: &str = "kubernetes.io~empty-dir";

pub(super) fn mount(
    target: &Target<'_>,
    name: &str,
    source: &EmptyDirVolumeSource,
) -> Result<PathBuf, SetUpError> {
    let dir = target.volume_dir(PLUGIN, name);
    let access = Access::of(target.pod, source);
    match source.medium.as_deref() {
        Some("Memory") => {
            super::make_private(&dir).map_err(SetUpError::io("create the directory", &dir))?;
            let size = size(target.pod, source, target.ctx.shared.node.memory_allocatable());
            let mounted = mounts::ensure_tmpfs(&dir, &access.tmpfs_options(size));
            mounted.map_err(SetUpError::io("mount a tmpfs at", &dir))?;
        }
        // Huge pages need a file system of their own; without this check the medium would be the disk.
        Some(medium) if medium.starts_with("HugePages") => {
            return Err(SetUpError::io("mount a hugetlbfs at", &dir)(std::io::ErrorKind::Unsupported.into()));
        }
        _ if dir.exists() => {}
        _ => make(&dir, access, &target.ctx.shared.empty_dirs)?,
    }
    Ok(dir)
}

/// Mode and group of the volume's directory.
#[derive(Clone, Copy)]
struct Access {
    mode: u32,
    group: Option<u32>,
}

impl Access {
    /// The directory is writable for all users, unless the volume has a mode or the pod an fsGroup. As upstream, a
    /// directory in memory has the kernel's default mode of a tmpfs, in which users cannot remove the files of other
    /// users.
    fn of(pod: &Pod, source: &EmptyDirVolumeSource) -> Self {
        let default = if source.medium.as_deref() == Some("Memory") { 0o1777 } else { 0o777 };
        let mode =
            source.mode.and_then(|mode| u32::try_from(mode).ok()).map_or(default, |mode| mode & 0o1777);
        Self { mode, group: ownership::fs_group(pod) }
    }

    /// Mount options with mode and group. Each mount sets both at once, including the first mount after a reboot.
    fn tmpfs_options(self, size: Option<u64>) -> String {
        let group = self.group.map(|group| format!(",gid={group}")).unwrap_or_default();
        let mode = if self.group.is_some() { self.mode | ownership::GROUP_DIRECTORY } else { self.mode };
        let size = size.map(|bytes| format!(",size={bytes}")).unwrap_or_default();
        format!("mode={mode:o}{group}{size}")
    }
}

/// Creates the directory under another name and renames it. So after a crash the directory is absent or complete.
fn make(dir: &Path, access: Access, quota: &EmptyDirQuota) -> Result<(), SetUpError> {
    // No volume has this name: names of volumes begin with a letter or a digit.
    let new = dir.with_file_name(".new");
    super::make_private(&new).map_err(SetUpError::io("create the directory", &new))?;
    // The kernel can refuse limits, for example on a node without privileges in the first user namespace.
    if let Err(error) = quota.add(&new) {
        tracing::warn!(%error, dir = %new.display(), "cannot limit a volume of type emptyDir");
    }
    ownership::chmod(&new, access.mode).map_err(SetUpError::io("set the mode of", &new))?;
    if let Some(group) = access.group {
        ownership::set_group(&new, group, false).map_err(SetUpError::io("set the owner of", &new))?;
    }
    fs::rename(&new, dir).map_err(SetUpError::io("rename", dir))
}

/// The smallest of the volume's limit, the pod's memory limit and the node's allocatable memory.
fn size(pod: &Pod, source: &EmptyDirVolumeSource, node: i64) -> Option<u64> {
    let requested = source.size_limit.as_ref().map(value_of);
    let limits = [requested, Some(pod_limits(pod).memory), Some(node)];
    limits.into_iter().flatten().filter(|bytes| *bytes > 0).min().and_then(|bytes| u64::try_from(bytes).ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::node::EvictionThresholds;

    #[test]
    fn a_directory_that_a_crash_left_unfinished_is_replaced_with_its_mode_and_group() {
        use std::os::unix::fs::MetadataExt;
        let place = tempfile::tempdir().expect("directory");
        let dir = place.path().join("plugin/data");
        super::super::make_private(&place.path().join("plugin/.new")).expect("left by a crash");
        let quota = EmptyDirQuota::open(place.path(), EvictionThresholds::NONE);
        make(&dir, Access { mode: 0o777, group: Some(1234) }, &quota).expect("made");
        let found = fs::metadata(&dir).expect("metadata");
        assert_eq!((found.mode() & 0o7777, found.gid()), (0o2777, 1234));
        assert_eq!(fs::read_dir(place.path().join("plugin")).expect("entries").count(), 1);
    }

    #[test]
    fn a_volume_in_memory_has_the_mode_of_a_tmpfs() {
        let pod: Pod = serde_json::from_value(json!({"metadata": {"name": "p"}})).expect("pod");
        let options = |medium: &str| {
            let source: EmptyDirVolumeSource =
                serde_json::from_value(json!({"medium": medium})).expect("volume");
            Access::of(&pod, &source).tmpfs_options(None)
        };
        assert_eq!((options("Memory").as_str(), options("").as_str()), ("mode=1777", "mode=777"));
    }

    #[test]
    fn memory_is_limited_by_the_smallest_of_the_three() {
        let pod = |limit: &str| -> Pod {
            serde_json::from_value(
                json!({"spec": {"containers": [{"name": "a", "resources": {"limits": {"memory": limit}}}]}}),
            )
            .expect("pod")
        };
        let requested = |size: Option<&str>| -> EmptyDirVolumeSource {
            serde_json::from_value(json!({"medium": "Memory", "sizeLimit": size})).expect("source")
        };
        assert_eq!(size(&pod("64Mi"), &requested(Some("1Mi")), 1 << 30), Some(1 << 20));
        assert_eq!(size(&pod("64Mi"), &requested(Some("1Gi")), 1 << 30), Some(64 << 20));
        assert_eq!(size(&pod("0"), &requested(None), 1 << 30), Some(1 << 30));
        assert_eq!(size(&pod("0"), &requested(None), 0), None);
    }
}
