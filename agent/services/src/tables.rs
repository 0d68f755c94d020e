//! Indexes of services by namespace, of slices by service, and of services by their addresses.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::net::IpAddr;
use std::sync::Arc;

use coracle_values::object::Key;
use k8s_openapi::api::core::v1::Service;

use crate::claims::Claims;
use crate::slice::EndpointSlice;

/// All services and slices.
#[derive(Debug, Default)]
pub struct Tables {
    services: HashMap<String, BTreeMap<String, Arc<Service>>>,
    slices: HashMap<Key, BTreeMap<String, Arc<EndpointSlice>>>,
    /// The service of each slice.
    service_of: HashMap<Key, Key>,
    /// The services of each cluster IP.
    by_cluster_ip: Claims,
    /// The services of each endpoint address. Each endpoint of a slice adds one claim.
    by_endpoint: Claims,
    /// Addresses of this node's pods that are not ready.
    unready: HashSet<IpAddr>,
    /// Services of an earlier run of which only the names, addresses and ports are known. Empty after the first list.
    stored_names: HashMap<Key, Arc<Service>>,
    /// The names of all namespaces. `None` before their first list.
    namespaces: Option<HashSet<String>>,
    /// Whether all services were listed once.
    services_listed: bool,
    /// Whether all slices were listed once.
    slices_listed: bool,
}

/// A service with its slices.
#[derive(Clone, Debug, PartialEq)]
pub struct ServiceState {
    /// The service.
    pub service: Arc<Service>,
    /// Its slices.
    pub slices: Vec<Arc<EndpointSlice>>,
}

/// The cluster IPs of a service.
pub fn cluster_ips(service: &Service) -> impl Iterator<Item = IpAddr> {
    let spec = service.spec.as_ref();
    let first = spec.and_then(|spec| spec.cluster_ip.as_deref());
    let all = spec.and_then(|spec| spec.cluster_ips.as_deref()).unwrap_or_default();
    let first = first.filter(|_| all.is_empty());
    let external = spec.and_then(|spec| spec.type_.as_deref()) == Some("ExternalName");
    let all = all.iter().map(String::as_str).chain(first).filter(move |_| !external);
    all.filter_map(|address| address.parse().ok())
}

/// Whether the readiness of pods decides which endpoints of the service take traffic. This requires a selector and no
/// `publishNotReadyAddresses`. For other services only the slices decide.
fn follows_readiness(service: &Service) -> bool {
    let spec = service.spec.as_ref();
    spec.is_some_and(|spec| {
        let selects = spec.selector.as_ref().is_some_and(|selector| !selector.is_empty());
        selects && spec.publish_not_ready_addresses != Some(true)
    })
}

/// Whether a service is headless: its `clusterIP` is `None`.
#[must_use]
pub fn is_headless(service: &Service) -> bool {
    service.spec.as_ref().is_some_and(|spec| spec.cluster_ip.as_deref() == Some("None"))
}

// === impl Tables ===

