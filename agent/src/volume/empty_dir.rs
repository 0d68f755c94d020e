//! `emptyDir`: an empty directory of the pod, on disk or in memory.

use std::path::{Path, PathBuf};

use coracle_values::quantity::value_of;
use k8s_openapi::api::core::v1::{EmptyDirVolumeSource, Pod};

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
    let is_new = !dir.exists();
    super::make_private(&dir).map_err(SetUpError::io("mkdir", &dir))?;
    if source.medium.as_deref().is_some_and(|medium| medium == "Memory") {
        let size = size(target.pod, source, target.ctx.shared.node.memory_allocatable());
        mounts::ensure_tmpfs(&dir, size).map_err(SetUpError::io("mount tmpfs", &dir))?;
    }
    // Huge pages need a file system of their own; without this check the medium would be the disk.
    if source.medium.as_deref().is_some_and(|medium| medium.starts_with("HugePages")) {
        return Err(SetUpError::io("mount hugetlbfs", &dir)(std::io::ErrorKind::Unsupported.into()));
    }
    if is_new {
        prepare(target.pod, source, &dir)?;
    }
    Ok(dir)
}

/// The directory is writable for all users, unless the volume has a mode or the pod an fsGroup.
fn prepare(pod: &Pod, source: &EmptyDirVolumeSource, dir: &Path) -> Result<(), SetUpError> {
    let mode = source.mode.and_then(|mode| u32::try_from(mode).ok()).map_or(0o777, |mode| mode & 0o1777);
    ownership::chmod(dir, mode).map_err(SetUpError::io("chmod", dir))?;
    match ownership::fs_group(pod) {
        Some(group) => ownership::give(dir, group, false).map_err(SetUpError::io("chown", dir)),
        None => Ok(()),
    }
}

/// The smallest of the volume's limit, the pod's memory limit and the node's allocatable memory.
fn size(pod: &Pod, source: &EmptyDirVolumeSource, node: i64) -> Option<u64> {
    let asked = source.size_limit.as_ref().map(value_of);
    let limits = [asked, Some(pod_limits(pod).memory), Some(node)];
    limits.into_iter().flatten().filter(|bytes| *bytes > 0).min().and_then(|bytes| u64::try_from(bytes).ok())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn memory_is_limited_by_the_smallest_of_the_three() {
        let pod = |limit: &str| -> Pod {
            serde_json::from_value(
                json!({"spec": {"containers": [{"name": "a", "resources": {"limits": {"memory": limit}}}]}}),
            )
            .expect("pod")
        };
        let asked = |size: Option<&str>| -> EmptyDirVolumeSource {
            serde_json::from_value(json!({"medium": "Memory", "sizeLimit": size})).expect("source")
        };
        assert_eq!(size(&pod("64Mi"), &asked(Some("1Mi")), 1 << 30), Some(1 << 20));
        assert_eq!(size(&pod("64Mi"), &asked(Some("1Gi")), 1 << 30), Some(64 << 20));
        assert_eq!(size(&pod("0"), &asked(None), 1 << 30), Some(1 << 30));
        assert_eq!(size(&pod("0"), &asked(None), 0), None);
    }
}
