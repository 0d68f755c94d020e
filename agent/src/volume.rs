//! Volumes of pods: created before a pod's containers, refreshed while it runs, removed after it.
//!
//! A pod's volumes are at the kubelet's paths, `<state>/pods/<uid>/volumes/<plugin>/<name>`. Each type of volume has
//! its own source file in `volume/`.
//!
//! The files of secrets, tokens and projected volumes are in memory: on one tmpfs for all pods, mounted on
//! `<run>/volumes`, with a symlink at the kubelet's path. Upstream mounts a tmpfs for each volume. Such a mount adds a
//! line to the host's mount table for every pod. On cgroup v1 the container library slows with the length of that
//! table. A container cannot fill the shared tmpfs, because these volumes are mounted read-only in containers
//! ([`Volumes::read_only`]). The files of one namespace get only a share of the tmpfs (`file_memory.rs`). Only
//! `emptyDir` with `medium: Memory`, to which pods write, gets a tmpfs of its own.
//!
//! [`mount_all`] is idempotent: pod sync calls it for a new pod and again after a failure. After the first success one
//! task for each pod rewrites files whose content changes in the API, and renews tokens. Each used object has one
//! watch, shared by its users; [`follow`] passes the pod's own labels, annotations and resources.

mod atomic;
mod claim;
pub mod downward;
mod empty_dir;
mod empty_dir_quota;
mod error;
pub(crate) mod file;
mod file_memory;
mod host_path;
mod local;
pub(crate) mod local_cleanup;
pub(crate) mod mount_options;
mod mounts;
pub mod nfs;
mod objects;
mod ownership;
mod payload;
mod refresh;
pub mod sub_path;
mod token;
mod usage;

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use coracle_cri::blocking::FileWork;
use k8s_openapi::api::core::v1::{Pod, Volume};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

use empty_dir_quota::EmptyDirQuota;
pub use error::{SetUpError, VolumeError};
pub use mounts::isolate_parts;
use ownership::make_parent;
pub(crate) use ownership::make_private;
use sub_path::MissingPart;
pub use usage::ClaimUsage;
pub(crate) use usage::{ClaimName, FileSystem};

use crate::api_health::ApiHealth;
use crate::config_cache::ConfigCache;
use crate::event_recorder::Recorder;
use crate::kubelet_metrics::{VolumeOperations, plugin};
use crate::node::{EvictionThresholds, MachineProperties};

/// Directories of volumes.
#[derive(Clone, Debug)]
pub struct VolumeConfig {
    /// `<state>/pods`, with one directory for each pod.
    pub pods_dir: PathBuf,
    /// Directory of content that must not reach a disk. A tmpfs is mounted on it.
    pub memory_dir: PathBuf,
    /// Directory of provisioned local volumes.
    pub local_dir: PathBuf,
    /// Thresholds of the node's disk. They limit `emptyDir` volumes.
    pub eviction: EvictionThresholds,
}

/// Removals of the volumes of pods. A container can make as many files as the disk has inodes.
static REMOVALS: FileWork = FileWork::new(32);

/// State that all volumes share; cheap to clone.
#[derive(Clone)]
pub struct VolumeContext {
    shared: Arc<Shared>,
}

struct Shared {
    config: VolumeConfig,
    client: kube::Client,
    health: ApiHealth,
    node: Arc<MachineProperties>,
    recorder: Recorder,
    objects: objects::Objects,
    tokens: token::Tokens,
    files: file_memory::FileMemory,
    empty_dirs: EmptyDirQuota,
    /// The refresh task of each pod, by uid.
    refreshing: Mutex<HashMap<String, refresh::Refreshing>>,
    operations: VolumeOperations,
}

/// Paths of one pod's volumes on the host.
#[derive(Clone, Debug, Default)]
pub struct Volumes {
    /// The volumes with their names. This is a list and not a map, because each running pod keeps a list, with few
    /// volumes.
    mounted: Vec<(String, Mounted)>,
}

#[derive(Clone, Debug, Default)]
struct Mounted {
    path: PathBuf,
    read_only: bool,
    /// Options of the volume for its mounts in containers, without `ro`.
    options: Vec<String>,
    /// Whether the files belong to the pod and may get its SELinux label.
    relabel: bool,
    /// Whether the node writes the files, into memory that all pods share.
    by_node: bool,
}

// === impl VolumeContext ===