impl Tables {
    /// Whether all services and slices were listed once. Until then, services may be missing in the tables.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.services_listed && self.slices_listed
    }

    /// The services of a namespace by name.
    #[must_use]
    pub fn of(&self, namespace: &str) -> Vec<Arc<Service>> {
        self.services.get(namespace).into_iter().flat_map(BTreeMap::values).cloned().collect()
    }

    /// The service of this name.
    #[must_use]
    pub fn get(&self, namespace: &str, name: &str) -> Option<&Arc<Service>> {
        self.services.get(namespace)?.get(name)
    }

    /// The service of this name for DNS. Before the first list, it may be a service of which only the name, the
    /// addresses and the ports are known.
    #[must_use]
    pub fn named(&self, namespace: &str, name: &str) -> Option<&Arc<Service>> {
        self.get(namespace, name).or_else(|| self.stored_names.get(&Key::new(namespace, name)))
    }

    /// Whether a namespace is known to exist: it was listed, or it has a service.
    #[must_use]
    pub fn has_namespace(&self, namespace: &str) -> bool {
        let is_listed = self.namespaces.as_ref().is_some_and(|all| all.contains(namespace));
        is_listed || self.services.contains_key(namespace)
    }

    /// Whether a namespace is known not to exist. False for all namespaces before their first list.
    #[must_use]
    pub fn lacks_namespace(&self, namespace: &str) -> bool {
        self.namespaces.is_some() && !self.has_namespace(namespace)
    }

    /// Replaces the names of all namespaces.
    pub fn replace_namespaces(&mut self, all: HashSet<String>) {
        self.namespaces = Some(all);
    }

    /// Adds a namespace, if the namespaces were listed.
    pub fn put_namespace(&mut self, name: String) {
        if let Some(all) = &mut self.namespaces {
            all.insert(name);
        }
    }

    /// Removes a namespace.
    pub fn remove_namespace(&mut self, name: &str) {
        if let Some(all) = &mut self.namespaces {
            all.remove(name);
        }
    }

    /// The slices of a service. Endpoints that [`set_ready`](Self::set_ready) has marked as not ready take no traffic.
    #[must_use]
    pub fn slices(&self, service: &Key) -> Vec<Arc<EndpointSlice>> {
        let all = self.slices.get(service).into_iter().flat_map(BTreeMap::values);
        if self.unready.is_empty() || !self.follows_readiness(service) {
            return all.cloned().collect();
        }
        let is_unready = |address: IpAddr| self.unready.contains(&address);
        let current = |slice: &Arc<EndpointSlice>| match slice.serves(is_unready) {
            true => Arc::new(slice.without(is_unready)),
            false => Arc::clone(slice),
        };
        all.map(current).collect()
    }

    /// The slices of a service as they are listed. These slices do not reflect [`unready_of`](Self::unready_of).
    pub fn listed_slices<'a>(
        &'a self,
        service: &Key,
    ) -> impl Iterator<Item = &'a Arc<EndpointSlice>> + use<'a> {
        self.slices.get(service).into_iter().flat_map(BTreeMap::values)
    }

    /// The addresses that take no traffic as endpoints of the service, because [`set_ready`](Self::set_ready) has
    /// marked them as not ready. `None` if there are no such addresses, or if only the slices decide.
    #[must_use]
    pub fn unready_of(&self, service: &Key) -> Option<&HashSet<IpAddr>> {
        let is_used = !self.unready.is_empty() && self.follows_readiness(service);
        is_used.then_some(&self.unready)
    }

    /// Records whether the pod of this node with the address is ready. For an address without a record the slices
    /// decide. Returns the services whose endpoints change.
    pub fn set_ready(&mut self, address: IpAddr, is_ready: bool) -> Vec<Key> {
        let is_changed = if is_ready { self.unready.remove(&address) } else { self.unready.insert(address) };
        if !is_changed {
            return Vec::new();
        }
        let serves = |service: &&Key| {
            let mut slices = self.slices.get(*service).into_iter().flat_map(BTreeMap::values);
            self.follows_readiness(service) && slices.any(|slice| slice.serves(|other| other == address))
        };
        self.by_endpoint.claimants(address).filter(serves).cloned().collect()
    }

    fn follows_readiness(&self, service: &Key) -> bool {
        self.get(&service.namespace, &service.name).is_some_and(|service| follows_readiness(service))
    }

    /// The services with this cluster IP.
    pub fn with_cluster_ip(&self, address: IpAddr) -> impl Iterator<Item = &Key> {
        self.by_cluster_ip.claimants(address)
    }

    /// The services with this endpoint.
    pub fn with_endpoint(&self, address: IpAddr) -> impl Iterator<Item = &Key> {
        self.by_endpoint.claimants(address)
    }

    /// All services.
    pub fn services(&self) -> impl Iterator<Item = &Arc<Service>> {
        self.services.values().flat_map(BTreeMap::values)
    }

    /// All slices.
    pub fn all_slices(&self) -> impl Iterator<Item = &Arc<EndpointSlice>> {
        self.slices.values().flat_map(BTreeMap::values)
    }

    /// Adds or replaces a service. Returns its key.
    pub fn put_service(&mut self, service: Arc<Service>) -> Option<Key> {
        let key = key_of(&service.metadata)?;
        self.remove_service(&key);
        let shared = Arc::new(key.clone());
        cluster_ips(&service).for_each(|address| self.by_cluster_ip.add(address, &shared));
        self.services.entry(key.namespace.clone()).or_default().insert(key.name.clone(), service);
        Some(key)
    }

    /// Removes a service.
    pub fn remove_service(&mut self, key: &Key) -> Option<Arc<Service>> {
        let services = self.services.get_mut(&key.namespace)?;
        let service = services.remove(&key.name)?;
        if services.is_empty() {
            self.services.remove(&key.namespace);
        }
        cluster_ips(&service).for_each(|address| self.by_cluster_ip.remove(address, key));
        Some(service)
    }

    /// Adds or replaces a slice. Returns the services whose slices changed: the slice's service, and its former service
    /// if that differs.
    pub fn put_slice(&mut self, slice: Arc<EndpointSlice>) -> Vec<Key> {
        let Some(key) = key_of(&slice.metadata) else { return Vec::new() };
        let mut changed: Vec<Key> = self.remove_slice(&key).into_iter().collect();
        let Some(service) = slice.service().map(|name| Key::new(&key.namespace, name)) else {
            return changed;
        };
        let shared = Arc::new(service.clone());
        for address in slice.endpoints.iter().filter_map(|endpoint| endpoint.address) {
            self.by_endpoint.add(address, &shared);
        }
        self.service_of.insert(key.clone(), service.clone());
        self.slices.entry(service.clone()).or_default().insert(key.name, slice);
        if !changed.contains(&service) {
            changed.push(service);
        }
        changed
    }

    /// Removes a slice. Returns its service.
    pub fn remove_slice(&mut self, key: &Key) -> Option<Key> {
        let service = self.service_of.remove(key)?;
        let slices = self.slices.get_mut(&service)?;
        let slice = slices.remove(&key.name)?;
        if slices.is_empty() {
            self.slices.remove(&service);
        }
        for address in slice.endpoints.iter().filter_map(|endpoint| endpoint.address) {
            self.by_endpoint.remove(address, &service);
        }
        Some(service)
    }

    /// Adds the stored services of an earlier run, unless a list of services was received. The first list replaces
    /// them.
    pub fn put_stored(&mut self, all: impl IntoIterator<Item = Arc<Service>>) {
        if !self.services_listed {
            all.into_iter().for_each(|service| drop(self.put_service(service)));
        }
    }

    /// Adds the stored names of services of an earlier run, unless a list of services was received. The first list
    /// removes them. Only [`named`](Self::named) returns them: the service proxy cannot serve them, because their
    /// endpoints are not known.
    pub fn put_stored_names(&mut self, all: impl IntoIterator<Item = Arc<Service>>) {
        if !self.services_listed {
            let keyed = all.into_iter().filter_map(|service| Some((key_of(&service.metadata)?, service)));
            self.stored_names.extend(keyed);
        }
    }

    /// Adds or replaces stored slices of an earlier run, unless a list of slices was received. The first list replaces
    /// them. Returns the services whose slices changed.
    pub fn put_stored_slices(&mut self, all: impl IntoIterator<Item = Arc<EndpointSlice>>) -> BTreeSet<Key> {
        let mut changed = BTreeSet::new();
        if self.slices_listed {
            return changed;
        }
        for slice in all {
            let key = key_of(&slice.metadata);
            if key.is_some_and(|key| self.known_slice(&key) != Some(&slice)) {
                changed.extend(self.put_slice(slice));
            }
        }
        changed
    }

    /// Replaces all services. Returns the changed services.
    pub fn replace_services(&mut self, all: impl IntoIterator<Item = Arc<Service>>) -> Vec<Key> {
        self.services_listed = true;
        self.stored_names = HashMap::new();
        let mut absent: BTreeSet<Key> =
            self.services().filter_map(|service| key_of(&service.metadata)).collect();
        let mut changed = Vec::new();
        for service in all {
            let Some(key) = key_of(&service.metadata) else { continue };
            absent.remove(&key);
            if self.get(&key.namespace, &key.name) != Some(&service) {
                changed.extend(self.put_service(service));
            }
        }
        for key in absent {
            self.remove_service(&key);
            changed.push(key);
        }
        changed
    }

    /// Replaces all slices. Returns the services whose slices changed.
    pub fn replace_slices(&mut self, all: impl IntoIterator<Item = Arc<EndpointSlice>>) -> BTreeSet<Key> {
        self.slices_listed = true;
        let mut absent: BTreeSet<Key> = self.service_of.keys().cloned().collect();
        let mut changed = BTreeSet::new();
        for slice in all {
            let Some(key) = key_of(&slice.metadata) else { continue };
            absent.remove(&key);
            if self.known_slice(&key) != Some(&slice) {
                changed.extend(self.put_slice(slice));
            }
        }
        changed.extend(absent.iter().filter_map(|key| self.remove_slice(key)));
        changed
    }

    fn known_slice(&self, key: &Key) -> Option<&Arc<EndpointSlice>> {
        self.slices.get(self.service_of.get(key)?)?.get(&key.name)
    }
}

