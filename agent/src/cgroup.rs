//! The cgroup tree of the node's pods: QoS classes, pod cgroups, limits, removal.
//!
//! ```text
//! <root>/kubepods                      weight of the whole node
//! <root>/kubepods/pod<uid>             guaranteed pods
//! <root>/kubepods/burstable/pod<uid>   weight: the sum of what burstable pods request
//! <root>/kubepods/besteffort/pod<uid>  weight: the least that there is
//! ```
//! Containers sit one level below, made by the runtime. The tree is the kubelet's with its cgroupfs
//! driver, so that tools which know a kubelet's node know ours. Where systemd makes cgroups, each of these is a slice:
//! `kubepods-burstable-pod<uid>.slice`, the kubelet's names again.
//!
//! [`hierarchies`] finds the mount points and creates the directories (v1, hybrid and v2). [`mod@write`] writes the limits
//! and returns every error, because a pod must not run without its limits. [`tree`] removes cgroups with their children.

mod hierarchies;
mod limits;
pub mod qos;
pub mod resources;
mod tree;
mod write;

use std::collections::BTreeSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use coracle_cri::CgroupDriver;
use k8s_openapi::api::core::v1::Pod;

pub use qos::{QosClass, qos_class};
pub use resources::{Machine, container_resources};

use limits::Limits;
use tree::Tree;

