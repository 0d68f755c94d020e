//! Warnings of one request for the client.

use std::{
    net::IpAddr,
    sync::{Mutex, PoisonError},
};

use coracle_kinds::{Resource, warnings};
use ipnetwork::IpNetwork;
use serde_json::Value;

/// Maximum number of warnings of one request. `reply::warned` limits their bytes.
const MAX_WARNINGS: usize = 100;

/// Warnings for the client without duplicates. Warnings above the maximum are dropped.
#[derive(Default)]
pub(crate) struct Warnings(Mutex<Vec<String>>);

// === impl Warnings ===

impl Warnings {
    /// Starts with the deprecation warning of the kind's version, if there is one.
    pub(crate) fn about(kind: &Resource) -> Self {
        Self(Mutex::new(kind.deprecation.iter().map(|text| text.clone().into_owned()).collect()))
    }

    pub(crate) fn add(&self, text: String) {
        let mut list = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if list.len() < MAX_WARNINGS && !list.contains(&text) {
            list.push(text);
        }
    }

    /// Adds the warnings about the fields of a valid object. `old` is the stored object of an update.
    pub(crate) fn add_about(&self, kind: &Resource, new: &Value, old: Option<&Value>) {
        warnings::about(kind, new, old).into_iter().for_each(|text| self.add(text));
    }

    /// Adds warnings about the external IPs of a valid Service that no range permits: nodes ignore them. `ranges` are
    /// the ranges of the setting `service-external-ips` of this process.
    pub(crate) fn add_about_external_ips(&self, service: &Value, ranges: &[IpNetwork]) {
        let is_permitted = |address: &str| {
            address.parse::<IpAddr>().is_ok_and(|address| ranges.iter().any(|range| range.contains(address)))
        };
        let addresses = service["spec"]["externalIPs"].as_array().into_iter().flatten();
        let addresses = addresses.enumerate().take(MAX_WARNINGS);
        for (index, address) in addresses.filter_map(|(index, one)| Some((index, one.as_str()?))) {
            if !is_permitted(address) {
                self.add(format!(
                    "spec.externalIPs[{index}]: nodes ignore {address}, unless their setting --service-external-ips \
                     permits it"
                ));
            }
        }
    }

    pub(crate) fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn external_ips_that_nodes_ignore_have_warnings() {
        let service = json!({"spec": {"externalIPs": ["192.0.2.7", "203.0.113.1"]}});
        let found = |ranges: &[IpNetwork]| {
            let warnings = Warnings::default();
            warnings.add_about_external_ips(&service, ranges);
            warnings.take()
        };
        let text = |index: usize, address: &str| {
            format!(
                "spec.externalIPs[{index}]: nodes ignore {address}, unless their setting --service-external-ips permits it"
            )
        };
        assert_eq!(found(&["192.0.2.0/24".parse().unwrap()]), [text(1, "203.0.113.1")]);
        assert_eq!(found(&[]), [text(0, "192.0.2.7"), text(1, "203.0.113.1")]);
        assert_eq!(found(&["0.0.0.0/0".parse().unwrap()]), [""; 0]);
        let warnings = Warnings::default();
        warnings.add_about_external_ips(&json!({"spec": {"ports": []}}), &[]);
        assert_eq!(warnings.take(), [""; 0]);
    }

    #[test]
    fn warnings_are_distinct_and_limited() {
        let warnings = Warnings::default();
        for number in 0..10_000 {
            warnings.add(format!("{}", number / 2));
        }
        let all = warnings.take();
        assert_eq!((all.len(), all[1].as_str()), (MAX_WARNINGS, "1"));
    }
}
