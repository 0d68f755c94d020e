//! Resource usage of pods. A walk of a pod's directories measures its disk usage. The walk follows no link and enters
//! no mount. The pod's cgroup has its memory and process IDs.

use std::collections::HashMap;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_cri::background_walks::TimeLimit;
use coracle_cri::blocking::FileWork;
use coracle_proto::cri::{ContainerStats, ContainerStatsFilter, ListContainerStatsRequest, UInt64Value};
use k8s_openapi::api::core::v1::Pod;

use super::plan::{Disk, MeasuredPod, Usage, is_on_disk};
use crate::cgroup::PodUsage;
use crate::pod::NodeContext;
use crate::pod::config::POD_UID;
use crate::pod::config::files;
use crate::pod::config::sandbox::log_dir_name;

/// Maximum time to wait for the memory usage of a pod's containers. To answer, the runtime also measures their writable
/// layers, and the eviction must not wait for that.
const CONTAINERS_LIMIT: Duration = Duration::from_secs(1);

/// Maximum concurrent checks of pods with limits.
pub(super) const CHECKS: usize = 6;

/// Maximum concurrent measurements of pods because of a shortage.
pub(super) const RANKED: usize = 6;

/// Concurrent walks of the directories of pods: one for each check, and one for each measurement because of a shortage.
static WALKS: FileWork = FileWork::new(CHECKS + RANKED);

/// The directories of one pod.
pub(super) struct PodDirectories {
    logs: PathBuf,
    empty_dirs: Vec<(String, PathBuf)>,
    /// `/etc/hosts`, `/etc/resolv.conf` and `/etc/hostname`.
    shared: [PathBuf; 3],
    messages: PathBuf,
}

/// The usage of a writable layer with the name of its container. None if the runtime has not counted the layer yet.
pub(super) type Layer = (String, Option<Disk>);

/// The usage of one pod. Waits for counts of all its files. Absent directories count as empty.
pub(super) async fn of(node: &NodeContext, pod: &Arc<Pod>) -> Usage {
    let uid = pod.metadata.uid.as_deref().unwrap_or_default();
    let layers = layers(node, Some(uid)).await.remove(uid).unwrap_or_default();
    let directories = PodDirectories::of(node, pod, uid);
    let measured = WALKS.run(move || directories.measure(&layers, TimeLimit::NONE)).await;
    measured.ok().flatten().unwrap_or_default()
}

/// Sizes of writable layers from the runtime, by the uids of pods. `uid` restricts them to one pod. With `uid`, the
/// built-in runtime waits for recent counts. Without it, the runtime returns the last counts.
pub(super) async fn layers(node: &NodeContext, uid: Option<&str>) -> HashMap<String, Vec<Layer>> {
    let label_selector = uid.map(|uid| (POD_UID.to_owned(), uid.to_owned())).into_iter().collect();
    let filter = Some(ContainerStatsFilter { label_selector, ..ContainerStatsFilter::default() });
    match node.runtime.list_container_stats(ListContainerStatsRequest { filter }).await {
        Ok(listed) => by_pod(listed.stats),
        Err(status) => {
            tracing::warn!(uid, error = status.message(), "cannot measure the writable layers of containers");
            HashMap::new()
        }
    }
}

/// Memory and process IDs of pods. Pods without a cgroup are left out.
pub(super) async fn of_machine(node: &NodeContext, pods: &[Arc<Pod>]) -> Vec<MeasuredPod<PodUsage>> {
    let (cgroups, pods) = (node.cgroups.clone(), pods.to_vec());
    // A node may have hundreds of pods, so the files are read in a blocking thread.
    let read = coracle_threads::spawn_blocking(move || {
        let usages = pods.into_iter().filter_map(|pod| {
            let usage = cgroups.usage_of_pod(&pod)?;
            Some(MeasuredPod { pod, usage })
        });
        usages.collect::<Vec<_>>()
    });
    read.await.unwrap_or_default()
}

/// Memory of the containers of one pod by name, in bytes. Empty if the runtime does not answer in time.
pub(super) async fn memory_of_containers(node: &NodeContext, uid: &str) -> Vec<(String, u64)> {
    let label_selector = [(POD_UID.to_owned(), uid.to_owned())].into();
    let filter = Some(ContainerStatsFilter { label_selector, ..ContainerStatsFilter::default() });
    let listed = node.runtime.list_container_stats(ListContainerStatsRequest { filter });
    match tokio::time::timeout(CONTAINERS_LIMIT, listed).await {
        Ok(Ok(listed)) => listed.stats.into_iter().filter_map(named_memory).collect(),
        Ok(Err(status)) => {
            tracing::warn!(uid, error = status.message(), "cannot measure the memory of containers");
            Vec::new()
        }
        Err(_elapsed) => Vec::new(),
    }
}

fn named_memory(stats: ContainerStats) -> Option<(String, u64)> {
    let name = stats.attributes?.metadata?.name;
    Some((name, stats.memory?.working_set_bytes?.value))
}

fn by_pod(all: Vec<ContainerStats>) -> HashMap<String, Vec<Layer>> {
    let mut pods: HashMap<String, Vec<Layer>> = HashMap::new();
    let value = |value: Option<UInt64Value>| value.map_or(0, |value| value.value);
    for stats in all {
        let Some(attributes) = stats.attributes else { continue };
        let uid = attributes.labels.get(POD_UID).cloned();
        let (Some(uid), Some(metadata)) = (uid, attributes.metadata) else { continue };
        let layer = stats.writable_layer;
        let disk =
            layer.map(|layer| Disk { bytes: value(layer.used_bytes), inodes: value(layer.inodes_used) });
        pods.entry(uid).or_default().push((metadata.name, disk));
    }
    pods
}

