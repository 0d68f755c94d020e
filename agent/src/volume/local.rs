//! `local` volumes: directories of this node. The directories of the built-in provisioner are made and removed here.
//!
//! The directory of a provisioned volume is `<base>/<name of the volume>`. Only root can enter the base. So no user of
//! the node reaches a volume, although each volume is writable for all users of its containers. Containers see the
//! volume, never the base: no link that a container makes is ever followed here.
//!
//! If the file system has project quotas, the size of a volume is limited to the capacity of its object
//! ([`project_quota`]).

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coracle_cri::blocking::FairWork;
use coracle_values::quantity::value_of;
use k8s_openapi::api::core::v1::PersistentVolume;
use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, RenameFlags, chmodat, fstat, mkdirat, openat, renameat_with, statat,
};
use rustix::io::Errno;

use super::error::SetUpError;
use super::{Target, ownership};
use crate::event_recorder::Level;
use crate::project_quota;

pub(super) const PLUGIN: &str = "kubernetes.io~local-volume";
/// Name of the built-in provisioner.
pub(crate) const PROVISIONER: &str = "coracle.dev/local-path";
/// Label of provisioned volumes: the node that has the directory.
pub(crate) const NODE: &str = "coracle.dev/node";
const PROVISIONED_BY: &str = "pv.kubernetes.io/provisioned-by";
/// Changes of the group of volumes: one for each pod of a node (`--max-pods`, 110 by default), and further changes. So
/// namespaces with many files do not delay the other namespaces.
static CHANGES: FairWork = FairWork::new(128, 8);
/// Duration of a change after which the first event reports it. Source: `firstEventReportDuration`, v1.35.
const FIRST_REPORT: Duration = Duration::from_secs(30);
/// Interval of further events. Source: `progressReportDuration`, v1.35.
const NEXT_REPORT: Duration = Duration::from_secs(60);

/// The directory of a volume. The directory of a provisioned volume is created if it is absent.
pub(super) fn mount(base: &Path, node: &str, volume: &PersistentVolume) -> Result<PathBuf, SetUpError> {
    let source = volume.spec.as_ref().and_then(|spec| spec.local.as_ref());
    let path = source.map(|source| PathBuf::from(&source.path)).unwrap_or_default();
    if path.components().any(|part| part == std::path::Component::ParentDir) || !path.is_absolute() {
        return Err(SetUpError::Path(path.to_string_lossy().into_owned()));
    }
    if is_provisioned(volume) {
        let name = own_name(base, node, volume).map_err(SetUpError::Local)?;
        make(base, name, capacity(volume)).map_err(SetUpError::io("create the local volume", &path))?;
        return Ok(path);
    }
    match std::fs::metadata(&path) {
        Ok(found) if found.is_dir() => Ok(path),
        Ok(_) => Err(SetUpError::Local(format!("{} is not a directory", path.display()))),
        Err(error) => Err(SetUpError::io("open the local volume", &path)(error)),
    }
}

/// Whether the built-in provisioner made the volume.
pub(crate) fn is_provisioned(volume: &PersistentVolume) -> bool {
    let annotations = volume.metadata.annotations.as_ref();
    annotations.and_then(|all| all.get(PROVISIONED_BY)).is_some_and(|by| by == PROVISIONER)
}

/// The name of the directory of a provisioned volume. The author of the object cannot choose another directory of the
/// node.
pub(crate) fn own_name<'a>(base: &Path, node: &str, volume: &'a PersistentVolume) -> Result<&'a str, String> {
    let name = volume.metadata.name.as_deref().unwrap_or_default();
    let path = volume.spec.as_ref().and_then(|spec| spec.local.as_ref()).map(|source| source.path.as_str());
    let labels = volume.metadata.labels.as_ref();
    if labels.and_then(|labels| labels.get(NODE)).map(String::as_str) != Some(node) {
        return Err(format!("volume {name} is not on node {node}"));
    }
    if super::check_name(name).is_err() || path.map(Path::new) != Some(base.join(name).as_path()) {
        return Err(format!(
            "volume {name} is not in this node's directory of local volumes, {}",
            base.display()
        ));
    }
    Ok(name)
}

/// The size of a volume in bytes.
fn capacity(volume: &PersistentVolume) -> Option<u64> {
    let capacity = volume.spec.as_ref().and_then(|spec| spec.capacity.as_ref());
    let bytes = capacity.and_then(|capacity| capacity.get("storage")).map(value_of)?;
    u64::try_from(bytes).ok().filter(|bytes| *bytes > 0)
}

