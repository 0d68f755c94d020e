//! The volumes of pods: made before a pod's containers, kept fresh while it lives, removed after it.
//!
//! A pod's volumes lie where a kubelet has them, `<state>/pods/<uid>/volumes/<plugin>/<name>`, a file a
//! kind below `volume/`. Secrets, tokens and what is projected beside them are kept in memory: all of
//! the node's on one tmpfs (`<run>/volumes`), with a symlink at the kubelet's place. A tmpfs for each, as
//! upstream mounts, costs a line of the host's mount table for every pod, and on cgroup v1 the container
//! library slows with the length of that table. The shared tmpfs cannot be filled by a pod, because
//! these volumes are mounted read-only in containers ([`Volumes::read_only`]). Only `emptyDir` with
//! `medium: Memory`, which pods write to, gets a mount of its own.
//!
//! [`mount_all`] is idempotent: pod sync calls it for a new pod and again after a failure. From the first success
//! on, one task a pod rewrites what changes in the API (a watch for each object that is used, shared by all its
//! users; the pod's own labels, annotations and resources by [`follow`]) and renews the tokens.

mod atomic;
pub mod downward;
mod empty_dir;
mod host_path;
mod mounts;
mod objects;
mod ownership;
mod payload;
mod refresh;
pub mod sub_path;
mod token;

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use k8s_openapi::api::core::v1::{Pod, Volume};

pub(crate) use ownership::make_private;

use crate::config_cache::ConfigCache;
use crate::node::NodeFacts;
use crate::pod::Recorder;

/// Where volumes lie and what they are filled from.
#[derive(Clone, Debug)]
pub struct VolumeConfig {
    /// `<state>/pods`, one directory a pod below it.
    pub pods_dir: PathBuf,
    /// What must never reach a disk; made a tmpfs when it is on none.
    pub memory_dir: PathBuf,
}

/// What mounting needs; cheap to clone.
#[derive(Clone)]
pub struct VolumeContext {
    shared: Arc<Shared>,
}

struct Shared {
    config: VolumeConfig,
    client: kube::Client,
    node: Arc<NodeFacts>,
    recorder: Recorder,
    objects: objects::Objects,
    tokens: token::Tokens,
    /// The refreshing task of each pod, by uid.
    refreshing: Mutex<HashMap<String, refresh::Refreshing>>,
}

/// Where one pod's volumes are on the host.
#[derive(Clone, Debug, Default)]
pub struct Volumes {
    mounted: BTreeMap<String, Mounted>,
}

#[derive(Clone, Debug)]
struct Mounted {
    path: PathBuf,
    read_only: bool,
}

