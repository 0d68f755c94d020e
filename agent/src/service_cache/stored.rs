//! EndpointSlices in the checkpoint, from the namespaces of this node's pods. With them and the stored services, a node
//! can serve its pods after a boot while the API server does not answer.
//!
//! After a boot the pods of this node have other addresses. So the record of a slice names the pods of this node among
//! its endpoints. When the record is used, these endpoints get the current addresses of the pods.

mod names;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use coracle_services::{Conditions, EndpointSlice, Tables};
use coracle_values::object::{Key as ObjectKey, ObjectExt as _};
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};

use super::local_pods::LocalPods;
use super::{STORE_AFTER, ServiceCache};
use crate::checkpoint::Key;

/// Minimum time between two writes, so that pods of other nodes whose readiness changes often do not wear the disk.
const MIN_STORE_INTERVAL: Duration = Duration::from_secs(30);
/// Maximum slices, endpoints and ports that are stored for a namespace, counted together. A service that would exceed
/// the maximum is left out.
const ENTRIES_MAX: usize = 10_000;

/// The stored form of a slice.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct StoredSlice {
    /// The slice in the form of the API.
    slice: EndpointSlice,
    /// The uids of this node's pods among the endpoints, by the addresses that they had.
    pods: BTreeMap<IpAddr, String>,
}

/// Namespaces with changes that are not stored yet.
#[derive(Default)]
pub(super) struct Unsaved {
    namespaces: Mutex<BTreeSet<String>>,
    more: Notify,
}

// === impl StoredSlice ===

impl StoredSlice {
    fn of(slice: &EndpointSlice, pods: &LocalPods) -> Self {
        let (mut slice, mut own) = (slice.with_labels(), BTreeMap::new());
        for endpoint in &mut slice.endpoints {
            let pod = endpoint.address.and_then(|address| Some((address, pods.pod_at(address)?)));
            if let Some((address, uid)) = pod {
                // The node knows the readiness of its own pods.
                endpoint.conditions = Conditions::default();
                own.insert(address, uid.to_owned());
            }
        }
        Self { slice, pods: own }
    }

    /// The slice with the current addresses of this node's pods. Pods that have no address yet are left out.
    fn current(&self, pods: &LocalPods) -> Arc<EndpointSlice> {
        let mut slice = self.slice.clone();
        for endpoint in &mut slice.endpoints {
            let Some(address) = endpoint.address else { continue };
            endpoint.address = match self.pods.get(&address) {
                Some(uid) => pods.address_of(uid, address.is_ipv4()),
                // The endpoint is no pod of this node, because the record names the pods of this node. If a pod of this
                // node has the address now, the endpoint is left out.
                None => Some(address).filter(|address| pods.pod_at(*address).is_none()),
            };
        }
        slice.endpoints.retain(|endpoint| endpoint.address.is_some());
        slice.slim()
    }
}

// === impl Unsaved ===

impl Unsaved {
    pub(super) fn add(&self, namespaces: impl IntoIterator<Item = String>) {
        let mut all = self.namespaces.lock().unwrap_or_else(PoisonError::into_inner);
        let before = all.len();
        all.extend(namespaces);
        if all.len() > before {
            self.more.notify_one();
        }
    }