impl VolumeContext {
    /// Prepares both directories. `pods_dir` becomes a shared mount, so that sandboxes see mounts that are added
    /// below it later.
    ///
    /// # Errors
    /// When a directory cannot be created or the tmpfs cannot be mounted.
    pub(crate) fn open(
        config: VolumeConfig,
        configs: ConfigCache,
        recorder: Recorder,
        node: Arc<MachineProperties>,
    ) -> Result<Self, VolumeError> {
        let prepared = |path: &Path| {
            let path = path.to_owned();
            move |source| VolumeError::Prepare { path, source }
        };
        mounts::ensure_shared(&config.pods_dir).map_err(prepared(&config.pods_dir))?;
        mounts::ensure_memory(&config.memory_dir).map_err(prepared(&config.memory_dir))?;
        let files = file_memory::FileMemory::new(&config.memory_dir, refresh::page_size());
        let shared = Shared {
            empty_dirs: EmptyDirQuota::open(&config.pods_dir, config.eviction),
            config,
            files,
            objects: objects::Objects::new(configs.client().clone(), configs.clone()),
            client: configs.client().clone(),
            health: configs.health().clone(),
            node,
            recorder,
            tokens: token::Tokens::new(configs.checkpoint().clone(), configs.health().clone()),
            refreshing: Mutex::default(),
            operations: VolumeOperations::default(),
        };
        Ok(VolumeContext { shared: Arc::new(shared) })
    }

    /// Allocatable resources of the node.
    pub(crate) fn allocatable(&self) -> &BTreeMap<String, Quantity> {
        &self.shared.node.allocatable
    }

    /// Durations of the operations on volumes.
    pub(crate) fn operations(&self) -> &VolumeOperations {
        &self.shared.operations
    }

    /// `<state>/pods`.
    pub(crate) fn pods_dir(&self) -> &Path {
        &self.shared.config.pods_dir
    }

    /// `<state>/pods/<uid>`.
    pub fn pod_dir(&self, uid: &str) -> PathBuf {
        self.shared.config.pods_dir.join(uid)
    }

    /// The directory of a pod's `emptyDir`.
    pub(crate) fn empty_dir(&self, uid: &str, volume: &str) -> PathBuf {
        self.pod_dir(uid).join("volumes").join(empty_dir::PLUGIN).join(volume)
    }

    /// Adapts the limit of all `emptyDir` volumes to the free space of the disk, in the background.
    pub(crate) fn limit_empty_dirs(&self) {
        if self.shared.empty_dirs.is_enforced() {
            let shared = Arc::clone(&self.shared);
            coracle_threads::spawn_blocking(move || shared.empty_dirs.adapt());
        }
    }

    fn memory_dir(&self, uid: &str) -> PathBuf {
        self.shared.config.memory_dir.join(uid)
    }

    /// The uids of all pods that have a directory or volumes here, desired or not.
    pub fn pods(&self) -> std::collections::BTreeSet<String> {
        let Shared { config, .. } = &*self.shared;
        [&config.pods_dir, &config.memory_dir].into_iter().flat_map(|dir| mounts::names(dir)).collect()
    }
}

// === impl Volumes ===

impl Volumes {
    /// Path of the volume on the host; None if the pod has no such volume.
    pub fn host_path(&self, volume: &str) -> Option<&Path> {
        self.find(volume).map(|mounted| mounted.path.as_path())
    }

    /// Whether containers get this volume read-only even if their mount is not read-only, as upstream does for volumes
    /// that the node writes.
    pub fn read_only(&self, volume: &str) -> bool {
        self.find(volume).is_some_and(|mounted| mounted.read_only)
    }

    /// Options of the volume for its mounts in containers. The options do not say whether the volume is read-only.
    pub fn mount_options(&self, volume: &str) -> &[String] {
        self.find(volume).map_or(&[][..], |mounted| mounted.options.as_slice())
    }

    /// Returns the replacement for a part that the volume does not have.
    pub fn missing_part(&self, volume: &str) -> MissingPart {
        match self.find(volume) {
            Some(Mounted { by_node: true, .. }) => MissingPart::EmptyDirectory,
            Some(Mounted { read_only: true, .. }) => MissingPart::Nothing,
            _ => MissingPart::NewDirectory,
        }
    }

    /// Whether the volume's files belong to the pod and may get its SELinux label. The rule is upstream's.
    pub fn relabel(&self, volume: &str) -> bool {
        self.find(volume).is_some_and(|mounted| mounted.relabel)
    }

    fn find(&self, volume: &str) -> Option<&Mounted> {
        self.mounted.iter().find(|(name, _)| name == volume).map(|(_, mounted)| mounted)
    }
}

