//! The shared state of all controllers.

use std::sync::{Arc, Mutex};

use ipnetwork::IpNetwork;
use kube::Client;
use serde_json::Value;

use crate::cache::Cache;
use crate::caches::Caches;
use crate::config::ControllersConfig;
use crate::object::{Deployment, Object, Pod, ReplicaSet};
use crate::state::daemon_backoff::PodBackoff;
use crate::state::deletions::Deletions;
use crate::state::failed_pods::FailedPods;
use crate::state::group_members::GroupMembers;
use crate::state::job_creations::JobCreations;
use crate::state::job_failures::JobFailures;
use crate::state::pod_counts::PodCounts;
use crate::state::pod_creations::PodCreations;
use crate::state::selector_index::SelectorIndex;
use crate::state::service_addresses::ServiceAddresses;
use crate::state::service_ports::ServicePorts;
use crate::state::volume_index::VolumeIndex;
use crate::state::zones::ZoneIndex;
use crate::write::Writer;
use coracle_events::{Event, Recorder};

/// Client, caches, event recorder and configuration.
pub(crate) struct Context {
    pub(crate) client: Client,
    pub(crate) caches: Caches,
    pub(crate) recorder: Recorder,
    pub(crate) config: ControllersConfig,
    /// The pod CIDRs that were assigned last.
    pub(crate) last_ranges: Mutex<Vec<IpNetwork>>,
    /// Failed pods of daemon sets by node.
    pub(crate) daemon_backoff: Mutex<PodBackoff>,
    /// Failed pods of stateful sets by name.
    pub(crate) stateful_backoff: Mutex<PodBackoff>,
    /// Pods of replica sets that failed soon after their creation.
    pub(crate) failed_pods: FailedPods,
    /// The rate of new pods of the jobs of each namespace.
    pub(crate) job_creations: JobCreations,
    /// The permits for requests that create pods.
    pub(crate) pod_creations: PodCreations,
    /// Failed pods of jobs.
    pub(crate) job_failures: JobFailures,
    /// Counts of the pods of replica sets.
    pub(crate) pod_counts: PodCounts,
    /// Unbound volumes and claims.
    pub(crate) volumes: Arc<VolumeIndex>,
    /// Active pods of groups.
    pub(crate) group_members: Arc<GroupMembers>,
    /// Selectors of services.
    pub(crate) selectors: Arc<SelectorIndex>,
    /// Addresses of services.
    pub(crate) service_addresses: Arc<ServiceAddresses>,
    /// Node ports of services.
    pub(crate) service_ports: Arc<ServicePorts>,
    /// Deletions of objects of kinds that no other controller watches.
    pub(crate) deletions: Arc<Deletions>,
    /// Processors of zones.
    pub(crate) zones: Arc<ZoneIndex>,
}

impl Context {
    /// The state before the first watch event.
    pub(crate) fn new(client: Client, recorder: Recorder, config: ControllersConfig) -> Self {
        Self {
            client,
            caches: Caches::new(),
            recorder,
            config,
            last_ranges: Mutex::default(),
            daemon_backoff: Mutex::default(),
            stateful_backoff: Mutex::default(),
            failed_pods: FailedPods::default(),
            job_creations: JobCreations::default(),
            pod_creations: PodCreations::default(),
            job_failures: JobFailures::default(),
            pod_counts: Default::default(),
            volumes: Arc::default(),
            group_members: Arc::default(),
            selectors: Arc::default(),
            service_addresses: Arc::default(),
            service_ports: Arc::default(),
            deletions: Arc::default(),
            zones: Arc::default(),
        }
    }

    /// Writes objects of the kind that this cache holds.
    pub(crate) fn writer<'a, K>(&'a self, cache: &'a Cache<K>) -> Writer<'a, K> {
        Writer { client: &self.client, cache }
    }

    /// Writes pods.
    pub(crate) fn pods(&self) -> Writer<'_, Pod> {
        self.writer(&self.caches.pods)
    }

    /// Writes replica sets.
    pub(crate) fn replica_sets(&self) -> Writer<'_, ReplicaSet> {
        self.writer(&self.caches.replica_sets)
    }

    /// Writes deployments.
    pub(crate) fn deployments(&self) -> Writer<'_, Deployment> {
        self.writer(&self.caches.deployments)
    }

    /// Records an event about an object.
    pub(crate) fn record<K: Object>(&self, about: &K, component: &'static str, event: Event) {
        self.recorder.record(about.object_reference(), component, event);
    }
}

impl<K: Object> Writer<'_, K> {
    /// Creates an object from JSON that the caller keeps.
    pub(crate) async fn create_in(self, namespace: &str, object: &Value) -> Result<Arc<K>, kube::Error> {
        self.create(namespace, object.clone()).await
    }
}
