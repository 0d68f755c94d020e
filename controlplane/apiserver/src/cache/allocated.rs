//! Index of allocated addresses and node ports, and of the ranges that they come from.
//!
//! The collections of services, IPAddresses and ServiceCIDRs update the index with each change. An allocation therefore
//! does not read other objects.

use std::{
    collections::{BTreeMap, HashMap},
    hash::Hash,
    net::IpAddr,
    sync::Arc,
};

use coracle_kinds::Resource;
use ipnetwork::IpNetwork;
use serde_json::Value;

use super::Object;
use crate::service_range::ServiceRange;

/// Label of an IPAddress with the name of its manager.
const MANAGED_BY: &str = "ipaddress.kubernetes.io/managed-by";
/// The manager of the addresses of services. The IPAddresses of this manager are excluded, because the services
/// themselves are indexed.
const ALLOCATOR: &str = "ipallocator.k8s.io";

/// Addresses, node ports and ranges of the objects of one collection.
#[derive(Debug, Default)]
pub(crate) struct Allocated {
    /// The keys of the objects that have an address. Several objects have the same address only if a program other than
    /// this server stored them.
    addresses: HashMap<IpAddr, Vec<Arc<str>>>,
    /// The keys of the services that have a node port.
    ports: HashMap<u16, Vec<Arc<str>>>,
    /// Addresses and node ports of each object, by its key.
    objects: HashMap<Arc<str>, Allocation>,
    /// The ranges of each ServiceCIDR.
    ranges: BTreeMap<Arc<str>, Ranges>,
}

#[derive(Debug, Default)]
struct Allocation {
    addresses: Vec<IpAddr>,
    ports: Vec<u16>,
}

#[derive(Debug)]
struct Ranges {
    networks: Vec<ServiceRange>,
    /// Whether new addresses may be allocated from these ranges.
    is_usable: bool,
}

/// A range of a ServiceCIDR.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ServiceCidrRange {
    pub(crate) range: ServiceRange,
    /// Whether new addresses may be allocated from the range.
    pub(crate) is_usable: bool,
}

// === impl Allocated ===

impl Allocated {
    /// Adds or updates an object. A service is parsed only if its spec changed: most commits change only its status.
    pub(super) fn set(&mut self, kind: &Resource, old: Option<&Object>, object: &Object) {
        match (&*kind.group, &*kind.kind) {
            ("", "Service") => {
                if old.is_some_and(|old| old.spec() == object.spec()) {
                    return;
                }
                let spec = serde_json::from_str(object.spec()).unwrap_or_default();
                self.put(&object.key, service(&spec));
            }
            ("networking.k8s.io", "IPAddress") => {
                let labels = &object.value()["metadata"]["labels"];
                let is_derived = labels[MANAGED_BY] == ALLOCATOR;
                let addresses = object.name().parse().into_iter().filter(|_| !is_derived).collect();
                self.put(&object.key, Allocation { addresses, ports: Vec::new() });
            }
            ("networking.k8s.io", "ServiceCIDR") => {
                self.ranges.insert(object.key.clone(), ranges(&object.value()));
            }
            _ => {}
        }
    }

    pub(super) fn remove(&mut self, key: &Arc<str>) {
        self.ranges.remove(key);
        let Some(own) = self.objects.remove(key) else { return };
        own.addresses.iter().for_each(|address| release(&mut self.addresses, address, key));
        own.ports.iter().for_each(|port| release(&mut self.ports, port, key));
    }

    #[cfg(test)]
    pub(crate) fn add_service(&mut self, key: &str, spec: &Value) {
        self.put(&key.into(), service(spec));
    }

    fn put(&mut self, key: &Arc<str>, own: Allocation) {
        self.remove(key);
        own.addresses.iter().for_each(|address| {
            self.addresses.entry(*address).or_default().push(key.clone());
        });
        own.ports.iter().for_each(|port| self.ports.entry(*port).or_default().push(key.clone()));
        if !own.addresses.is_empty() || !own.ports.is_empty() {
            self.objects.insert(key.clone(), own);
        }
    }

    /// Whether an object other than the one with the key `except` has the address.
    pub(crate) fn has_address(&self, address: IpAddr, except: &str) -> bool {
        self.addresses.get(&address).is_some_and(|keys| keys.iter().any(|key| &**key != except))
    }

    /// Whether a service other than the one with the key `except` has the node port.
    pub(crate) fn has_port(&self, port: u16, except: &str) -> bool {
        self.ports.get(&port).is_some_and(|keys| keys.iter().any(|key| &**key != except))
    }

    /// The number of allocated addresses.
    pub(crate) fn addresses(&self) -> usize {
        self.addresses.len()
    }

    /// Each range of a ServiceCIDR.
    pub(crate) fn ranges(&self) -> impl Iterator<Item = ServiceCidrRange> {
        let all = self.ranges.values();
        all.flat_map(|ranges| {
            let is_usable = ranges.is_usable;
            ranges.networks.iter().map(move |range| ServiceCidrRange { range: *range, is_usable })
        })
    }
}