fn key_of(meta: &k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta) -> Option<Key> {
    Some(Key::new(meta.namespace.as_deref()?, meta.name.as_deref()?))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn service(name: &str, ip: &str) -> Arc<Service> {
        let value = json!({"metadata": {"namespace": "n", "name": name}, "spec": {"clusterIP": ip, "clusterIPs": [ip]}});
        Arc::new(serde_json::from_value(value).unwrap())
    }

    fn slice(name: &str, service: &str, ips: &[&str]) -> Arc<EndpointSlice> {
        let endpoints: Vec<_> = ips.iter().map(|ip| json!({"addresses": [ip]})).collect();
        let labels = json!({"kubernetes.io/service-name": service, "other": "x"});
        let value = json!({"metadata": {"namespace": "n", "name": name, "labels": labels}, "addressType": "IPv4",
            "endpoints": endpoints, "ports": [{"port": 80}]});
        serde_json::from_value::<EndpointSlice>(value).unwrap().slim()
    }

    fn names<'a>(keys: impl Iterator<Item = &'a Key>) -> Vec<&'a str> {
        keys.map(|key| key.name.as_str()).collect()
    }

    #[test]
    fn indexes_follow_services_and_slices() {
        let (one, two) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
        let mut tables = Tables::default();
        tables.put_service(service("a", "10.0.0.1"));
        tables.put_service(service("a", "10.0.0.2"));
        assert_eq!(
            (names(tables.with_cluster_ip(one)), names(tables.with_cluster_ip(two))),
            (vec![], vec!["a"])
        );
        assert_eq!(tables.put_slice(slice("s", "a", &["10.1.0.1"])).len(), 1);
        tables.put_slice(slice("t", "a", &["10.1.0.1", "10.1.0.2"]));
        let endpoint = "10.1.0.1".parse().unwrap();
        assert_eq!(tables.slices(&Key::new("n", "a")).len(), 2);
        assert_eq!(names(tables.put_slice(slice("t", "b", &[])).iter()), ["a", "b"], "the slice moves");
        assert_eq!(names(tables.with_endpoint(endpoint)), ["a"]);
        tables.remove_slice(&Key::new("n", "s"));
        assert!(tables.by_endpoint.len() == 0 && names(tables.with_endpoint(endpoint)).is_empty());
    }

    #[test]
    fn namespaces_are_known_after_their_list_or_by_their_services() {
        let mut tables = Tables::default();
        tables.put_service(service("a", "10.0.0.1"));
        tables.put_namespace("x".to_owned());
        let known = |tables: &Tables| {
            ["n", "x", "y"].map(|name| (tables.has_namespace(name), tables.lacks_namespace(name)))
        };
        assert_eq!(known(&tables), [(true, false), (false, false), (false, false)], "no list");
        tables.replace_namespaces(["x".to_owned()].into());
        assert_eq!(known(&tables), [(true, false), (true, false), (false, true)]);
        tables.put_namespace("y".to_owned());
        tables.remove_namespace("x");
        assert_eq!(known(&tables), [(true, false), (false, true), (true, false)]);
    }

    #[test]
    fn unready_pods_of_this_node_take_no_traffic_of_services_that_select_them() {
        let mut tables = Tables::default();
        for (name, spec) in [
            ("selecting", json!({"selector": {"a": "b"}})),
            ("publishing", json!({"selector": {"a": "b"}, "publishNotReadyAddresses": true})),
            ("manual", json!({})),
        ] {
            let service = json!({"metadata": {"namespace": "n", "name": name}, "spec": spec});
            tables.put_service(Arc::new(serde_json::from_value(service).unwrap()));
            tables.put_slice(slice(name, name, &["10.1.0.1", "10.1.0.2"]));
        }
        let ready = |tables: &Tables, name: &str| {
            let slices = tables.slices(&Key::new("n", name));
            slices[0].endpoints.iter().filter(|endpoint| endpoint.conditions.is_ready()).count()
        };
        let address = "10.1.0.1".parse().unwrap();
        assert_eq!(names(tables.set_ready(address, false).iter()), ["selecting"]);
        assert!(tables.set_ready(address, false).is_empty());
        assert!(tables.set_ready("10.1.0.9".parse().unwrap(), false).is_empty(), "no slice has the address");
        let counts = ["selecting", "publishing", "manual"].map(|name| ready(&tables, name));
        assert_eq!(counts, [1, 2, 2]);
        tables.put_slice(slice("selecting", "selecting", &["10.1.0.1"]));
        assert_eq!(ready(&tables, "selecting"), 0, "a new slice");
        assert_eq!(names(tables.set_ready(address, true).iter()), ["selecting"]);
        assert_eq!(ready(&tables, "selecting"), 1);
    }

    #[test]
    fn stored_services_are_known_until_the_first_list() {
        let mut tables = Tables::default();
        tables.put_stored([service("a", "10.0.0.1"), service("b", "10.0.0.2")]);
        assert!(tables.get("n", "a").is_some() && !tables.is_complete());
        assert_eq!(names(tables.replace_services([service("a", "10.0.0.1")]).iter()), ["b"]);
        tables.put_stored([service("b", "10.0.0.2")]);
        assert!(tables.get("n", "b").is_none());
    }

    #[test]
    fn stored_names_are_known_to_dns_until_the_first_list() {
        let mut tables = Tables::default();
        tables.put_stored([service("a", "10.0.0.1")]);
        tables.put_stored_names([service("a", "10.0.0.9"), service("b", "10.0.0.2")]);
        assert_eq!(tables.named("n", "a"), tables.get("n", "a"), "the stored service has more");
        assert!(tables.named("n", "b").is_some() && tables.get("n", "b").is_none());
        assert_eq!(tables.services().count(), 1);
        tables.replace_services([service("a", "10.0.0.1")]);
        tables.put_stored_names([service("b", "10.0.0.2")]);
        assert!(tables.named("n", "b").is_none());
    }

    #[test]
    fn stored_slices_are_known_until_the_first_list() {
        let mut tables = Tables::default();
        tables.put_stored([service("a", "10.0.0.1")]);
        let stored = || [slice("s", "a", &["10.1.0.1"]), slice("t", "b", &["10.1.0.2"])];
        assert_eq!(names(tables.put_stored_slices(stored()).iter()), ["a", "b"]);
        assert!(tables.put_stored_slices(stored()).is_empty(), "nothing changed");
        assert_eq!(names(tables.put_stored_slices([slice("s", "a", &["10.1.0.9"])]).iter()), ["a"]);
        assert_eq!(names(tables.with_endpoint("10.1.0.9".parse().unwrap())), ["a"]);
        assert!(!tables.is_complete());
        assert_eq!(names(tables.replace_slices([slice("s", "a", &["10.1.0.9"])]).iter()), ["b"]);
        assert!(tables.put_stored_slices(stored()).is_empty(), "the list is newer");
        assert!(tables.slices(&Key::new("n", "b")).is_empty());
    }

    #[test]
    fn a_relist_reports_only_changed_services() {
        let mut tables = Tables::default();
        assert!(!tables.is_complete());
        let all = [service("a", "10.0.0.1"), service("b", "10.0.0.2"), service("c", "10.0.0.3")];
        assert_eq!(tables.replace_services(all.clone()).len(), 3);
        let next = [all[0].clone(), service("b", "10.0.0.9")];
        assert_eq!(names(tables.replace_services(next).iter()), ["b", "c"]);
        assert!(!tables.is_complete(), "no slice was listed");
        tables.replace_slices([slice("s", "a", &["10.1.0.1"]), slice("t", "b", &["10.1.0.2"])]);
        assert!(tables.is_complete());
        let again = [slice("s", "a", &["10.1.0.1"])];
        assert_eq!(names(tables.replace_slices(again).iter()), ["b"]);
        assert_eq!(tables.by_endpoint.len(), 1);
    }
}
