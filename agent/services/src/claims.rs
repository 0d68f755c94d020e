//! Index of the services that claim an address.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;

use coracle_values::object::Key;

/// The services that claim each address, with the number of their claims.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    by_address: HashMap<IpAddr, Claimants>,
}

/// The services that claim one address, with the number of their claims. Nearly every address has one claimant. A tree
/// for one claimant would take ten times the memory.
#[derive(Debug)]
enum Claimants {
    One(Arc<Key>, usize),
    Many(BTreeMap<Arc<Key>, usize>),
}

// === impl Claims ===

impl Claims {
    /// The services that claim the address, in order.
    pub(crate) fn claimants(&self, address: IpAddr) -> impl Iterator<Item = &Key> {
        let (one, many) = match self.by_address.get(&address) {
            None => (None, None),
            Some(Claimants::One(key, _)) => (Some(key), None),
            Some(Claimants::Many(all)) => (None, Some(all)),
        };
        one.into_iter().chain(many.into_iter().flat_map(BTreeMap::keys)).map(Arc::as_ref)
    }

    /// Adds a claim.
    pub(crate) fn add(&mut self, address: IpAddr, service: &Arc<Key>) {
        let Some(claimants) = self.by_address.get_mut(&address) else {
            self.by_address.insert(address, Claimants::One(Arc::clone(service), 1));
            return;
        };
        match claimants {
            Claimants::One(key, count) if key == service => *count += 1,
            Claimants::One(key, count) => {
                let both = [(Arc::clone(key), *count), (Arc::clone(service), 1)];
                *claimants = Claimants::Many(both.into());
            }
            Claimants::Many(all) => *all.entry(Arc::clone(service)).or_default() += 1,
        }
    }

    /// Removes a claim. Does nothing if the service has no claim.
    pub(crate) fn remove(&mut self, address: IpAddr, service: &Key) {
        let Some(claimants) = self.by_address.get_mut(&address) else { return };
        let is_unclaimed = match claimants {
            Claimants::One(key, count) if **key == *service => {
                *count -= 1;
                *count == 0
            }
            Claimants::One(..) => false,
            Claimants::Many(all) => {
                if let Some(count) = all.get_mut(service) {
                    *count -= 1;
                    if *count == 0 {
                        all.remove(service);
                    }
                }
                all.is_empty()
            }
        };
        if is_unclaimed {
            self.by_address.remove(&address);
        }
    }

    /// Number of claimed addresses.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.by_address.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_claimed_as_often_as_it_was_added() {
        let (a, b) = (Arc::new(Key::new("n", "a")), Arc::new(Key::new("n", "b")));
        let ip = "10.0.0.1".parse().unwrap();
        let mut claims = Claims::default();
        let names =
            |claims: &Claims| claims.claimants(ip).map(|key| key.name.clone()).collect::<Vec<_>>().concat();
        claims.remove(ip, &a);
        for service in [&b, &b, &a, &b] {
            claims.add(ip, service);
        }
        assert_eq!(names(&claims), "ab");
        for (removed, expect) in [(&b, "ab"), (&a, "b"), (&a, "b"), (&b, "b"), (&b, "")] {
            claims.remove(ip, removed);
            assert_eq!(names(&claims), expect);
        }
        assert_eq!(claims.len(), 0);
        claims.add(ip, &a);
        claims.remove(ip, &b);
        assert_eq!(names(&claims), "a");
    }
}