fn release<K: Eq + Hash>(holders: &mut HashMap<K, Vec<Arc<str>>>, what: &K, key: &Arc<str>) {
    if let Some(keys) = holders.get_mut(what) {
        keys.retain(|holder| holder != key);
        if keys.is_empty() {
            holders.remove(what);
        }
    }
}

fn service(spec: &Value) -> Allocation {
    let ports = spec["ports"].as_array().into_iter().flatten();
    let node_ports = ports.map(|port| &port["nodePort"]).chain([&spec["healthCheckNodePort"]]);
    let number = |port: &Value| u16::try_from(port.as_u64()?).ok().filter(|port| *port != 0);
    let mut ports: Vec<u16> = node_ports.filter_map(number).collect();
    ports.sort_unstable();
    ports.dedup();
    let addresses = spec["clusterIPs"].as_array().into_iter().flatten();
    Allocation { addresses: addresses.filter_map(|address| address.as_str()?.parse().ok()).collect(), ports }
}

/// The ranges of a ServiceCIDR. They are usable while the ServiceCIDR is ready and not being deleted.
fn ranges(object: &Value) -> Ranges {
    let cidrs = object["spec"]["cidrs"].as_array().into_iter().flatten();
    let networks = cidrs.filter_map(|cidr| cidr.as_str()?.parse::<IpNetwork>().ok());
    let mut conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    let is_ready = conditions.any(|condition| condition["type"] == "Ready" && condition["status"] == "True");
    let is_usable = is_ready && object["metadata"]["deletionTimestamp"].is_null();
    Ranges { networks: networks.map(ServiceRange::new).collect(), is_usable }
}

#[cfg(test)]
mod tests {
    use coracle_kinds::kind::by_kind;
    use serde_json::json;

    use super::*;
    use crate::cache::{encode, key_of};

    fn object(kind: &Resource, name: &str, mut value: Value) -> Object {
        value["metadata"]["name"] = name.into();
        let namespace = if kind.namespaced { "n" } else { "" };
        Object::from_stored(key_of(kind, namespace, name).into(), 1, encode(kind, &value))
    }

    fn service(name: &str, ip: &str, ports: &[u16]) -> Object {
        let ports: Vec<Value> = ports.iter().map(|port| json!({"nodePort": port})).collect();
        let value = json!({"spec": {"clusterIPs": [ip], "ports": ports, "healthCheckNodePort": 30999}});
        object(by_kind("v1", "Service").unwrap(), name, value)
    }

    #[test]
    fn a_service_has_its_addresses_and_ports_until_it_changes_or_goes() {
        let kind = by_kind("v1", "Service").unwrap();
        let (mut index, address) = (Allocated::default(), "10.0.0.1".parse().unwrap());
        let one = service("a", "10.0.0.1", &[30001, 30001]);
        index.set(kind, None, &one);
        assert!(index.has_address(address, "") && !index.has_address(address, &one.key));
        assert!([30001, 30999].iter().all(|port| index.has_port(*port, "")));
        let second = service("b", "10.0.0.1", &[]);
        index.set(kind, None, &second);
        assert!(index.has_address(address, &one.key), "both have it");
        index.remove(&second.key);
        let moved = service("a", "10.0.0.2", &[30002]);
        index.set(kind, Some(&one), &moved);
        assert!(!index.has_address(address, "") && !index.has_port(30001, "") && index.has_port(30002, ""));
        index.remove(&moved.key);
        assert!(index.addresses.is_empty() && index.ports.is_empty() && index.objects.is_empty());
    }

    #[test]
    fn addresses_of_other_managers_are_taken() {
        let kind = by_kind("networking.k8s.io/v1", "IPAddress").unwrap();
        let mut index = Allocated::default();
        index.set(kind, None, &object(kind, "10.0.0.1", json!({})));
        let derived = json!({"metadata": {"labels": {MANAGED_BY: ALLOCATOR}}});
        index.set(kind, None, &object(kind, "10.0.0.2", derived));
        assert!(index.has_address("10.0.0.1".parse().unwrap(), ""));
        assert!(!index.has_address("10.0.0.2".parse().unwrap(), ""), "its service has it");
    }

    #[test]
    fn a_range_is_usable_while_it_is_ready() {
        let kind = by_kind("networking.k8s.io/v1", "ServiceCIDR").unwrap();
        let mut index = Allocated::default();
        let mut set = |status: &str, deleted: Value| {
            let value = json!({"metadata": {"deletionTimestamp": deleted}, "spec": {"cidrs": ["10.0.0.0/24"]},
                "status": {"conditions": [{"type": "Ready", "status": status}]}});
            index.set(kind, None, &object(kind, "a", value));
            index.ranges().map(|one| (one.range.to_string(), one.is_usable)).collect::<Vec<_>>()
        };
        let range = "10.0.0.0/24".to_owned();
        assert_eq!(set("True", Value::Null), [(range.clone(), true)]);
        assert_eq!(set("False", Value::Null), [(range.clone(), false)]);
        assert_eq!(set("True", json!("2026-01-01T00:00:00Z")), [(range, false)]);
    }
}
