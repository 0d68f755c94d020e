//! Usage of the volumes of claims, for metrics.
//!
//! As in the kubelet, only volumes that may have a file system of their own are measured: local volumes and NFS
//! volumes. A server that does not answer blocks its reader in the kernel. So each volume is read in a thread of its
//! own, which the caller does not wait for. A volume with too many blocked readers is left out until a blocked reader
//! ends. No volume is read while all volumes together have too many blocked readers.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::StreamExt;
use k8s_openapi::api::core::v1::Pod;
use rustix::fs::statvfs;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};

use super::claim;

/// Time to wait for one volume.
const LIMIT: Duration = Duration::from_secs(2);
/// Time to wait for all volumes.
const LIMIT_OF_ALL: Duration = Duration::from_secs(5);
/// Volumes that are read at the same time for one caller.
const CONCURRENT: usize = 16;
/// Maximum readers of one volume. Several callers may read it at the same time.
const READERS: usize = 4;
/// Maximum readers of all volumes.
const ALL_READERS: usize = 64;
/// Stack of a reader in bytes.
const STACK: usize = 64 << 10;

/// Measures the volumes of claims. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ClaimUsage {
    /// `<state>/pods`.
    pods_dir: PathBuf,
    /// The number of readers of each volume.
    readers: Arc<Mutex<BTreeMap<PathBuf, usize>>>,
}

/// A claim by its namespace and name.
pub(crate) type ClaimName = (String, String);

/// Size and usage of a file system, in bytes and inodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FileSystem {
    pub(crate) capacity: u64,
    pub(crate) available: u64,
    pub(crate) used: u64,
    pub(crate) inodes: u64,
    pub(crate) inodes_free: u64,
    pub(crate) inodes_used: u64,
}

/// A reader of a volume. The reader counts until it is dropped.
struct Reader {
    usage: ClaimUsage,
    path: PathBuf,
}

// === impl ClaimUsage ===

impl ClaimUsage {
    /// Measures volumes of the pods in this directory.
    #[must_use]
    pub fn new(pods_dir: PathBuf) -> Self {
        Self { pods_dir, readers: Arc::default() }
    }

    /// The volumes of these pods' claims, each once. Volumes that do not answer in time are left out.
    pub(crate) async fn of(&self, pods: Vec<Arc<Pod>>) -> BTreeMap<ClaimName, FileSystem> {
        let pods_dir = self.pods_dir.clone();
        let found = coracle_threads::spawn_blocking(move || directories(&pods_dir, &pods));
        let directories = found.await.unwrap_or_default();
        let mut reads = futures::stream::iter(directories)
            .map(|(claim, path)| async move { Some((claim, self.read(path).await?)) })
            .buffer_unordered(CONCURRENT);
        let deadline = Instant::now() + LIMIT_OF_ALL;
        let mut all = BTreeMap::new();
        while let Ok(Some(read)) = timeout_at(deadline, reads.next()).await {
            all.extend(read);
        }
        all
    }

    async fn read(&self, path: PathBuf) -> Option<FileSystem> {
        let reader = self.reader(path)?;
        let (sender, receiver) = oneshot::channel();
        // This is not a thread of tokio's pool, because the end of the process must not wait for it.
        let thread = std::thread::Builder::new().name("volume-usage".to_owned()).stack_size(STACK);
        let spawned = thread.spawn(move || {
            // The caller may have stopped waiting.
            let _ = sender.send(FileSystem::at(&reader.path));
        });
        spawned.ok()?;
        timeout(LIMIT, receiver).await.ok()?.ok()?
    }