    fn take(&self) -> BTreeSet<String> {
        std::mem::take(&mut *self.namespaces.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

// === impl ServiceCache ===

impl ServiceCache {
    /// Whether the tables have services of an earlier run, because the API server did not answer after the start.
    pub(crate) fn has_stored(&self) -> watch::Receiver<bool> {
        self.shared.has_stored.subscribe()
    }

    /// Decides whether the service proxy programs the stored services. If so, a file marks its table. An unmarked table
    /// of an earlier run stays, because it has the services of all namespaces. Blocks.
    pub(crate) fn take_stored(&self, has_table: bool) -> bool {
        let mark = self.shared.checkpoint.stored_services_mark();
        if has_table && !mark.exists() {
            return false;
        }
        if let Err(error) = std::fs::write(&mark, "") {
            tracing::warn!(%error, mark = %mark.display(), "cannot mark the table of stored services");
        }
        coracle_fault::point("services.stored-marked");
        // The first lists may have been received since the caller's decision.
        if self.read(Tables::is_complete) {
            self.end_stored();
        }
        true
    }

    /// Removes the mark of a table of stored services after the first lists. Blocks.
    pub(super) fn end_stored(&self) {
        let mark = self.shared.checkpoint.stored_services_mark();
        if let Err(error) = coracle_tree::remove_file(&mark) {
            tracing::warn!(%error, mark = %mark.display(), "cannot remove the mark of stored services");
        }
        coracle_fault::point("services.stored-unmarked");
    }

    /// Stores the changed slices that are not stored yet. Blocks.
    pub(crate) fn store_changed_slices(&self) {
        // An incomplete list must not replace a record.
        if !self.read(Tables::is_complete) {
            return;
        }
        for namespace in self.shared.unsaved_slices.take() {
            let slices = self.read(|tables| slices_of(tables, &namespace));
            let pods = self.shared.local_pods.lock().unwrap_or_else(PoisonError::into_inner);
            let stored: Vec<StoredSlice> = slices.iter().map(|slice| StoredSlice::of(slice, &pods)).collect();
            drop(pods);
            self.shared.checkpoint.put(Key::slices(&namespace), &stored);
        }
    }

    /// Notes services whose slices have changed, if pods of this node are in their namespaces.
    pub(super) fn slices_changed(&self, services: &[ObjectKey]) {
        let namespaces: BTreeSet<&str> = services.iter().map(|key| key.namespace.as_str()).collect();
        let is_needed = |namespace: &&str| self.shared.checkpoint.is_needed(&Key::slices(namespace));
        self.shared.unsaved_slices.add(namespaces.into_iter().filter(is_needed).map(str::to_owned));
    }

    /// Notes that a namespace has its first pod on this node.
    pub(super) fn store_slices_once(&self, namespace: &str) {
        if !self.shared.checkpoint.has(&Key::slices(namespace)) {
            self.shared.unsaved_slices.add([namespace.to_owned()]);
        }
    }

    /// Stores changed slices, until dropped.
    pub(super) async fn store_slices(&self) {
        let mut progress = self.changes();
        if progress.wait_for(|progress| progress.listed && progress.slices_listed).await.is_err() {
            return;
        }
        self.blocking(Self::end_stored).await;
        loop {
            self.shared.unsaved_slices.more.notified().await;
            tokio::time::sleep(STORE_AFTER).await;
            self.blocking(Self::store_changed_slices).await;
            tokio::time::sleep(MIN_STORE_INTERVAL).await;
        }
    }

    async fn blocking(&self, work: fn(&Self)) {
        let cache = self.clone();
        let done = coracle_threads::spawn_blocking(move || work(&cache)).await;
        done.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
    }

    /// Adds stored slices to the tables, and follows the addresses of this node's pods until the first list.
    pub(super) fn use_stored_slices(&self, slices: Vec<StoredSlice>) {
        let pods = self.shared.local_pods.lock().unwrap_or_else(PoisonError::into_inner);
        *self.shared.stored_slices.lock().unwrap_or_else(PoisonError::into_inner) = slices;
        let changed = self.place_stored_slices(&pods);
        drop(pods);
        self.notify(&changed);
        self.shared.has_stored.send_replace(true);
    }

    /// Updates the stored slices in the tables after a change of this node's pods. Returns the services whose slices
    /// changed.
    pub(super) fn place_stored_slices(&self, pods: &LocalPods) -> Vec<ObjectKey> {
        let mut stored = self.shared.stored_slices.lock().unwrap_or_else(PoisonError::into_inner);
        if stored.is_empty() {
            return Vec::new();
        }
        if self.shared.progress.borrow().slices_listed {
            *stored = Vec::new();
            return Vec::new();
        }
        let current: Vec<Arc<EndpointSlice>> = stored.iter().map(|slice| slice.current(pods)).collect();
        self.write(|tables| tables.put_stored_slices(current)).into_iter().collect()
    }

    /// Ends the use of stored slices after the first list.
    pub(super) fn forget_stored_slices(&self) {
        *self.shared.stored_slices.lock().unwrap_or_else(PoisonError::into_inner) = Vec::new();
    }
}

/// The slices of a namespace's services, up to the maximum.
fn slices_of(tables: &Tables, namespace: &str) -> Vec<Arc<EndpointSlice>> {
    let (mut found, mut left) = (Vec::new(), ENTRIES_MAX);
    for service in tables.of(namespace) {
        let slices = tables.slices(&service.key());
        let count = slices.iter().map(|slice| 1 + slice.endpoints.len() + slice.ports.len()).sum();
        let Some(rest) = left.checked_sub(count) else { continue };
        left = rest;
        found.extend(slices);
    }
    found
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::Service;
    use serde_json::json;

    use super::super::LocalPod;
    use super::*;

    fn slice(name: &str, service: &str, endpoints: &[serde_json::Value]) -> Arc<EndpointSlice> {
        let labels = json!({"kubernetes.io/service-name": service});
        let value = json!({"metadata": {"namespace": "ns", "name": name, "labels": labels}, "addressType": "IPv4",
            "endpoints": endpoints, "ports": [{"port": 80}]});
        serde_json::from_value::<EndpointSlice>(value).unwrap().slim()
    }

    fn service(name: &str) -> Arc<Service> {
        Arc::new(serde_json::from_value(json!({"metadata": {"namespace": "ns", "name": name}})).unwrap())
    }

    fn put(pods: &mut LocalPods, uid: &str, address: &str) {
        let addresses = vec![address.parse().unwrap()];
        pods.put(&LocalPod { uid, addresses, is_ready: true, is_attached: true });
    }

    fn shown(slice: &EndpointSlice) -> Vec<(String, bool)> {
        let of = |endpoint: &coracle_services::Endpoint| {
            (endpoint.address.unwrap().to_string(), endpoint.conditions.is_ready())
        };
        slice.endpoints.iter().map(of).collect()
    }

    #[test]
    fn endpoints_of_this_nodes_pods_get_their_current_addresses() {
        let unready = json!({"ready": false});
        let slice = slice(
            "s",
            "web",
            &[
                json!({"addresses": ["10.42.0.2"], "conditions": unready}),
                json!({"addresses": ["10.42.0.3"]}),
                json!({"addresses": ["10.42.1.2"], "conditions": unready}),
                json!({"addresses": ["10.42.1.3"]}),
            ],
        );
        let mut before = LocalPods::default();
        put(&mut before, "one", "10.42.0.2");
        put(&mut before, "two", "10.42.0.3");
        let record = serde_json::to_vec(&StoredSlice::of(&slice, &before)).unwrap();
        let stored: StoredSlice = serde_json::from_slice(&record).unwrap();
        let far = [("10.42.1.2".to_owned(), false), ("10.42.1.3".to_owned(), true)];
        let mut now = LocalPods::default();
        assert_eq!(shown(&stored.current(&now)), far, "the pods have not started");
        // The pods have each other's former address.
        put(&mut now, "two", "10.42.0.2");
        put(&mut now, "one", "10.42.0.3");
        let own = [("10.42.0.3".to_owned(), true), ("10.42.0.2".to_owned(), true)];
        let current = stored.current(&now);
        assert_eq!(shown(&current), [own, far].concat());
        assert_eq!(current.service(), Some("web"));
        // This pod was no endpoint of the service.
        put(&mut now, "three", "10.42.1.3");
        assert_eq!(shown(&stored.current(&now)).len(), 3);
    }

    #[test]
    fn the_stored_endpoints_of_a_namespace_have_a_maximum() {
        let mut tables = Tables::default();
        tables.replace_services(["a", "b", "c", "d"].map(service));
        let endpoints = |of: usize, count: usize| -> Vec<serde_json::Value> {
            let address = |at: usize| format!("10.{of}.{}.{}", at / 250, at % 250 + 1);
            (0..count).map(|at| json!({"addresses": [address(at)]})).collect()
        };
        let mut all: Vec<_> =
            (0..11).map(|number| slice(&format!("a-{number}"), "a", &endpoints(number, 1000))).collect();
        all.push(slice("b", "b", &endpoints(20, 1000)));
        all.push(slice("c", "c", &endpoints(21, 1)));
        all.extend((0..5000).map(|number| slice(&format!("d-{number}"), "d", &[])));
        tables.replace_slices(all);
        let found = slices_of(&tables, "ns");
        let names: Vec<_> = found.iter().filter_map(|slice| slice.service()).collect();
        assert_eq!(names, ["b", "c"], "those with 11,000 endpoints and with 5,000 empty slices are left out");
    }
}