/// Why a volume cannot be had now. Its text, through [`VolumeError::event`], is the event's.
#[derive(Debug, thiserror::Error)]
pub enum VolumeError {
    /// The pod has no uid or namespace yet.
    #[error("pod has no uid or no namespace")]
    NoIdentity,
    /// The name cannot be a directory's.
    #[error("volume name {0:?} is not allowed")]
    Name(String),
    /// A kind of volume that this node does not know.
    #[error(
        "MountVolume.SetUp failed for volume \"{volume}\" : volume type {kind} is not supported by this node"
    )]
    Unsupported {
        /// The volume.
        volume: String,
        /// Which field of the volume was set.
        kind: &'static str,
    },
    /// One volume could not be made.
    #[error("MountVolume.SetUp failed for volume \"{volume}\" : {reason}")]
    SetUp {
        /// The volume.
        volume: String,
        /// What of it.
        reason: SetUpError,
    },
    /// The host directory for all volumes could not be prepared.
    #[error("cannot prepare {path}")]
    Prepare {
        /// Where.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// What a pod left behind could not be removed.
    #[error("cannot remove {path}")]
    Remove {
        /// What.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

/// What went wrong with one volume, as the event for it says.
#[derive(Debug, thiserror::Error)]
pub enum SetUpError {
    /// The object is not there.
    #[error("{kind} {name:?} not found")]
    NotFound {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// The object has no such key.
    #[error("{}references non-existent {} key: {key}", if *kind == "secret" { "" } else { "configmap " }, if *kind == "secret" { "secret" } else { "config" })]
    NoKey {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// The key.
        key: String,
    },
    /// The API server gave no answer.
    #[error("failed to get {kind} {name:?}: {reason}")]
    Unavailable {
        /// `configmap` or `secret`.
        kind: &'static str,
        /// Its name.
        name: String,
        /// The whole chain of what the client said.
        reason: String,
    },
    /// No token was issued.
    #[error("failed to fetch token: {0}")]
    Token(String),
    /// A file path of an item leads out of the volume.
    #[error("invalid path {0:?}: must be relative and must not contain \"..\"")]
    Path(String),
    /// A field that the downward API does not have.
    #[error(transparent)]
    Field(#[from] downward::FieldError),
    /// The host path is not what the volume says.
    #[error("hostPath type check failed: {path} is not {wanted}")]
    HostPathType {
        /// Where.
        path: String,
        /// What it should be.
        wanted: &'static str,
    },
    /// The kernel refused.
    #[error("{what} {path}")]
    Io {
        /// The verb.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
}

// === impl VolumeError ===

impl VolumeError {
    /// The reason and message of the event that tells the user.
    pub fn event(&self) -> (&'static str, String) {
        ("FailedMount", coracle_error_chain::chain(self))
    }
}

// === impl SetUpError ===

impl SetUpError {
    fn io(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> SetUpError {
        let path = path.to_owned();
        move |source| SetUpError::Io { what, path, source }
    }
}

// === impl VolumeContext ===

impl VolumeContext {
    /// Prepares the two roots: `pods_dir` is made a shared mount, so that what is mounted below it later is
    /// seen by sandboxes which are already there.
    ///
    /// # Errors
    /// When a directory cannot be made or the tmpfs cannot be mounted.
    pub(crate) fn open(
        config: VolumeConfig,
        configs: ConfigCache,
        recorder: Recorder,
        node: Arc<NodeFacts>,
    ) -> Result<Self, VolumeError> {
        let prepared = |path: &Path| {
            let path = path.to_owned();
            move |source| VolumeError::Prepare { path, source }
        };
        mounts::ensure_shared(&config.pods_dir).map_err(prepared(&config.pods_dir))?;
        mounts::ensure_memory(&config.memory_dir).map_err(prepared(&config.memory_dir))?;
        let shared = Shared {
            config,
            objects: objects::Objects::new(configs.client().clone(), configs.clone()),
            client: configs.client().clone(),
            node,
            recorder,
            tokens: token::Tokens::new(configs.checkpoint().clone(), configs.health().clone()),
            refreshing: Mutex::default(),
        };
        Ok(VolumeContext { shared: Arc::new(shared) })
    }

    /// `<state>/pods/<uid>`.
    pub fn pod_dir(&self, uid: &str) -> PathBuf {
        self.shared.config.pods_dir.join(uid)
    }

    /// Where an `emptyDir` of a pod is.
    pub(crate) fn empty_dir(&self, uid: &str, volume: &str) -> PathBuf {
        self.pod_dir(uid).join("volumes").join(empty_dir::PLUGIN).join(volume)
    }

    fn memory_dir(&self, uid: &str) -> PathBuf {
        self.shared.config.memory_dir.join(uid)
    }

    /// The uids of all pods that have a directory or volumes here, wanted or not.
    pub fn pods(&self) -> std::collections::BTreeSet<String> {
        let Shared { config, .. } = &*self.shared;
        [&config.pods_dir, &config.memory_dir].into_iter().flat_map(|dir| mounts::names(dir)).collect()
    }
}

// === impl Volumes ===

impl Volumes {
    /// Where the volume is on the host; `None` for a name that the pod does not have.
    pub fn host_path(&self, volume: &str) -> Option<&Path> {
        self.mounted.get(volume).map(|mounted| mounted.path.as_path())
    }

    /// Whether containers get this volume read-only whatever their mount says, as upstream has it for
    /// all that is written by the node.
    pub fn read_only(&self, volume: &str) -> bool {
        self.mounted.get(volume).is_some_and(|mounted| mounted.read_only)
    }
}

/// Makes all of the pod's volumes, or brings them up to date, and keeps them so until [`unmount_all`].
///
/// # Errors
/// The first volume that cannot be had; those made before it stay and are taken up by the next call.
pub async fn mount_all(ctx: &VolumeContext, pod: &Pod) -> Result<Volumes, VolumeError> {
    let target = Target::new(ctx, pod)?;
    let mut volumes = Volumes::default();
    let mut sources = Vec::new();
    // All objects are asked for before the first is waited for.
    for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
        check_name(&volume.name)?;
        let mounted = mount(&target, volume, &mut sources)?;
        volumes.mounted.insert(volume.name.clone(), mounted);
    }
    for source in &sources {
        let failed = |reason| VolumeError::SetUp { volume: source.volume().to_owned(), reason };
        source.write(ctx, pod).await.map_err(failed)?;
    }
    refresh::watch(ctx, pod, sources);
    Ok(volumes)
}

/// Brings files of the downward API to the newest version of their pod; cheap when they have it already.
pub(crate) fn follow(ctx: &VolumeContext, pod: &Arc<Pod>) {
    refresh::follow(ctx, pod);
}

/// Stops refreshing and removes all that the pod had here: mounts first, also those that an earlier life
/// of the agent made, then directories. Absent is success.
///
/// # Errors
/// When something stays; calling again goes on from there.
pub async fn unmount_all(ctx: &VolumeContext, uid: &str) -> Result<(), VolumeError> {
    if uid.is_empty() || check_name(uid).is_err() {
        return Err(VolumeError::Name(uid.to_owned()));
    }
    let refreshing = lock(&ctx.shared.refreshing).remove(uid);
    if let Some(refreshing) = refreshing {
        refreshing.stop().await;
    }
    ctx.shared.tokens.forget(uid);
    let dirs = [ctx.pod_dir(uid), ctx.memory_dir(uid)];
    let removed = tokio::task::spawn_blocking(move || {
        dirs.into_iter().try_for_each(|path| {
            mounts::remove_tree(&path).map_err(|source| VolumeError::Remove { path, source })
        })
    });
    removed.await.unwrap_or(Ok(()))
}

/// Unmounts what [`VolumeContext::open`] mounted, for `coracle down`: no pod is left then.
///
/// # Errors
/// When a mount is still in use.
pub fn close(config: &VolumeConfig) -> Result<(), VolumeError> {
    for path in [&config.pods_dir, &config.memory_dir] {
        mounts::unmount_below(path).map_err(|source| VolumeError::Remove { path: path.clone(), source })?;
    }
    Ok(())
}

/// One pod's place, and who it is.
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

    /// Where a volume of this plugin lies in the pod's directory.
    fn volume_dir(&self, plugin: &str, name: &str) -> PathBuf {
        self.ctx.pod_dir(self.uid).join("volumes").join(plugin).join(name)
    }
}

fn mount(
    target: &Target<'_>,
    volume: &Volume,
    sources: &mut Vec<refresh::Source>,
) -> Result<Mounted, VolumeError> {
    let failed = |reason| VolumeError::SetUp { volume: volume.name.clone(), reason };
    if let Some(empty) = &volume.empty_dir {
        let path = empty_dir::mount(target, &volume.name, empty).map_err(failed)?;
        return Ok(Mounted { path, read_only: false });
    }
    if let Some(host) = &volume.host_path {
        let path = host_path::mount(host).map_err(failed)?;
        return Ok(Mounted { path, read_only: false });
    }
    if volume.image.is_some() {
        // The runtime mounts it, in each container for itself.
        return Ok(Mounted { path: PathBuf::new(), read_only: true });
    }
    let Some(projection) = payload::Projection::of(volume) else {
        return Err(VolumeError::Unsupported { volume: volume.name.clone(), kind: kind(volume) });
    };
    let source = refresh::Source::new(target, &volume.name, projection);
    let path = source.dir().to_owned();
    sources.push(source);
    Ok(Mounted { path, read_only: true })
}

/// The field that is set in a volume which is none of ours.
fn kind(volume: &Volume) -> &'static str {
    let set = [
        (volume.projected.is_some(), "projected from a certificate source"),
        (volume.persistent_volume_claim.is_some(), "persistentVolumeClaim"),
        (volume.csi.is_some(), "csi"),
        (volume.nfs.is_some(), "nfs"),
        (volume.ephemeral.is_some(), "ephemeral"),
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

/// A name that becomes one directory and no way out of its parent.
fn check_name(name: &str) -> Result<(), VolumeError> {
    let bad = name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']);
    if bad { Err(VolumeError::Name(name.to_owned())) } else { Ok(()) }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