/// Creates or updates all volumes of the pod, and keeps them up to date until [`unmount_all`].
///
/// # Errors
/// The error of the first volume that fails. Volumes created before it stay; the next call continues.
pub async fn mount_all(ctx: &VolumeContext, pod: &Pod) -> Result<Volumes, VolumeError> {
    let target = Target::new(ctx, pod)?;
    let mut volumes = Volumes::default();
    let (mut sources, mut waiting) = (Vec::new(), Vec::new());
    // The objects of all volumes are requested here, and awaited after the loop.
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        check_name(&volume.name)?;
        let (began, known) = (Instant::now(), sources.len());
        let mounted = match mount_persistent(&target, volume).await {
            Some(mounted) => mounted,
            None => mount(&target, volume, &mut sources),
        };
        if sources.len() > known {
            waiting.push((plugin(volume), began));
        } else if volume.image.is_none() {
            ctx.operations().mounted(plugin(volume), mounted.is_ok(), began.elapsed());
        }
        volumes.mounted.push((volume.name.clone(), mounted?));
    }
    let written = refresh::write(ctx, pod, sources).await;
    for (plugin, began) in waiting {
        ctx.operations().mounted(plugin, written.is_ok(), began.elapsed());
    }
    refresh::watch(ctx, pod, written?);
    volumes.mounted.shrink_to_fit();
    Ok(volumes)
}

/// Updates the files of the downward API to this version of the pod. Cheap if the files are up to date.
pub(crate) fn follow(ctx: &VolumeContext, pod: &Arc<Pod>) {
    refresh::follow(ctx, pod);
}

/// Stops refreshing and removes the pod's mounts and directories, including those that an earlier agent made. Succeeds
/// if the pod has no mounts and directories.
///
/// # Errors
/// When something cannot be removed. Another call continues.
pub async fn unmount_all(ctx: &VolumeContext, uid: &str) -> Result<(), VolumeError> {
    if uid.is_empty() || check_name(uid).is_err() {
        return Err(VolumeError::Name(uid.to_owned()));
    }
    let refreshing = lock(&ctx.shared.refreshing).remove(uid);
    if let Some(refreshing) = refreshing {
        refreshing.stop().await;
    }
    ctx.shared.tokens.remove_pod(uid);
    let dirs = [ctx.pod_dir(uid), ctx.memory_dir(uid)];
    let removed = REMOVALS.run(move || {
        // Both directories are removed even if the first removal fails. So the memory of the second directory is
        // released even if the disk has an error.
        let results = dirs.map(|path| {
            mounts::remove_pod_tree(&path).map_err(|source| VolumeError::Remove { path, source })
        });
        results.into_iter().collect::<Result<(), _>>()
    });
    removed.await.unwrap_or_else(|source| Err(VolumeError::Remove { path: ctx.pod_dir(uid), source }))?;
    ctx.shared.files.remove_pod(uid);
    Ok(())
}

/// Unmounts the mounts of [`VolumeContext::open`], for `coracle down`, after all pods are removed.
///
/// # Errors
/// When a mount is still in use.
pub fn close(config: &VolumeConfig) -> Result<(), VolumeError> {
    for path in [&config.pods_dir, &config.memory_dir] {
        mounts::unmount_below(path).map_err(|source| VolumeError::Remove { path: path.clone(), source })?;
    }
    Ok(())
}

/// The pod that a volume is made for.
struct Target<'a> {
    ctx: &'a VolumeContext,
    pod: &'a Pod,
    namespace: &'a str,
    uid: &'a str,
}

impl<'a> Target<'a> {
    fn new(ctx: &'a VolumeContext, pod: &'a Pod) -> Result<Self, VolumeError> {
        let some = |text: &'a Option<String>| {
            text.as_deref().filter(|t| !t.is_empty()).ok_or(VolumeError::NoIdentity)
        };
        let (uid, namespace) = (some(&pod.metadata.uid)?, some(&pod.metadata.namespace)?);
        check_name(uid)?;
        Ok(Target { ctx, pod, namespace, uid })
    }

    /// Path of a volume of this plugin in the pod's directory.
    fn volume_dir(&self, plugin: &str, name: &str) -> PathBuf {
        self.ctx.pod_dir(self.uid).join("volumes").join(plugin).join(name)
    }
}