/// What can go wrong with the cgroups of pods.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// No cgroup hierarchy is mounted.
    #[error("no cgroup hierarchy is mounted")]
    NoHierarchy,
    /// A cgroup could not be made.
    #[error("cannot make cgroup {path}")]
    Create {
        /// The cgroup, below the hierarchy's mount.
        path: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A limit could not be written.
    #[error("cannot write {value:?} to {path}")]
    Write {
        /// The cgroup file.
        path: PathBuf,
        /// What was to be in it.
        value: String,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// A cgroup could not be removed.
    #[error("cannot remove cgroup {path}")]
    Remove {
        /// The cgroup's directory.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// systemd did not make or remove a slice.
    #[error("the slice {slice}")]
    Slice {
        /// Its name.
        slice: String,
        /// Why.
        #[source]
        source: coracle_systemd::Error,
    },
    /// What was to be done was not.
    #[error("the thread for cgroups ended")]
    Interrupted(#[source] tokio::task::JoinError),
    /// The pod has no uid, so it has no cgroup.
    #[error("pod {0} has no uid")]
    NoUid(String),
}

/// A pod's cgroup path below each hierarchy's mount, as CRI's `cgroup_parent` wants it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupParent(pub String);

/// What the tree is built from.
#[derive(Clone, Debug)]
pub struct CgroupConfig {
    /// The cgroup that `kubepods` is made in, "/" as a rule.
    pub root: String,
    /// Who makes them.
    pub driver: CgroupDriver,
    /// Cores of the node, in thousandths: the weight of `kubepods`.
    pub cpu_millis: i64,
    /// Most processes of one pod, or no limit.
    pub pod_pids_limit: Option<i64>,
}

/// The pods' part of the cgroup tree. Functions that are not async block for some file writes, or calls of systemd.
#[derive(Clone, Debug)]
pub struct Cgroups {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    config: CgroupConfig,
    tree: Tree,
    /// The last weight written for the burstable class, so that nothing is written twice.
    burstable: Mutex<Option<i64>>,
}

// === impl Cgroups ===

impl Cgroups {
    /// Finds the hierarchies, names what is missing, and makes the QoS classes.
    pub fn open(config: CgroupConfig) -> Result<Cgroups, CgroupError> {
        let tree = Tree::open(&config.root, config.driver)?;
        let cgroups = Cgroups { shared: Arc::new(Shared { config, tree, burstable: Mutex::new(None) }) };
        cgroups.ensure_qos()?;
        Ok(cgroups)
    }

    /// Whether the limits are cgroup v2's.
    pub fn is_v2(&self) -> bool {
        self.shared.tree.is_v2()
    }

    /// Whether swap can be limited, which decides if a container's swap limit is passed at all.
    pub fn limits_swap(&self) -> bool {
        self.shared.tree.limits_swap()
    }

    /// Makes `kubepods` and the class cgroups with their weights.
    pub fn ensure_qos(&self) -> Result<(), CgroupError> {
        let Shared { config, tree, .. } = &*self.shared;
        let node = Limits { shares: Some(limits::shares(config.cpu_millis)), ..Limits::default() };
        tree.ensure("kubepods", &node)?;
        for class in ["kubepods/besteffort", "kubepods/burstable"] {
            tree.ensure(class, &Limits { shares: Some(limits::MIN_SHARES), ..Limits::default() })?;
        }
        Ok(())
    }

    /// Weighs the burstable class by what its pods request, in thousandths of a core; to be called when the set of
    /// pods changes.
    pub fn update_qos(&self, millis: i64) -> Result<(), CgroupError> {
        let mut last = self.shared.burstable.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if *last == Some(millis) {
            return Ok(());
        }
        let wanted = Limits { shares: Some(limits::shares(millis)), ..Limits::default() };
        self.shared.tree.ensure("kubepods/burstable", &wanted)?;
        *last = Some(millis);
        Ok(())
    }

    /// The cgroup that the pod's containers are to be made in.
    pub fn parent(&self, pod: &Pod) -> Result<CgroupParent, CgroupError> {
        Ok(CgroupParent(self.shared.tree.absolute(&pod_path(pod)?)))
    }

    /// Makes the pod's cgroup and sets its limits; a pod whose limits changed gets the new ones.
    pub async fn ensure_pod(&self, pod: &Pod) -> Result<CgroupParent, CgroupError> {
        let path = pod_path(pod)?;
        let mut wanted = limits::of_pod(pod);
        wanted.pids = self.shared.config.pod_pids_limit;
        let parent = CgroupParent(self.shared.tree.absolute(&path));
        self.beside(move |tree| tree.ensure(&path, &wanted)).await?;
        Ok(parent)
    }

    /// Removes the pod's cgroup and all below it, in whichever class it is; absent is success.
    ///
    /// A killed task leaves its cgroup a little later than it leaves the process table, so a busy
    /// cgroup is tried again for about a second before that is an error.
    pub async fn remove_pod(&self, uid: &str) -> Result<(), CgroupError> {
        const TRIES: u32 = 8;
        let mut pause = std::time::Duration::from_millis(5);
        for _ in 1..TRIES {
            if self.remove_once(uid).await.is_ok() {
                return Ok(());
            }
            tokio::time::sleep(pause).await;
            pause *= 2;
        }
        self.remove_once(uid).await
    }

    /// The uids of all pods that have a cgroup, wanted or not.
    pub fn pods(&self) -> BTreeSet<String> {
        CLASSES.iter().flat_map(|class| self.shared.tree.children(class)).filter_map(uid_of_dir).collect()
    }

    /// Removes the whole tree, for `coracle down`: everything in it has ended by then.
    pub async fn remove_all(&self) -> Result<(), CgroupError> {
        for uid in self.pods() {
            self.remove_pod(&uid).await?;
        }
        self.shared.tree.remove("kubepods")
    }

    async fn remove_once(&self, uid: &str) -> Result<(), CgroupError> {
        let paths = CLASSES.map(|class| format!("{class}/pod{uid}"));
        self.beside(move |tree| paths.map(|path| tree.remove(&path)).into_iter().collect()).await
    }

    /// Off the executor's threads what waits for systemd.
    async fn beside(
        &self,
        call: impl FnOnce(&Tree) -> Result<(), CgroupError> + Send + 'static,
    ) -> Result<(), CgroupError> {
        if !self.shared.tree.is_systemds() {
            return call(&self.shared.tree);
        }
        let shared = Arc::clone(&self.shared);
        let done = tokio::task::spawn_blocking(move || call(&shared.tree)).await;
        done.map_err(CgroupError::Interrupted)?
    }
}

const CLASSES: [&str; 3] = ["kubepods", "kubepods/burstable", "kubepods/besteffort"];

fn uid_of_dir(name: String) -> Option<String> {
    name.strip_prefix("pod").map(str::to_owned)
}

fn pod_path(pod: &Pod) -> Result<String, CgroupError> {
    let uid = pod.metadata.uid.as_deref().filter(|uid| !uid.is_empty());
    let uid = uid.ok_or_else(|| CgroupError::NoUid(pod.metadata.name.clone().unwrap_or_default()))?;
    Ok(match qos_class(pod) {
        QosClass::Guaranteed => format!("kubepods/pod{uid}"),
        QosClass::Burstable => format!("kubepods/burstable/pod{uid}"),
        QosClass::BestEffort => format!("kubepods/besteffort/pod{uid}"),
    })
}

#[cfg(test)]
mod tests;