/// Creates the directory of a volume, or sets the size of an existing directory. Existing files are not changed.
///
/// The directory is created under another name and renamed. So after a crash the directory is absent or complete.
fn make(base: &Path, name: &str, size: Option<u64>) -> io::Result<()> {
    /// No volume has this name: names of volumes begin with a letter or a digit.
    const NEW: &str = ".new";
    static CREATE_LOCK: Mutex<()> = Mutex::new(());
    let base = open_base(base)?;
    let _one_at_a_time = CREATE_LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let size = size.filter(|_| project_quota::is_enforced(base.as_fd()));
    if matches!(statat(&base, name, AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT)) {
        match mkdirat(&base, NEW, Mode::from_raw_mode(0o700)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => return Err(errno.into()),
        }
        // Containers run as any user, so all users may access the directory. The base directory keeps the other users
        // of the node out.
        chmodat(&base, NEW, Mode::from_raw_mode(0o777), AtFlags::empty())?;
        if let Some(bytes) = size {
            let new = open_volume(&base, NEW)?;
            match project_quota::project(new.as_fd(), name)? {
                Some(_) => project_quota::resize(new.as_fd(), name, bytes)?,
                None => project_quota::assign(new.as_fd(), name, bytes)?,
            }
        }
        renameat_with(&base, NEW, &base, name, RenameFlags::NOREPLACE)?;
    } else if let Some(bytes) = size {
        project_quota::resize(open_volume(&base, name)?.as_fd(), name, bytes)?;
    }
    let found = statat(&base, name, AtFlags::SYMLINK_NOFOLLOW)?;
    if FileType::from_raw_mode(found.st_mode) == FileType::Directory {
        Ok(())
    } else {
        Err(io::ErrorKind::NotADirectory.into())
    }
}

