//! The kinds that more than one controller looks at: one watch and one cache each.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use kube::Client;

use crate::cache::Cache;
use crate::object::{
    ConfigMap, Deployment, Endpoints, Namespace, Node, Object, Pod, ReplicaSet, Service, ServiceAccount,
};
use crate::watch;

/// The name of the config map that carries the cluster's CA.
pub(crate) const ROOT_CA_NAME: &str = "kube-root-ca.crt";

/// All caches of this process.
pub(crate) struct Caches {
    pub(crate) pods: Arc<Cache<Pod>>,
    pub(crate) replica_sets: Arc<Cache<ReplicaSet>>,
    pub(crate) deployments: Arc<Cache<Deployment>>,
    pub(crate) nodes: Arc<Cache<Node>>,
    pub(crate) namespaces: Arc<Cache<Namespace>>,
    pub(crate) service_accounts: Arc<Cache<ServiceAccount>>,
    /// Only those that carry the cluster's CA.
    pub(crate) root_cas: Arc<Cache<ConfigMap>>,
    pub(crate) services: Arc<Cache<Service>>,
    pub(crate) endpoints: Arc<Cache<Endpoints>>,
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Caches {
    /// Empty caches.
    pub(crate) fn new() -> Self {
        Self {
            pods: Arc::new(Cache::new()),
            replica_sets: Arc::new(Cache::new()),
            deployments: Arc::new(Cache::new()),
            nodes: Arc::new(Cache::new()),
            namespaces: Arc::new(Cache::new()),
            service_accounts: Arc::new(Cache::new()),
            root_cas: Arc::new(Cache::new()),
            services: Arc::new(Cache::new()),
            endpoints: Arc::new(Cache::new()),
        }
    }

    /// The watches that feed the caches.
    pub(crate) fn watches(&self, client: &Client) -> Vec<Task> {
        let all = watch::config;
        let root_ca = watch::config().fields(&format!("metadata.name={ROOT_CA_NAME}"));
        vec![
            feed(client, &self.pods, all()),
            feed(client, &self.replica_sets, all()),
            feed(client, &self.deployments, all()),
            feed(client, &self.nodes, all()),
            feed(client, &self.namespaces, all()),
            feed(client, &self.service_accounts, all()),
            feed(client, &self.root_cas, root_ca),
            feed(client, &self.services, all()),
            feed(client, &self.endpoints, all()),
        ]
    }

    /// Returns once every cache has its first list.
    pub(crate) async fn synced(&self) {
        self.pods.synced().await;
        self.replica_sets.synced().await;
        self.deployments.synced().await;
        self.nodes.synced().await;
        self.namespaces.synced().await;
        self.service_accounts.synced().await;
        self.root_cas.synced().await;
        self.services.synced().await;
        self.endpoints.synced().await;
    }
}

fn feed<K: Object>(client: &Client, cache: &Arc<Cache<K>>, config: kube::runtime::watcher::Config) -> Task {
    Box::pin(watch::feed(client.clone(), cache.clone(), config))
}
