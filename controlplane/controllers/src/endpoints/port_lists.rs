//! Finds equal lists of ports by their hash. Pods with different numbers for a named port have different lists, so a
//! service can have as many lists as pods. A comparison of each list with all others would take quadratic time.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher, RandomState};

use k8s_openapi::api::core::v1;
use k8s_openapi::api::discovery::v1 as discovery;

/// The fields of a port.
#[derive(Hash)]
struct Fields<'a> {
    name: Option<&'a str>,
    number: Option<i32>,
    protocol: Option<&'a str>,
    app_protocol: Option<&'a str>,
}

/// Places of lists of ports, by the hash of the list. The caller defines the places.
#[derive(Default)]
pub(crate) struct PortLists {
    hasher: RandomState,
    places: HashMap<u64, Vec<usize>>,
}

/// The hash of a list of ports in [`PortLists`].
pub(crate) struct PortsHash(u64);

// === impl PortLists ===

impl PortLists {
    /// The hash of the ports of Endpoints.
    pub(super) fn of_subset(&self, ports: &[v1::EndpointPort]) -> PortsHash {
        self.hash(ports.iter().map(|port| Fields {
            name: port.name.as_deref(),
            number: Some(port.port),
            protocol: port.protocol.as_deref(),
            app_protocol: port.app_protocol.as_deref(),
        }))
    }

    /// The hash of the ports of a slice.
    pub(crate) fn of_slice(&self, ports: &[discovery::EndpointPort]) -> PortsHash {
        self.hash(ports.iter().map(|port| Fields {
            name: port.name.as_deref(),
            number: port.port,
            protocol: port.protocol.as_deref(),
            app_protocol: port.app_protocol.as_deref(),
        }))
    }

    fn hash<'a>(&self, ports: impl Iterator<Item = Fields<'a>>) -> PortsHash {
        let mut hasher = self.hasher.build_hasher();
        ports.for_each(|port| port.hash(&mut hasher));
        PortsHash(hasher.finish())
    }

    /// Adds a list at a place.
    pub(crate) fn add(&mut self, list: PortsHash, place: usize) {
        self.places.entry(list.0).or_default().push(place);
    }

    /// The place of an equal list. `is_equal` compares the list with the list at a place.
    pub(crate) fn find(&self, list: &PortsHash, is_equal: impl Fn(usize) -> bool) -> Option<usize> {
        self.places.get(&list.0)?.iter().copied().find(|place| is_equal(*place))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn few_lists_are_compared() {
        let list = |number: i32| {
            vec![discovery::EndpointPort { port: Some(number), ..discovery::EndpointPort::default() }]
        };
        let all: Vec<_> = (0..5000).map(list).collect();
        let mut known = PortLists::default();
        for (place, ports) in all.iter().enumerate() {
            known.add(known.of_slice(ports), place);
        }
        let compared = Cell::new(0);
        for (place, ports) in all.iter().enumerate() {
            let found = known.find(&known.of_slice(ports), |other| {
                compared.set(compared.get() + 1);
                all[other] == *ports
            });
            assert_eq!(found, Some(place));
        }
        assert!(compared.get() < 5100, "{}", compared.get());
        assert_eq!(known.find(&known.of_slice(&[]), |_other| true), None);
    }
}