    /// Counts a reader of a volume, unless the volume or all volumes together have too many readers.
    fn reader(&self, path: PathBuf) -> Option<Reader> {
        let mut readers = self.lock();
        let count = readers.get(&path).copied().unwrap_or_default();
        if count >= READERS || readers.values().sum::<usize>() >= ALL_READERS {
            return None;
        }
        readers.insert(path.clone(), count + 1);
        drop(readers);
        Some(Reader { usage: self.clone(), path })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, usize>> {
        self.readers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let mut readers = self.usage.lock();
        let left = readers.get(&self.path).map_or(0, |count| count.saturating_sub(1));
        if left == 0 {
            readers.remove(&self.path);
        } else {
            readers.insert(self.path.clone(), left);
        }
    }
}

// === impl FileSystem ===

impl FileSystem {
    /// The file system of a path. The call blocks while the server of a network file system does not answer.
    pub(crate) fn at(path: &Path) -> Option<Self> {
        let found = statvfs(path).ok()?;
        let bytes = |blocks: u64| blocks.saturating_mul(found.f_frsize);
        Some(Self {
            capacity: bytes(found.f_blocks),
            available: bytes(found.f_bavail),
            used: bytes(found.f_blocks.saturating_sub(found.f_bfree)),
            inodes: found.f_files,
            inodes_free: found.f_ffree,
            inodes_used: found.f_files.saturating_sub(found.f_ffree),
        })
    }
}

/// The claims of these pods with the directories of their volumes.
fn directories(pods_dir: &Path, pods: &[Arc<Pod>]) -> BTreeMap<ClaimName, PathBuf> {
    let mut all = BTreeMap::new();
    for pod in pods {
        let namespace = pod.metadata.namespace.clone().unwrap_or_default();
        for volume in pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten()) {
            if let Some((claim, path)) = claim::measured(pods_dir, pod, volume) {
                all.insert((namespace.clone(), claim), path);
            }
        }
    }
    all
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn volumes_of_claims_are_measured_once_and_others_left_out() {
        let dir = tempfile::tempdir().unwrap();
        let record = |uid: &str, volume: &str, spec: serde_json::Value| {
            let claims = dir.path().join(uid).join("claims");
            std::fs::create_dir_all(&claims).unwrap();
            let object = json!({"metadata": {"name": "pv"}, "spec": spec}).to_string();
            std::fs::write(claims.join(format!("{volume}.json")), object).unwrap();
        };
        let local = json!({"local": {"path": dir.path()}});
        record("u1", "data", local.clone());
        record("u2", "data", local.clone());
        record("u1", "host", json!({"hostPath": {"path": "/"}}));
        record("u1", "gone", json!({"local": {"path": dir.path().join("gone")}}));
        record("u1", "unmounted", json!({"nfs": {"server": "s", "path": "/"}}));
        record("u1", "scratch", local);
        let claim = |name: &str| json!({"name": name, "persistentVolumeClaim": {"claimName": name}});
        let pod = |uid: &str, volumes: serde_json::Value| -> Arc<Pod> {
            let metadata = json!({"namespace": "n", "name": "p", "uid": uid});
            let spec = json!({"containers": [], "volumes": volumes});
            Arc::new(serde_json::from_value(json!({"metadata": metadata, "spec": spec})).unwrap())
        };
        let ephemeral = json!({"name": "scratch", "ephemeral": {}});
        let names = ["data", "host", "gone", "unmounted", "absent"].map(claim);
        let volumes: Vec<_> =
            names.into_iter().chain([ephemeral, json!({"name": "e", "emptyDir": {}})]).collect();
        let usage = ClaimUsage::new(dir.path().to_owned());
        let found = usage.of(vec![pod("u1", json!(volumes)), pod("u2", json!([claim("data")]))]).await;
        let claims: Vec<_> = found.keys().map(|(namespace, name)| format!("{namespace}/{name}")).collect();
        assert_eq!(claims, ["n/data", "n/p-scratch"]);
        let data = found[&("n".to_owned(), "data".to_owned())];
        assert!(
            data.capacity > 0 && data.used <= data.capacity && data.available <= data.capacity,
            "{data:?}"
        );
    }

    #[test]
    fn a_volume_has_a_limited_number_of_readers() {
        let usage = ClaimUsage::new(PathBuf::new());
        let mut readers: Vec<_> = (0..READERS).map(|_| usage.reader("/a".into()).unwrap()).collect();
        assert!(usage.reader("/a".into()).is_none() && usage.reader("/b".into()).is_some());
        readers.pop();
        assert!(usage.reader("/a".into()).is_some());
        drop(readers);
        assert!(usage.lock().is_empty());
    }

    #[test]
    fn all_volumes_together_have_a_limited_number_of_readers() {
        let usage = ClaimUsage::new(PathBuf::new());
        let reader = |number: usize| usage.reader(format!("/{number}").into());
        let mut readers: Vec<_> = (0..ALL_READERS).map(|number| reader(number).unwrap()).collect();
        assert!(reader(ALL_READERS).is_none());
        readers.pop();
        assert!(reader(ALL_READERS).is_some());
    }
}
