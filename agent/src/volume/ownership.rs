//! Who owns a volume's files: the pod's `fsGroup`, and modes.

use std::fs;
use std::io;
use std::os::unix::fs::{PermissionsExt, lchown};
use std::path::Path;

use k8s_openapi::api::core::v1::Pod;

/// The group that volumes are given to, if the pod names one.
pub(super) fn fs_group(pod: &Pod) -> Option<u32> {
    let context = pod.spec.as_ref()?.security_context.as_ref()?;
    context.fs_group.and_then(|group| u32::try_from(group).ok())
}

/// The user of a pod all of whose containers run as the same one: the owner of its tokens.
pub(super) fn fs_user(pod: &Pod) -> Option<u32> {
    let spec = pod.spec.as_ref()?;
    let of_pod = spec.security_context.as_ref().and_then(|context| context.run_as_user);
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let mut users =
        containers.map(|c| c.security_context.as_ref().and_then(|context| context.run_as_user).or(of_pod));
    let first = users.next()??;
    users.all(|user| user == Some(first)).then_some(first).and_then(|user| u32::try_from(user).ok())
}

/// Sets the mode of what is no symlink.
pub(super) fn chmod(path: &Path, mode: u32) -> io::Result<()> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode))
}

/// Gives a tree to the group, which may then read it, write it too unless it is `read_only`, and whose
/// new files in it stay the group's.
pub(super) fn give(path: &Path, group: u32, read_only: bool) -> io::Result<()> {
    let found = fs::symlink_metadata(path)?;
    lchown(path, None, Some(group))?;
    if found.file_type().is_symlink() {
        return Ok(());
    }
    let more = if read_only { 0o440 } else { 0o660 };
    let directory = if found.is_dir() { 0o2110 } else { 0 };
    chmod(path, (found.permissions().mode() & 0o7777) | more | directory)?;
    if found.is_dir() {
        for entry in fs::read_dir(path)? {
            give(&entry?.path(), group, read_only)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_group_is_given_the_tree_but_not_what_links_lead_to() {
        let dir = std::env::temp_dir().join(format!("coracle-ownership-{}", std::process::id()));
        let outside = dir.with_extension("outside");
        fs::create_dir_all(dir.join("inner")).expect("temp dir");
        fs::write(dir.join("inner/file"), "x").expect("file");
        fs::write(&outside, "x").expect("file");
        chmod(&dir.join("inner/file"), 0o600).expect("chmod");
        std::os::unix::fs::symlink(&outside, dir.join("link")).expect("symlink");
        give(&dir, 1234, true).expect("give");
        let at = |path: &Path| fs::metadata(path).map(|m| (m.gid(), m.mode() & 0o7777)).expect("metadata");
        assert_eq!(at(&dir.join("inner/file")), (1234, 0o640));
        assert_eq!(at(&dir.join("inner")).1 & 0o2550, 0o2550);
        assert_ne!(at(&outside).0, 1234);
        fs::remove_dir_all(&dir).expect("clean up");
        fs::remove_file(&outside).expect("clean up");
    }

    #[test]
    fn tokens_belong_to_the_one_user_that_all_containers_run_as() {
        let user =
            |spec: serde_json::Value| fs_user(&serde_json::from_value(json!({"spec": spec})).expect("pod"));
        assert_eq!(user(json!({"containers": [{"name": "a"}]})), None);
        assert_eq!(
            user(json!({"securityContext": {"runAsUser": 7}, "containers": [{"name": "a"}, {"name": "b"}]})),
            Some(7)
        );
        assert_eq!(
            user(
                json!({"securityContext": {"runAsUser": 7}, "containers": [{"name": "a", "securityContext": {"runAsUser": 8}}, {"name": "b"}]})
            ),
            None
        );
    }
}
