//! The state that handlers of the kubelet API read.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use futures::future::BoxFuture;
use k8s_openapi::api::core::v1::{Pod, PodStatus};
use k8s_openapi::jiff::Timestamp;

use super::access::Access;
use super::component_pages::ComponentPages;
use super::container_ends::ContainerEnds;
use super::log_watches::LogWatches;
use crate::cgroup::Cgroups;
use crate::config::Identity;
use crate::kubelet_metrics::KubeletMetrics;
use crate::node::{MachineProperties, PodNetwork};
use crate::runtime::{Runtime, Streams};
use crate::volume::ClaimUsage;

/// The pods of this node, from pod sync.
pub trait PodView: Send + Sync + 'static {
    /// All pods.
    fn pods(&self) -> Vec<Arc<Pod>>;

    /// The pod of this name.
    fn pod(&self, namespace: &str, name: &str) -> Option<Arc<Pod>> {
        let is = |pod: &Arc<Pod>| {
            pod.metadata.namespace.as_deref() == Some(namespace) && pod.metadata.name.as_deref() == Some(name)
        };
        self.pods().into_iter().find(is)
    }

    /// The number of pods that have not ended.
    fn active(&self) -> usize {
        self.pods().len()
    }

    /// The pods that end because their objects or manifests are gone. Pods that are not in [`pods`](Self::pods) are
    /// known from the runtime only.
    fn orphans(&self) -> HashSet<String> {
        HashSet::new()
    }

    /// Number of static pods that the node has rejected. They have no mirror pods.
    fn rejected_statics(&self) -> usize {
        0
    }

    /// The pod's status on this node, if the API server does not have it yet.
    fn status(&self, _uid: &str) -> Option<PodStatus> {
        None
    }

    /// Counts of the pods' probes in Prometheus' text format.
    fn probes(&self) -> String {
        String::new()
    }
}

/// Measurements of the disk usage of pods.
pub trait DiskUsageView: Send + Sync + 'static {
    /// The usage of these pods by their uids. A pod is left out while its first measurement is not complete.
    fn of<'a>(&'a self, pods: &'a [Arc<Pod>]) -> BoxFuture<'a, HashMap<String, PodDiskUsage>>;
}

/// The disk usage of one pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PodDiskUsage {
    /// Bytes on the disk.
    pub bytes: u64,
    /// Number of inodes.
    pub inodes: u64,
    /// The time of the measurement.
    pub time: Timestamp,
}

/// The state from which handlers make their responses.
#[derive(Clone)]
pub struct Backend {
    /// Pods.
    pub pods: Arc<dyn PodView>,
    /// Containers and images.
    pub runtime: Arc<dyn Runtime>,
    /// Exec, attach and port-forward.
    pub streams: Arc<dyn Streams>,
    /// Authentication and authorization.
    pub access: Arc<Access>,
    /// The agent's settings in the form of a KubeletConfiguration.
    pub configuration: Arc<serde_json::Value>,
    /// `/statusz` and `/flagz`.
    pub pages: Arc<ComponentPages>,
    /// Watches on the logs of containers.
    pub logs: Arc<LogWatches>,
    /// Ends of containers whose logs are followed.
    pub ends: Arc<ContainerEnds>,
    /// Counters and durations of the operations on this node.
    pub metrics: Arc<KubeletMetrics>,
    /// Usage of the volumes of claims.
    pub claims: ClaimUsage,
    /// Source of the node's certificates.
    pub identity: Identity,
    /// The network of pods.
    pub network: Option<PodNetwork>,
    /// Properties of the machine.
    pub properties: Arc<MachineProperties>,
    /// The state directory. Its file system is the node's file system (`nodefs`).
    pub state_dir: PathBuf,
    /// The directory of container logs, with a subdirectory for each pod.
    pub log_dir: PathBuf,
    /// Disk usage of pods. None if the disk usage is not measured.
    pub disk_usages: Option<Arc<dyn DiskUsageView>>,
    /// The cgroups of pods. None if the cgroups are not known.
    pub cgroups: Option<Cgroups>,
    /// Counters of cluster DNS, if this node serves it.
    pub dns: Option<Arc<coracle_dns::Metrics>>,
}