/// Mounts a volume whose file system might not respond: a claim, an NFS export or a path of the host. None for other
/// volumes.
async fn mount_persistent(target: &Target<'_>, volume: &Volume) -> Option<Result<Mounted, VolumeError>> {
    if let Some(host) = &volume.host_path {
        let path = host_path::mount(host, &target.volume_dir(host_path::PLUGIN, &volume.name)).await;
        let mounted = path.map(|path| Mounted { path, ..Mounted::default() });
        return Some(mounted.map_err(|reason| VolumeError::SetUp { volume: volume.name.clone(), reason }));
    }
    let Some(source) = &volume.nfs else { return claim::mount(target, volume).await };
    let export = nfs::Export {
        server: source.server.clone(),
        path: source.path.clone(),
        read_only: source.read_only == Some(true),
        options: Vec::new(),
    };
    let path = target.volume_dir(nfs::PLUGIN, &volume.name);
    let mounted = nfs::mount(target.namespace, &export, &path).await;
    let mounted = mounted.map(|()| Mounted { path, read_only: export.read_only, ..Mounted::default() });
    Some(mounted.map_err(|reason| VolumeError::SetUp { volume: volume.name.clone(), reason }))
}

/// Runs work on a path in a blocking thread, because its file system might not respond. `place` is the kubelet's path
/// of the volume.
async fn run_blocking<T: Send + 'static>(
    place: &Path,
    path: &Path,
    work: impl FnOnce() -> Result<T, SetUpError> + Send + 'static,
) -> Result<T, SetUpError> {
    let done = coracle_cri::blocking::run(place, move |_abandoned| work()).await;
    done.unwrap_or_else(|source| Err(SetUpError::Blocked { path: path.to_owned(), source }))
}

fn mount(
    target: &Target<'_>,
    volume: &Volume,
    sources: &mut Vec<refresh::Source>,
) -> Result<Mounted, VolumeError> {
    let failed = |reason| VolumeError::SetUp { volume: volume.name.clone(), reason };
    if let Some(empty) = &volume.empty_dir {
        let path = empty_dir::mount(target, &volume.name, empty).map_err(failed)?;
        return Ok(Mounted { path, relabel: true, ..Mounted::default() });
    }
    if volume.image.is_some() {
        // The runtime mounts an image volume in each container.
        return Ok(Mounted { read_only: true, ..Mounted::default() });
    }
    let Some(projection) = payload::Projection::of(volume) else {
        return Err(VolumeError::Unsupported { volume: volume.name.clone(), kind: kind(volume) });
    };
    let source = refresh::Source::new(target, &volume.name, projection);
    let path = source.dir().to_owned();
    sources.push(source);
    Ok(Mounted { path, read_only: true, relabel: true, by_node: true, ..Mounted::default() })
}

/// The name of the field that is set in an unsupported volume.
fn kind(volume: &Volume) -> &'static str {
    let set = [
        (volume.projected.is_some(), "projected from a certificate source"),
        (volume.csi.is_some(), "csi"),
        (volume.iscsi.is_some(), "iscsi"),
        (volume.fc.is_some(), "fc"),
        (volume.rbd.is_some(), "rbd"),
        (volume.cephfs.is_some(), "cephfs"),
        (volume.glusterfs.is_some(), "glusterfs"),
        (volume.flex_volume.is_some(), "flexVolume"),
        (volume.aws_elastic_block_store.is_some(), "awsElasticBlockStore"),
        (volume.azure_disk.is_some(), "azureDisk"),
        (volume.azure_file.is_some(), "azureFile"),
        (volume.cinder.is_some(), "cinder"),
        (volume.flocker.is_some(), "flocker"),
        (volume.gce_persistent_disk.is_some(), "gcePersistentDisk"),
        (volume.git_repo.is_some(), "gitRepo"),
        (volume.photon_persistent_disk.is_some(), "photonPersistentDisk"),
        (volume.portworx_volume.is_some(), "portworxVolume"),
        (volume.quobyte.is_some(), "quobyte"),
        (volume.scale_io.is_some(), "scaleIO"),
        (volume.storageos.is_some(), "storageos"),
        (volume.vsphere_volume.is_some(), "vsphereVolume"),
    ];
    set.iter().find(|(is_set, _)| *is_set).map_or("of an unknown kind", |(_, name)| name)
}

/// Accepts only names of a single directory, so that no path leads out of its parent.
fn check_name(name: &str) -> Result<(), VolumeError> {
    let bad = name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']);
    if bad { Err(VolumeError::Name(name.to_owned())) } else { Ok(()) }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
