//! The endpoints of a service that take traffic, and the limits of their search.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::Arc;

use coracle_services::{Endpoint, EndpointSlice, Tables};
use coracle_values::object::Key;

/// Maximum slices, maximum endpoints and maximum ports that are examined for a query. A limit on found endpoints would
/// not bound the cost: the author of the slices chooses how many endpoints are not ready.
pub(super) const EXAMINED_MAX: usize = 20_000;

/// Maximum services of a namespace that are examined for the names of an address.
const SERVICES_MAX: usize = 500;

/// A search for the services that have an endpoint with a given address, in all namespaces. A tenant controls the
/// number of its services with the address, and the number of their other endpoints. So each namespace has its own
/// limits: the services of one namespace cannot hide the services of other namespaces.
#[derive(Default)]
pub(super) struct Search<'a> {
    namespace: &'a str,
    services: usize,
    examined: usize,
}

/// The slices of a service.
pub(super) struct Endpoints<'a> {
    slices: Vec<&'a Arc<EndpointSlice>>,
    /// Addresses that take no traffic, because their pods on this node are not ready.
    unready: Option<&'a HashSet<IpAddr>>,
}

/// An endpoint with its address.
pub(super) struct Host<'a> {
    pub(super) endpoint: &'a Endpoint,
    pub(super) address: IpAddr,
}

// === impl Search ===

impl<'a> Search<'a> {
    /// Whether the next service of the namespace is examined. The services of a namespace follow each other.
    pub(super) fn includes(&mut self, namespace: &'a str) -> bool {
        if self.namespace != namespace {
            *self = Self { namespace, services: 0, examined: 0 };
        }
        self.services += 1;
        self.services <= SERVICES_MAX && self.examined < EXAMINED_MAX
    }

    /// Counts the slices and endpoints of a service.
    pub(super) fn examined(&mut self, count: usize) {
        self.examined += count;
    }
}

// === impl Endpoints ===

impl<'a> Endpoints<'a> {
    pub(super) fn new(tables: &'a Tables, service: &Key) -> Self {
        let slices = tables.listed_slices(service).take(EXAMINED_MAX).collect();
        Self { slices, unready: tables.unready_of(service) }
    }

    pub(super) fn slices(&self) -> &[&'a Arc<EndpointSlice>] {
        &self.slices
    }

    /// The endpoints that take traffic.
    pub(super) fn hosts(&self) -> impl Iterator<Item = Host<'a>> {
        self.of(&self.slices)
    }

    /// The endpoints that take traffic, beginning with a random slice. Otherwise an answer that has room for few
    /// endpoints would always contain the same endpoints.
    pub(super) fn hosts_from_random_slice(&self) -> impl Iterator<Item = Host<'a>> {
        let first = match self.slices.len() {
            0 | 1 => 0,
            count => rand::random_range(0..count),
        };
        let (before, after) = self.slices.split_at(first);
        self.of(after.iter().chain(before))
    }

    /// The endpoints of one slice that take traffic.
    pub(super) fn of_slice<'b>(
        &'b self,
        slice: &'b &'a Arc<EndpointSlice>,
    ) -> impl Iterator<Item = Host<'a>> + 'b {
        self.of(std::iter::once(slice))
    }

    /// Number of slices and endpoints that a search examines, up to the maximum.
    pub(super) fn count(&self) -> usize {
        let endpoints: usize = self.slices.iter().map(|slice| slice.endpoints.len()).sum();
        (self.slices.len() + endpoints).min(EXAMINED_MAX)
    }

    /// Whether a search may end before the last endpoint or port. Then a name that is not found may exist.
    pub(super) fn is_partial(&self) -> bool {
        let size = |slice: &&Arc<EndpointSlice>| slice.ports.len() + slice.endpoints.len();
        self.slices.len() >= EXAMINED_MAX || self.slices.iter().map(size).sum::<usize>() > EXAMINED_MAX
    }

    fn of<'b>(
        &'b self,
        slices: impl IntoIterator<Item = &'b &'a Arc<EndpointSlice>> + 'b,
    ) -> impl Iterator<Item = Host<'a>> + 'b {
        let all = slices.into_iter().copied().flat_map(|slice| slice.endpoints.iter()).take(EXAMINED_MAX);
        let unready = self.unready;
        all.filter(|endpoint| endpoint.conditions.is_ready()).filter_map(move |endpoint| {
            let address = endpoint.address?;
            let is_unready = unready.is_some_and(|unready| unready.contains(&address));
            (!is_unready).then_some(Host { endpoint, address })
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_namespace_has_its_own_limits_in_a_search() {
        let mut search = Search::default();
        let included = (0..1000).filter(|_| search.includes("a")).count();
        assert_eq!(included, SERVICES_MAX);
        assert!(search.includes("b"));
        search.examined(EXAMINED_MAX);
        assert!(!search.includes("b") && search.includes("c"));
    }
}
