//! Addresses of this node's pods, and whether the pods are ready.

use std::collections::HashMap;
use std::net::IpAddr;

use k8s_openapi::api::core::v1::{Pod, PodStatus};

/// A pod of this node, as its worker reports it.
#[derive(Debug)]
pub(crate) struct LocalPod<'a> {
    pub(crate) uid: &'a str,
    /// The pod's own addresses, without addresses of the node, which several pods can have.
    pub(crate) addresses: Vec<IpAddr>,
    pub(crate) is_ready: bool,
    /// Whether the pod has these addresses now. Without a sandbox they come from its last status, and another pod may
    /// have them.
    pub(crate) is_attached: bool,
}

/// An address whose readiness has changed, and whether it is ready now.
pub(super) type Change = (IpAddr, bool);

/// The pods by their addresses.
#[derive(Debug, Default)]
pub(super) struct LocalPods {
    owners: HashMap<IpAddr, Owner>,
    addresses: HashMap<Box<str>, Vec<IpAddr>>,
}

#[derive(Debug)]
struct Owner {
    uid: Box<str>,
    is_ready: bool,
}

// === impl LocalPod ===

impl<'a> LocalPod<'a> {
    /// The pod with this status.
    pub(crate) fn of(uid: &'a str, pod: &Pod, status: &PodStatus, is_attached: bool) -> Self {
        let on_host = pod.spec.as_ref().is_some_and(|spec| spec.host_network == Some(true));
        let addresses = status.pod_ips.iter().flatten().filter(|_| !on_host);
        let mut conditions = status.conditions.iter().flatten();
        Self {
            uid,
            addresses: addresses.filter_map(|address| address.ip.parse().ok()).collect(),
            is_ready: conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True"),
            is_attached,
        }
    }
}

// === impl LocalPods ===

impl LocalPods {
    /// Whether a pod has the address.
    pub(super) fn has(&self, address: IpAddr) -> bool {
        self.owners.contains_key(&address)
    }

    /// The uid of the pod that has the address.
    pub(super) fn pod_at(&self, address: IpAddr) -> Option<&str> {
        self.owners.get(&address).map(|owner| &*owner.uid)
    }

    /// The address of a pod in a family.
    pub(super) fn address_of(&self, uid: &str, is_ipv4: bool) -> Option<IpAddr> {
        let mut own = self.addresses.get(uid)?.iter().copied();
        own.find(|address| address.is_ipv4() == is_ipv4 && self.pod_at(*address) == Some(uid))
    }

    /// Records a pod. An address that the pod has lost counts as ready, so that only its slices decide.
    pub(super) fn put(&mut self, pod: &LocalPod<'_>) -> Vec<Change> {
        let mut changes = Vec::new();
        if self.addresses.get(pod.uid) != Some(&pod.addresses) {
            changes = self.remove_except(pod.uid, &pod.addresses);
            self.addresses.insert(pod.uid.into(), pod.addresses.clone());
        }
        for address in &pod.addresses {
            let owner = self.owners.get(address);
            let is_own = owner.is_some_and(|owner| *owner.uid == *pod.uid);
            let is_known = is_own && owner.is_some_and(|owner| owner.is_ready == pod.is_ready);
            if is_known || (!pod.is_attached && owner.is_some() && !is_own) {
                continue;
            }
            self.owners.insert(*address, Owner { uid: pod.uid.into(), is_ready: pod.is_ready });
            changes.push((*address, pod.is_ready));
        }
        changes
    }

    /// Removes a pod.
    pub(super) fn remove(&mut self, uid: &str) -> Vec<Change> {
        let changes = self.remove_except(uid, &[]);
        self.addresses.remove(uid);
        changes
    }

    fn remove_except(&mut self, uid: &str, kept: &[IpAddr]) -> Vec<Change> {
        let before = self.addresses.get(uid).map(Vec::as_slice).unwrap_or_default();
        let mut changes = Vec::new();
        for address in before.iter().filter(|address| !kept.contains(address)) {
            if self.owners.get(address).is_some_and(|owner| *owner.uid == *uid) {
                self.owners.remove(address);
                changes.push((*address, true));
            }
        }
        changes
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod<'a>(uid: &'a str, addresses: &[&str], is_ready: bool) -> LocalPod<'a> {
        let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
        LocalPod { uid, addresses, is_ready, is_attached: true }
    }

    fn at(address: &str, is_ready: bool) -> Change {
        (address.parse().unwrap(), is_ready)
    }

    #[test]
    fn a_change_of_readiness_is_reported_once() {
        let mut pods = LocalPods::default();
        assert_eq!(pods.put(&pod("a", &["10.0.0.1", "fd00::1"], true)).len(), 2);
        assert_eq!(pods.put(&pod("a", &["10.0.0.1", "fd00::1"], true)), []);
        let unready = [at("10.0.0.1", false), at("fd00::1", false)];
        assert_eq!(pods.put(&pod("a", &["10.0.0.1", "fd00::1"], false)), unready);
        assert_eq!(pods.put(&pod("a", &["10.0.0.1"], false)), [at("fd00::1", true)], "it lost an address");
        let has = |pods: &LocalPods, address: &str| pods.has(address.parse().unwrap());
        assert!(has(&pods, "10.0.0.1") && !has(&pods, "fd00::1"));
        assert_eq!(pods.remove("a"), [at("10.0.0.1", true)]);
        assert!(!has(&pods, "10.0.0.1"));
        assert_eq!(pods.remove("a"), []);
    }

    #[test]
    fn the_former_address_of_a_pod_belongs_to_the_next_pod() {
        let mut pods = LocalPods::default();
        let former = || LocalPod { is_attached: false, ..pod("a", &["10.0.0.1"], false) };
        assert_eq!(pods.put(&former()), [at("10.0.0.1", false)]);
        assert_eq!(pods.put(&pod("b", &["10.0.0.1"], true)), [at("10.0.0.1", true)]);
        assert_eq!(pods.put(&former()), []);
        assert_eq!(pods.remove("a"), []);
        assert_eq!(pods.put(&pod("b", &["10.0.0.1"], false)), [at("10.0.0.1", false)]);
    }

    #[test]
    fn pods_on_the_nodes_network_have_no_address_of_their_own() {
        let status = |ready: &str| {
            let conditions = json!([{"type": "Ready", "status": ready}]);
            let status =
                json!({"phase": "Running", "podIPs": [{"ip": "10.0.0.1"}], "conditions": conditions});
            serde_json::from_value::<PodStatus>(status).unwrap()
        };
        let with = |host: bool| -> Pod {
            serde_json::from_value(json!({"spec": {"hostNetwork": host, "containers": []}})).unwrap()
        };
        assert!(LocalPod::of("a", &with(true), &status("False"), true).addresses.is_empty());
        let (pod, status) = (with(false), status("True"));
        let own = LocalPod::of("a", &pod, &status, true);
        assert_eq!((own.addresses.len(), own.is_ready, own.is_attached), (1, true, true));
    }
}
