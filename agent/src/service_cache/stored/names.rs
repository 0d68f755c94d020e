//! The names of all services in the checkpoint, with their addresses and ports. After a restart of the agent, cluster
//! DNS answers with them while the API server does not answer.
//!
//! Unlike other records, they belong to no pod: a pod may look up the services of every namespace. There is a record
//! for each namespace with services.

use std::collections::BTreeSet;
use std::sync::Arc;

use coracle_services::Tables;
use k8s_openapi::api::core::v1::{Service, ServicePort, ServiceSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use super::super::ServiceCache;
use super::{ENTRIES_MAX, MIN_STORE_INTERVAL, STORE_AFTER};
use crate::checkpoint::{Key, Kind};

// === impl ServiceCache ===

impl ServiceCache {
    /// Stores the names of services in changed namespaces, until dropped.
    pub(in crate::service_cache) async fn store_names(&self) {
        let mut progress = self.changes();
        if progress.wait_for(|progress| progress.listed).await.is_err() {
            return;
        }
        self.blocking(Self::store_all_names).await;
        loop {
            self.shared.unsaved_names.more.notified().await;
            tokio::time::sleep(STORE_AFTER).await;
            self.blocking(Self::store_changed_names).await;
            tokio::time::sleep(MIN_STORE_INTERVAL).await;
        }
    }

    /// Adds the stored names to the tables.
    pub(in crate::service_cache) async fn use_stored_names(&self) {
        let checkpoint = self.shared.checkpoint.clone();
        let read = coracle_threads::spawn_blocking(move || stored_names(&checkpoint)).await;
        let names = read.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
        self.write(|tables| tables.put_stored_names(names.into_iter().flatten().map(Arc::new)));
    }

    /// Stores the names of all namespaces after the first list, and removes the records of namespaces without services.
    /// A record with the same content is not written again. Blocks.
    pub(in crate::service_cache) fn store_all_names(&self) {
        let stored = stored_names(&self.shared.checkpoint);
        let stored = stored.iter().filter_map(|services| services.first()?.metadata.namespace.clone());
        let mut namespaces: BTreeSet<String> = stored.collect();
        self.read(|tables| {
            namespaces.extend(tables.services().filter_map(|service| service.metadata.namespace.clone()));
        });
        self.shared.unsaved_names.add(namespaces);
        self.store_changed_names();
    }

    /// Stores the names of changed namespaces. Blocks.
    fn store_changed_names(&self) {
        for namespace in self.shared.unsaved_names.take() {
            let names = self.read(|tables| names_of(tables, &namespace));
            let key = Key::service_names(&namespace);
            match names.is_empty() {
                false => self.shared.checkpoint.put(key, &names),
                true if self.shared.checkpoint.has(&key) => self.shared.checkpoint.remove(&key),
                true => {}
            }
        }
    }
}

/// The stored names of each namespace.
fn stored_names(checkpoint: &crate::checkpoint::Checkpoint) -> Vec<Vec<Service>> {
    checkpoint.all(Kind::ServiceNames)
}

/// The names of a namespace's services, up to the maximum.
fn names_of(tables: &Tables, namespace: &str) -> Vec<Service> {
    let (mut found, mut left) = (Vec::new(), ENTRIES_MAX);
    for service in tables.of(namespace) {
        let named = named(&service);
        let ports = named.spec.as_ref().and_then(|spec| spec.ports.as_ref()).map_or(0, Vec::len);
        let Some(rest) = left.checked_sub(1 + ports) else { continue };
        left = rest;
        found.push(named);
    }
    found
}

/// A service with the fields that its names need.
fn named(service: &Service) -> Service {
    let of_port = |port: &ServicePort| ServicePort {
        name: port.name.clone(),
        port: port.port,
        protocol: port.protocol.clone(),
        ..ServicePort::default()
    };
    let spec = service.spec.as_ref().map(|spec| ServiceSpec {
        type_: spec.type_.clone(),
        cluster_ip: spec.cluster_ip.clone(),
        cluster_ips: spec.cluster_ips.clone(),
        external_name: spec.external_name.clone(),
        ports: spec.ports.as_ref().map(|ports| ports.iter().map(of_port).collect()),
        ..ServiceSpec::default()
    });
    let metadata = ObjectMeta {
        namespace: service.metadata.namespace.clone(),
        name: service.metadata.name.clone(),
        ..ObjectMeta::default()
    };
    Service { metadata, spec, ..Service::default() }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_stored_names_of_a_namespace_have_a_maximum() {
        let service = |name: &str, ports: usize| -> Arc<Service> {
            let ports: Vec<_> = (1..=ports).map(|port| json!({"port": port})).collect();
            let value = json!({"metadata": {"namespace": "ns", "name": name}, "spec": {"ports": ports}});
            Arc::new(serde_json::from_value(value).unwrap())
        };
        let mut tables = Tables::default();
        tables.replace_services([service("a", 10), service("b", ENTRIES_MAX), service("c", 10)]);
        let names: Vec<_> =
            names_of(&tables, "ns").into_iter().filter_map(|service| service.metadata.name).collect();
        assert_eq!(names, ["a", "c"]);
    }
}