/// Opens the directory of local volumes, created for root only.
fn open_base(base: &Path) -> io::Result<OwnedFd> {
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(base)?;
    let opened = openat(CWD, base, OFlags::DIRECTORY | OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mode = fstat(&opened)?.st_mode & 0o7777;
    if mode & 0o077 != 0 {
        rustix::fs::fchmod(&opened, Mode::from_raw_mode(mode & 0o700))?;
    }
    Ok(opened)
}

fn open_volume(base: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::RDONLY | OFlags::CLOEXEC;
    Ok(openat(base, name, flags, Mode::empty())?)
}

/// Changes the size of a volume to the size in its object. Does nothing without its directory or without quotas.
pub(crate) fn resize(base: &Path, name: &str, volume: &PersistentVolume) -> io::Result<()> {
    let Some(bytes) = capacity(volume).filter(|_| base.exists()) else { return Ok(()) };
    let base = open_base(base)?;
    if !project_quota::is_enforced(base.as_fd()) {
        return Ok(());
    }
    match open_volume(&base, name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        volume => project_quota::resize(volume?.as_fd(), name, bytes),
    }
}

/// Removes the directory of a volume with its files. Succeeds if there is no directory. Follows no links.
pub(crate) fn remove(base: &Path, name: &str) -> io::Result<()> {
    if !base.exists() {
        return Ok(());
    }
    let base = open_base(base)?;
    let is_limited = project_quota::is_enforced(base.as_fd());
    let project = open_volume(&base, name).ok().filter(|_| is_limited);
    let project = project.map(|volume| project_quota::project(volume.as_fd(), name)).transpose()?.flatten();
    match coracle_tree::remove_at(&base, Path::new(name)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        removed => removed?,
    }
    project.map_or(Ok(()), |id| project_quota::release_id(base.as_fd(), id))
}

/// Gives the volume to the pod's fsGroup, by the pod's fsGroupChangePolicy. The work runs on threads that namespaces
/// share, because a container can make the tree as large as the disk allows. The work ends if the pod is deleted, and
/// events report slow work.
pub(super) async fn give_to_group(target: &Target<'_>, volume: &str, path: &Path) -> Result<(), SetUpError> {
    let pod = target.pod;
    let Some(group) = ownership::fs_group(pod) else { return Ok(()) };
    let context = pod.spec.as_ref().and_then(|spec| spec.security_context.as_ref());
    let policy = context.and_then(|context| context.fs_group_change_policy.as_deref());
    if policy == Some("OnRootMismatch") && ownership::is_given(path, group) {
        return Ok(());
    }
    let (tree, processed) = (path.to_owned(), Arc::new(AtomicU64::new(0)));
    let counter = Arc::clone(&processed);
    let change = CHANGES.run(target.namespace, move |abandoned| {
        ownership::set_group_while(&tree, group, false, || {
            counter.fetch_add(1, Ordering::Relaxed);
            !abandoned.is_set()
        })
    });
    let place = format!("{}/volumes/{PLUGIN}/{volume}", target.uid);
    let given = reporting(change, |is_first| {
        let message = progress_message(&place, is_first, processed.load(Ordering::Relaxed));
        let recorder = &target.ctx.shared.recorder;
        recorder.pod(pod, Level::Warning, "VolumePermissionChangeInProgress", message);
    });
    let given = given.await;
    given.unwrap_or_else(Err).map_err(SetUpError::io("set the owner of", path))
}

/// Waits for a change, and calls `report` while the change takes long. The argument is true in the first call.
async fn reporting<T>(change: impl Future<Output = T>, report: impl Fn(bool)) -> T {
    let mut change = std::pin::pin!(change);
    let mut interval = FIRST_REPORT;
    loop {
        match tokio::time::timeout(interval, change.as_mut()).await {
            Ok(changed) => return changed,
            Err(_elapsed) => report(interval == FIRST_REPORT),
        }
        interval = NEXT_REPORT;
    }
}

/// The message of an event about a slow change. Source: `initiateOwnerChangeNotifications` and `logWarning`, v1.35.
fn progress_message(place: &str, is_first: bool, processed: u64) -> String {
    if is_first {
        return format!(
            "Setting volume ownership for {place} is taking longer than expected, consider using OnRootMismatch - \
             https://kubernetes.io/docs/tasks/configure-pod-container/security-context/\
             #configure-volume-permission-and-ownership-change-policy-for-pods"
        );
    }
    format!("Setting volume ownership for {place}, processed {processed} files.")
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use serde_json::json;

    use super::*;

    fn volume(name: &str, path: &Path, node: &str) -> PersistentVolume {
        serde_json::from_value(json!({"metadata": {"name": name, "labels": {NODE: node},
            "annotations": {PROVISIONED_BY: PROVISIONER}}, "spec": {"local": {"path": path}}}))
        .expect("volume")
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_change_of_the_owner_is_reported() {
        let reports = Mutex::new(Vec::new());
        let change = |seconds| async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            seconds
        };
        let report = |is_first| reports.lock().expect("lock").push(progress_message("u/v", is_first, 7));
        assert_eq!(reporting(change(29), report).await, 29);
        assert!(reports.lock().expect("lock").is_empty());
        reporting(change(151), report).await;
        let reports = reports.into_inner().expect("lock");
        assert!(reports[0].starts_with("Setting volume ownership for u/v is taking longer than expected,"));
        assert_eq!(reports[1..], ["Setting volume ownership for u/v, processed 7 files."; 2]);
    }

    #[test]
    fn a_provisioned_volume_is_made_once_below_a_private_base() {
        let dir = tempfile::tempdir().expect("directory");
        let base = dir.path().join("base");
        let path = mount(&base, "n", &volume("v", &base.join("v"), "n")).expect("mount");
        std::fs::write(path.join("file"), "data").expect("write");
        mount(&base, "n", &volume("v", &base.join("v"), "n")).expect("mount again");
        assert_eq!(std::fs::read_to_string(path.join("file")).expect("read"), "data");
        let mode = |path: &Path| std::fs::metadata(path).expect("metadata").permissions().mode() & 0o777;
        assert_eq!((mode(&base), mode(&path)), (0o700, 0o777));
        remove(&base, "v").expect("remove");
        remove(&base, "v").expect("remove again");
        assert!(!path.exists());
    }

    #[test]
    fn a_volume_has_the_size_of_its_object_on_a_file_system_with_project_quotas() {
        let dir = tempfile::tempdir().expect("directory");
        let Some(disk) = project_quota::tests::mount_with_quotas(dir.path()) else {
            coracle_testing::skip!("the kernel has no project quotas of ext4");
        };
        let base = disk.join("base");
        let sized = |name: &str, size: &str| {
            let mut volume = volume(name, &base.join(name), "n");
            let capacity = [("storage".to_owned(), serde_json::from_value(json!(size)).expect("size"))];
            volume.spec.get_or_insert_default().capacity = Some(capacity.into());
            volume
        };
        let [v, w] = ["v", "w"].map(|name| mount(&base, "n", &sized(name, "1Mi")).expect("mount"));
        // The capability exempts from quotas; containers do not have it.
        caps::drop(None, caps::CapSet::Effective, caps::Capability::CAP_SYS_RESOURCE).expect("capability");
        let write =
            |path: &Path, kibibytes: usize| std::fs::write(path.join("file"), vec![1; kibibytes << 10]);
        write(&v, 512).expect("less than the size");
        let full = write(&v, 2048).expect_err("more than the size").raw_os_error();
        assert_eq!(full, Some(libc::EDQUOT));
        write(&w, 512).expect("another volume has its own size");
        let project = |path: &Path, name: &str| {
            let opened = std::fs::File::open(path).expect("open");
            project_quota::project(opened.as_fd(), name).expect("project").expect("an id")
        };
        let (of_v, of_w) = (project(&v, "v"), project(&w, "w"));
        assert_ne!(of_v, of_w);
        resize(&base, "v", &sized("v", "4Mi")).expect("expand");
        write(&v, 2048).expect("the expanded volume has room");
        assert_eq!(
            (mount(&base, "n", &sized("v", "4Mi")).expect("mount again"), project(&v, "v")),
            (v.clone(), of_v)
        );
        let opened = std::fs::File::open(&base).expect("base");
        let usage = |id| project_quota::usage(opened.as_fd(), id).expect("usage");
        assert_eq!((usage(of_v).inodes, usage(of_v).limit), (2, 4 << 20));
        remove(&base, "v").expect("remove");
        assert_eq!(usage(of_v), project_quota::Usage::default(), "the id is given back");
        assert_eq!(usage(of_w).limit, 1 << 20);
        // A volume never gets the id of another volume, even if both have the same name.
        std::fs::create_dir(base.join("x")).expect("directory");
        let x = std::fs::File::open(base.join("x")).expect("open");
        project_quota::assign(x.as_fd(), "w", 1 << 20).expect("assign");
        assert_ne!(project(&base.join("x"), "w"), of_w);
    }

    #[test]
    fn a_directory_that_a_crash_left_unfinished_is_replaced_with_its_mode() {
        let dir = tempfile::tempdir().expect("directory");
        let base = dir.path().join("base");
        std::fs::create_dir_all(base.join(".new")).expect("left by a crash");
        std::fs::set_permissions(base.join(".new"), PermissionsExt::from_mode(0o700)).expect("chmod");
        let path = mount(&base, "n", &volume("v", &base.join("v"), "n")).expect("mount");
        assert_eq!(std::fs::metadata(path).expect("metadata").permissions().mode() & 0o777, 0o777);
        assert!(!base.join(".new").exists());
    }

    #[test]
    fn an_object_cannot_lead_to_another_directory_or_node() {
        let dir = tempfile::tempdir().expect("directory");
        let base = dir.path().join("base");
        for (name, path, node) in [
            ("v", base.join("other"), "n"),
            ("v", PathBuf::from("/etc"), "n"),
            ("..", base.join(".."), "n"),
            ("v", base.join("v"), "m"),
        ] {
            assert!(mount(&base, "n", &volume(name, &path, node)).is_err(), "{name} {path:?} {node}");
        }
    }

    #[test]
    fn links_are_never_followed() {
        let dir = tempfile::tempdir().expect("directory");
        let (base, outside) = (dir.path().join("base"), dir.path().join("outside"));
        std::fs::create_dir_all(&base).expect("base");
        std::fs::create_dir(&outside).expect("outside");
        std::fs::write(outside.join("file"), "x").expect("file");
        symlink(&outside, base.join("v")).expect("link");
        assert!(mount(&base, "n", &volume("v", &base.join("v"), "n")).is_err());
        remove(&base, "v").expect("remove the link");
        std::fs::create_dir(base.join("w")).expect("volume");
        symlink(&outside, base.join("w/link")).expect("link");
        remove(&base, "w").expect("remove");
        assert!(outside.join("file").exists() && !base.join("w").exists());
    }

    #[test]
    fn a_volume_of_an_administrator_must_exist() {
        let dir = tempfile::tempdir().expect("directory");
        let plain = |path: &Path| -> PersistentVolume {
            serde_json::from_value(json!({"metadata": {"name": "v"}, "spec": {"local": {"path": path}}}))
                .expect("volume")
        };
        assert!(mount(Path::new("/base"), "n", &plain(dir.path())).is_ok());
        assert!(mount(Path::new("/base"), "n", &plain(&dir.path().join("absent"))).is_err());
    }
}
