//! The caches that controllers share: one watch and one cache for each kind.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use coracle_watch::Config;
use kube::Client;

use crate::cache::Cache;
use crate::object::{
    CertificateSigningRequest, Claim, ClusterRole, ConfigMap, ControllerRevision, CronJob, DaemonSet,
    Deployment, EndpointSlice, Endpoints, HorizontalPodAutoscaler, IPAddress, Job, Lease, Namespace, Node,
    Object, PersistentVolume, Pod, PodDisruptionBudget, PodGroup, ReplicaSet, ReplicationController,
    ResourceClaim, ResourceQuota, ResourceSlice, Secret, Service, ServiceAccount, ServiceCIDR, StatefulSet,
    StorageClass, StorageVersionMigration, VolumeAttributesClass,
};
use crate::watch;

/// The name of the config map that carries the cluster's CA.
pub(crate) const ROOT_CA_NAME: &str = "kube-root-ca.crt";

/// The name of the config map with the cluster's address, for machines that join.
pub(crate) const CLUSTER_INFO_NAME: &str = "cluster-info";

/// All caches of this process.
pub(crate) struct Caches {
    pub(crate) pods: Arc<Cache<Pod>>,
    pub(crate) replica_sets: Arc<Cache<ReplicaSet>>,
    pub(crate) deployments: Arc<Cache<Deployment>>,
    pub(crate) jobs: Arc<Cache<Job>>,
    pub(crate) cron_jobs: Arc<Cache<CronJob>>,
    pub(crate) stateful_sets: Arc<Cache<StatefulSet>>,
    pub(crate) daemon_sets: Arc<Cache<DaemonSet>>,
    pub(crate) replication_controllers: Arc<Cache<ReplicationController>>,
    pub(crate) revisions: Arc<Cache<ControllerRevision>>,
    pub(crate) claims: Arc<Cache<Claim>>,
    pub(crate) volumes: Arc<Cache<PersistentVolume>>,
    pub(crate) storage_classes: Arc<Cache<StorageClass>>,
    pub(crate) nodes: Arc<Cache<Node>>,
    pub(crate) namespaces: Arc<Cache<Namespace>>,
    pub(crate) service_accounts: Arc<Cache<ServiceAccount>>,
    /// The config maps with the cluster's CA. [`Caches::synced`] does not wait for config maps and Secrets: an API
    /// server lists them only after their key management service has responded. The controllers that need all config
    /// maps or Secrets wait for [`Caches::synced_of`].
    pub(crate) root_cas: Arc<Cache<ConfigMap>>,
    pub(crate) services: Arc<Cache<Service>>,
    pub(crate) endpoints: Arc<Cache<Endpoints>>,
    pub(crate) endpoint_slices: Arc<Cache<EndpointSlice>>,
    pub(crate) signing_requests: Arc<Cache<CertificateSigningRequest>>,
    /// The leases of nodes.
    pub(crate) leases: Arc<Cache<Lease>>,
    /// The Secrets of bootstrap tokens.
    pub(crate) tokens: Arc<Cache<Secret>>,
    /// The Secrets for tokens of service accounts.
    pub(crate) account_tokens: Arc<Cache<Secret>>,
    /// The config maps named `cluster-info`.
    pub(crate) cluster_infos: Arc<Cache<ConfigMap>>,
    pub(crate) budgets: Arc<Cache<PodDisruptionBudget>>,
    pub(crate) cluster_roles: Arc<Cache<ClusterRole>>,
    pub(crate) service_cidrs: Arc<Cache<ServiceCIDR>>,
    pub(crate) ip_addresses: Arc<Cache<IPAddress>>,
    /// The resource claims. [`Caches::synced`] does not wait for them. The controller that creates and reserves claims
    /// waits itself. The other readers act on each claim when it arrives.
    pub(crate) resource_claims: Arc<Cache<ResourceClaim>>,
    /// The resource slices. [`Caches::synced`] does not wait for them: their first list queues the claims of tainted
    /// devices.
    pub(crate) resource_slices: Arc<Cache<ResourceSlice>>,
    /// The classes of volume attributes. [`Caches::synced`] does not wait for them, because servers of earlier versions
    /// do not have the kind.
    pub(crate) attributes_classes: Arc<Cache<VolumeAttributesClass>>,
    /// The pod autoscalers. [`Caches::synced`] does not wait for them. Only their own controller reads them, and it
    /// acts on each autoscaler when it arrives.
    pub(crate) autoscalers: Arc<Cache<HorizontalPodAutoscaler>>,
    /// The groups of pods. [`Caches::synced`] does not wait for them, for the same reasons as for `autoscalers`. The
    /// cache is empty if the API server does not serve the kind.
    pub(crate) pod_groups: Arc<Cache<PodGroup>>,
    /// The migrations of stored objects. [`Caches::synced`] does not wait for them, for the same reasons as for
    /// `autoscalers`. The cache is empty if the API server does not serve the kind.
    pub(crate) migrations: Arc<Cache<StorageVersionMigration>>,
    /// The resource quotas. Only the controller of quotas reads this cache. That controller acts on each quota when it
    /// arrives. The cache is empty if that controller does not run.
    pub(crate) resource_quotas: Arc<Cache<ResourceQuota>>,
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Caches {
    /// Creates empty caches.
    pub(crate) fn new() -> Self {
        Self {
            pods: Arc::new(Cache::new()),
            replica_sets: Arc::new(Cache::new()),
            deployments: Arc::new(Cache::new()),
            jobs: Arc::new(Cache::new()),
            cron_jobs: Arc::new(Cache::new()),
            stateful_sets: Arc::new(Cache::new()),
            daemon_sets: Arc::new(Cache::new()),
            replication_controllers: Arc::new(Cache::new()),
            revisions: Arc::new(Cache::new()),
            claims: Arc::new(Cache::new()),
            volumes: Arc::new(Cache::new()),
            storage_classes: Arc::new(Cache::new()),
            nodes: Arc::new(Cache::new()),
            namespaces: Arc::new(Cache::new()),
            service_accounts: Arc::new(Cache::new()),
            root_cas: Arc::new(Cache::new()),
            services: Arc::new(Cache::new()),
            endpoints: Arc::new(Cache::new()),
            endpoint_slices: Arc::new(Cache::new()),
            signing_requests: Arc::new(Cache::new()),
            leases: Arc::new(Cache::new()),
            tokens: Arc::new(Cache::new()),
            account_tokens: Arc::new(Cache::new()),
            cluster_infos: Arc::new(Cache::new()),
            budgets: Arc::new(Cache::new()),
            cluster_roles: Arc::new(Cache::new()),
            service_cidrs: Arc::new(Cache::new()),
            ip_addresses: Arc::new(Cache::new()),
            attributes_classes: Arc::new(Cache::new()),
            autoscalers: Arc::new(Cache::new()),
            pod_groups: Arc::new(Cache::new()),
            migrations: Arc::new(Cache::new()),
            resource_quotas: Arc::new(Cache::new()),
            resource_claims: Arc::new(Cache::new()),
            resource_slices: Arc::new(Cache::new()),
        }
    }

    /// The watches that feed the caches. Kinds that `--runtime-config` can turn off are watched only if they are
    /// served.
    pub(crate) fn watches(&self, client: &Client) -> Vec<Task> {
        let all = Config::control_plane;
        let root_ca = Config::control_plane().fields(&format!("metadata.name={ROOT_CA_NAME}"));
        let tokens = Config::control_plane().fields("type=bootstrap.kubernetes.io/token");
        let account_tokens = Config::control_plane().fields("type=kubernetes.io/service-account-token");
        let leases = Config::control_plane().fields("metadata.namespace=kube-node-lease");
        let cluster_info = Config::control_plane().fields(&format!("metadata.name={CLUSTER_INFO_NAME}"));
        vec![
            feed(client, &self.pods, all()),
            feed_if_served(client, &self.replica_sets),
            feed_if_served(client, &self.deployments),
            feed_if_served(client, &self.jobs),
            feed_if_served(client, &self.cron_jobs),
            feed_if_served(client, &self.stateful_sets),
            feed_if_served(client, &self.daemon_sets),
            feed_if_served(client, &self.replication_controllers),
            feed_if_served(client, &self.revisions),
            feed(client, &self.claims, all()),
            feed(client, &self.volumes, all()),
            feed_if_served(client, &self.storage_classes),
            feed(client, &self.nodes, all()),
            feed(client, &self.namespaces, all()),
            feed(client, &self.service_accounts, all()),
            feed(client, &self.root_cas, root_ca),
            feed(client, &self.services, all()),
            feed_if_served(client, &self.endpoints),
            feed_if_served(client, &self.endpoint_slices),
            feed_if_served(client, &self.signing_requests),
            feed(client, &self.leases, leases),
            feed(client, &self.tokens, tokens),
            feed(client, &self.account_tokens, account_tokens),
            feed(client, &self.cluster_infos, cluster_info),
            feed_if_served(client, &self.budgets),
            feed_if_served(client, &self.cluster_roles),
            feed_if_permitted(client, &self.service_cidrs),
            feed_if_permitted(client, &self.ip_addresses),
            feed_if_served(client, &self.attributes_classes),
            feed_if_served(client, &self.autoscalers),
            feed_if_served(client, &self.resource_claims),
            feed_if_served(client, &self.resource_slices),
            feed_if_enabled(client, &self.pod_groups),
            feed_if_enabled(client, &self.migrations),
        ]
    }

    /// The watch of the quotas. Only the controller of quotas needs it.
    pub(crate) fn watch_of_quotas(&self, client: &Client) -> Task {
        feed(client, &self.resource_quotas, Config::control_plane())
    }

    /// Returns once every cache of a served kind has its first list, except the caches that are documented otherwise.
    pub(crate) async fn synced(&self) {
        self.pods.synced().await;
        self.replica_sets.synced().await;
        self.deployments.synced().await;
        self.jobs.synced().await;
        self.cron_jobs.synced().await;
        self.stateful_sets.synced().await;
        self.daemon_sets.synced().await;
        self.replication_controllers.synced().await;
        self.revisions.synced().await;
        self.claims.synced().await;
        self.volumes.synced().await;
        self.storage_classes.synced().await;
        self.nodes.synced().await;
        self.namespaces.synced().await;
        self.service_accounts.synced().await;
        self.services.synced().await;
        self.endpoints.synced().await;
        self.endpoint_slices.synced().await;
        self.signing_requests.synced().await;
        self.leases.synced().await;
        self.budgets.synced().await;
        self.cluster_roles.synced().await;
        self.service_cidrs.synced().await;
        self.ip_addresses.synced().await;
    }

    /// Returns once the caches of config maps and Secrets have their first lists, if this controller needs all of their
    /// objects. Its workers wait before they take a key: the lists may come after the timeout of a reconcile.
    pub(crate) async fn synced_of(&self, controller: &str) {
        match controller {
            "root-ca" => self.root_cas.synced().await,
            "bootstrap-signer" => {
                self.tokens.synced().await;
                self.cluster_infos.synced().await;
            }
            _ => {}
        }
    }
}

fn feed<K: Object>(client: &Client, cache: &Arc<Cache<K>>, config: Config) -> Task {
    Box::pin(watch::feed(client.clone(), cache.clone(), config))
}

fn feed_if_enabled<K: Object>(client: &Client, cache: &Arc<Cache<K>>) -> Task {
    Box::pin(watch::feed_if_enabled(client.clone(), cache.clone(), Config::control_plane()))
}

fn feed_if_permitted<K: Object>(client: &Client, cache: &Arc<Cache<K>>) -> Task {
    Box::pin(watch::feed_if_permitted(client.clone(), cache.clone(), Config::control_plane()))
}

fn feed_if_served<K: Object>(client: &Client, cache: &Arc<Cache<K>>) -> Task {
    Box::pin(watch::feed_if_served(client.clone(), cache.clone(), Config::control_plane()))
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use super::*;

    #[tokio::test]
    async fn the_workers_of_a_controller_wait_for_its_own_caches() {
        let caches = Caches::new();
        caches.synced_of("deployment").await;
        let mut root_ca = pin!(caches.synced_of("root-ca"));
        assert!(futures::poll!(root_ca.as_mut()).is_pending());
        let mut signer = pin!(caches.synced_of("bootstrap-signer"));
        caches.tokens.set_unserved();
        assert!(futures::poll!(signer.as_mut()).is_pending());
        caches.cluster_infos.set_unserved();
        signer.await;
        caches.root_cas.set_unserved();
        root_ca.await;
    }
}
