//! Reports the `externalIPs` of Services that this node ignores. As in kube-proxy, each node records an event (source:
//! `LogAndEmitIncorrectIPVersionEvent`).

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Mutex, PoisonError};

use coracle_values::object::Key;
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Service;

use crate::event_recorder::Recorder;

/// Maximum number of addresses in one event.
const MAX_SHOWN: usize = 10;

/// Records an event about each Service with ignored addresses, once for the same addresses.
pub(super) struct IgnoredIps {
    recorder: Recorder,
    node_name: String,
    /// The ranges of `--service-external-ips`.
    permitted: Vec<IpNetwork>,
    /// The reported addresses of each Service.
    reported: Mutex<BTreeMap<Key, Vec<IpAddr>>>,
}

// === impl IgnoredIps ===

impl IgnoredIps {
    pub(super) fn new(recorder: Recorder, node_name: &str, permitted: Vec<IpNetwork>) -> Self {
        Self { recorder, node_name: node_name.to_owned(), permitted, reported: Mutex::default() }
    }

    /// Records an event if the Service has ignored addresses that are not reported yet. `None` for a Service that is
    /// gone.
    pub(super) fn report(&self, key: &Key, service: Option<&Service>) {
        let ignored = service.map(|service| ignored(service, &self.permitted)).unwrap_or_default();
        let mut reported = self.reported.lock().unwrap_or_else(PoisonError::into_inner);
        if !is_new(&mut reported, key, &ignored) {
            return;
        }
        drop(reported);
        if let Some(service) = service {
            self.recorder.service(service, "ExternalIPIgnored", message(&self.node_name, &ignored));
        }
    }
}

/// The external addresses of a Service that no range permits.
fn ignored(service: &Service, permitted: &[IpNetwork]) -> Vec<IpAddr> {
    let listed = service.spec.iter().flat_map(|spec| spec.external_ips.iter().flatten());
    let addresses = listed.filter_map(|address| address.parse::<IpAddr>().ok());
    addresses.filter(|address| !permitted.iter().any(|range| range.contains(*address))).collect()
}

/// Whether the ignored addresses of the Service are not reported yet. Stores them as reported.
fn is_new(reported: &mut BTreeMap<Key, Vec<IpAddr>>, key: &Key, ignored: &[IpAddr]) -> bool {
    if ignored.is_empty() {
        reported.remove(key);
        return false;
    }
    reported.insert(key.clone(), ignored.to_vec()).is_none_or(|known| known != ignored)
}

fn message(node_name: &str, ignored: &[IpAddr]) -> String {
    let shown: Vec<String> = ignored.iter().take(MAX_SHOWN).map(IpAddr::to_string).collect();
    let more = if ignored.len() > MAX_SHOWN { " and others" } else { "" };
    let shown = shown.join(", ");
    format!(
        "node {node_name} ignores the external IPs {shown}{more}, because they are in no range of --service-external-ips"
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn service(addresses: &[&str]) -> Service {
        serde_json::from_value(json!({"metadata": {}, "spec": {"externalIPs": addresses}})).unwrap()
    }

    #[test]
    fn external_ips_outside_of_the_permitted_ranges_are_ignored() {
        let service = service(&["192.0.2.7", "203.0.113.1", "fd00::1", "no address"]);
        let permitted: [IpNetwork; 1] = ["192.0.2.0/24".parse().unwrap()];
        let found = ignored(&service, &permitted);
        let text = "node n ignores the external IPs 203.0.113.1, fd00::1, because they are in no range of \
                    --service-external-ips";
        assert_eq!(message("n", &found), text);
        assert_eq!(ignored(&service, &[]).len(), 3, "by default no address is permitted");
        assert_eq!(ignored(&Service::default(), &[]), [] as [IpAddr; 0]);
        let many: Vec<IpAddr> = vec!["192.0.2.1".parse().unwrap(); MAX_SHOWN + 1];
        assert!(message("n", &many).contains("192.0.2.1 and others, because"));
    }

    #[test]
    fn the_same_addresses_are_reported_once() {
        let (mut reported, key) = (BTreeMap::new(), Key::new("n", "s"));
        let [first, second]: [IpAddr; 2] = ["192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap()];
        assert!(is_new(&mut reported, &key, &[first]));
        assert!(!is_new(&mut reported, &key, &[first]), "endpoints changed");
        assert!(is_new(&mut reported, &key, &[first, second]));
        assert!(!is_new(&mut reported, &key, &[]) && reported.is_empty(), "the service is gone");
        assert!(is_new(&mut reported, &key, &[first]));
    }
}