// === impl PodDirectories ===

impl PodDirectories {
    pub(super) fn of(node: &NodeContext, pod: &Pod, uid: &str) -> Self {
        let dir = node.volumes.pod_dir(uid);
        let volumes = pod.spec.iter().flat_map(|spec| spec.volumes.iter().flatten());
        let empty_dirs = volumes.filter_map(|volume| {
            let empty = volume.empty_dir.as_ref()?;
            let path = node.volumes.empty_dir(uid, &volume.name);
            is_on_disk(empty.medium.as_deref()).then(|| (volume.name.clone(), path))
        });
        Self {
            logs: node.config.pod_log_dir.join(log_dir_name(pod)),
            empty_dirs: empty_dirs.collect(),
            shared: files::SHARED.map(|name| dir.join(name)),
            messages: dir.join("containers"),
        }
    }

    /// Counts the files. `layers` has the usage of the pod's writable layers. None if the time limit ended the count.
    pub(super) fn measure(&self, layers: &[Layer], limit: TimeLimit) -> Option<Usage> {
        let mut usage = Usage::default();
        for (name, layer) in layers {
            add(&mut usage.containers, name, layer.unwrap_or_default());
        }
        for name in names_in(&self.logs) {
            add(&mut usage.containers, &name, walk(&self.logs.join(&name), limit)?);
        }
        for (name, dir) in &self.empty_dirs {
            usage.empty_dirs.push((name.clone(), walk(dir, limit)?));
        }
        let messages = walk(&self.messages, limit)?;
        usage.own_files = self.shared.iter().map(|path| file(path)).fold(messages, Disk::plus);
        Some(usage)
    }
}

fn add(containers: &mut Vec<(String, Disk)>, name: &str, disk: Disk) {
    match containers.iter_mut().find(|(known, _)| known == name) {
        Some((_, known)) => *known = known.plus(disk),
        None => containers.push((name.to_owned(), disk)),
    }
}

/// Directories of the containers' logs. Only the node writes there.
fn names_in(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Bytes and inodes of a directory. None if the time limit ended the count.
fn walk(dir: &Path, limit: TimeLimit) -> Option<Disk> {
    match coracle_tree::usage_while(dir, || !limit.is_over()) {
        Ok(usage) => usage.map(|coracle_tree::Usage { bytes, inodes }| Disk { bytes, inodes }),
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                tracing::warn!(dir = %dir.display(), %error, "cannot measure a directory of a pod");
            }
            Some(Disk::default())
        }
    }
}

/// A single file; a link counts as itself.
fn file(path: &Path) -> Disk {
    let found = path.symlink_metadata().ok();
    found.map_or_else(Disk::default, |found| Disk { bytes: found.blocks() * 512, inodes: 1 })
}

#[cfg(test)]
mod tests {
    use coracle_proto::cri::{ContainerAttributes, ContainerMetadata, FilesystemUsage};

    use super::*;

    #[test]
    fn layers_belong_to_the_pods_of_their_containers() {
        let stats = |uid: &str, name: &str, bytes: u64| {
            let attributes = ContainerAttributes {
                metadata: Some(ContainerMetadata { name: name.to_owned(), ..ContainerMetadata::default() }),
                labels: [(POD_UID.to_owned(), uid.to_owned())].into(),
                ..ContainerAttributes::default()
            };
            let used_bytes = Some(UInt64Value { value: bytes });
            let layer = FilesystemUsage { used_bytes, ..FilesystemUsage::default() };
            ContainerStats {
                attributes: Some(attributes),
                writable_layer: Some(layer),
                ..ContainerStats::default()
            }
        };
        let uncounted = ContainerStats { writable_layer: None, ..stats("v", "b", 0) };
        let all = vec![
            stats("u", "a", 1),
            stats("v", "a", 2),
            stats("u", "b", 3),
            uncounted,
            ContainerStats::default(),
        ];
        let pods = by_pod(all);
        let of = |uid: &str| -> Vec<(&str, Option<u64>)> {
            pods[uid].iter().map(|(name, disk)| (name.as_str(), disk.map(|disk| disk.bytes))).collect()
        };
        assert_eq!(of("u"), [("a", Some(1)), ("b", Some(3))]);
        assert_eq!(of("v"), [("a", Some(2)), ("b", None)]);
    }

    #[test]
    fn logs_layers_volumes_shared_files_and_messages_count() {
        let dir = tempfile::tempdir().unwrap();
        let write = |path: &str, bytes: usize| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, vec![1; bytes]).unwrap();
        };
        write("logs/a/0.log", 1 << 20);
        write("volume/file", 2 << 20);
        write("etc-hosts", 3 << 20);
        write("etc-resolv.conf", 6 << 20);
        write("etc-hostname", 7 << 20);
        write("containers/a/0.message", 4 << 20);
        let directories = PodDirectories {
            logs: dir.path().join("logs"),
            empty_dirs: vec![
                ("v".to_owned(), dir.path().join("volume")),
                ("gone".to_owned(), dir.path().join("gone")),
            ],
            shared: files::SHARED.map(|name| dir.path().join(name)),
            messages: dir.path().join("containers"),
        };
        let layer = ("a".to_owned(), Some(Disk { bytes: 5 << 20, inodes: 1 }));
        let usage = directories.measure(&[layer], TimeLimit::NONE).unwrap();
        let mebibytes = |disk: Disk| disk.bytes >> 20;
        assert_eq!(mebibytes(usage.containers[0].1), 6);
        assert_eq!(mebibytes(usage.empty_dirs[0].1), 2);
        assert_eq!(usage.empty_dirs[1].1, Disk::default());
        assert_eq!(mebibytes(usage.own_files), 20);
        assert_eq!(mebibytes(usage.total()), 28);
    }
}
