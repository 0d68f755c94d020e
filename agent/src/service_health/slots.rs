//! The services with a health check, and the services that wait for a health check.

use std::collections::{BTreeMap, BTreeSet};

use coracle_values::object::Key;

/// The health checks that may exist, by namespace. The cost of a change grows with the logarithm of the number of
/// services.
#[derive(Debug)]
pub(super) struct Slots {
    /// Maximum number of health checks.
    maximum: usize,
    /// Number of health checks.
    taken: usize,
    namespaces: BTreeMap<String, Services>,
    /// Namespaces with waiting services and the number of their health checks, the smallest number first.
    waiting: BTreeSet<(usize, String)>,
}

/// The names of the services of one namespace.
#[derive(Debug, Default)]
struct Services {
    /// Services with a health check.
    served: BTreeSet<String>,
    /// Services without a health check, because too many services need one.
    waiting: BTreeSet<String>,
}

// === impl Slots ===

impl Slots {
    pub(super) fn new(maximum: usize) -> Self {
        Self { maximum, taken: 0, namespaces: BTreeMap::new(), waiting: BTreeSet::new() }
    }

    pub(super) fn maximum(&self) -> usize {
        self.maximum
    }

    /// Takes a slot for a service, which may already have one. Without room the service waits. Returns whether it has a
    /// slot.
    pub(super) fn take(&mut self, key: &Key) -> bool {
        let services = self.namespaces.get(&key.namespace);
        if services.is_some_and(|services| services.served.contains(&key.name)) {
            return true;
        }
        let has_room = self.has_room(services.map_or(0, |services| services.served.len()));
        self.taken += usize::from(has_room);
        self.change(&key.namespace, |services| {
            if has_room {
                services.waiting.remove(&key.name);
                services.served.insert(key.name.clone());
            } else {
                services.waiting.insert(key.name.clone());
            }
        });
        has_room
    }

    /// Frees the slot of a service, or ends its wait.
    pub(super) fn release(&mut self, key: &Key) {
        let mut was_served = false;
        self.change(&key.namespace, |services| {
            was_served = services.served.remove(&key.name);
            services.waiting.remove(&key.name);
        });
        self.taken -= usize::from(was_served);
    }

    /// Takes a slot for the next waiting service, if there is room. The namespace with the fewest health checks is
    /// first. If this namespace has no room, no other namespace has room.
    pub(super) fn take_next(&mut self) -> Option<Key> {
        let key = self.first_waiting()?;
        let (served, _) = self.waiting.first()?;
        if !self.has_room(*served) {
            return None;
        }
        self.take(&key).then_some(key)
    }

    /// The service that gets the next slot.
    pub(super) fn first_waiting(&self) -> Option<Key> {
        let (_, namespace) = self.waiting.first()?;
        let name = self.namespaces.get(namespace)?.waiting.first()?.clone();
        Some(Key { namespace: namespace.clone(), name })
    }

    /// Whether a namespace with this number of health checks may get another health check. One namespace gets at most
    /// three times as many health checks as are still free.
    fn has_room(&self, served: usize) -> bool {
        served < 3 * self.maximum.saturating_sub(self.taken)
    }

    /// Changes the services of a namespace, and its place among the namespaces with waiting services.
    fn change(&mut self, namespace: &str, change: impl FnOnce(&mut Services)) {
        let mut services = self.namespaces.remove(namespace).unwrap_or_default();
        self.waiting.remove(&(services.served.len(), namespace.to_owned()));
        change(&mut services);
        if !services.waiting.is_empty() {
            self.waiting.insert((services.served.len(), namespace.to_owned()));
        }
        if !services.waiting.is_empty() || !services.served.is_empty() {
            self.namespaces.insert(namespace.to_owned(), services);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(namespace: &str, number: usize) -> Key {
        Key { namespace: namespace.to_owned(), name: format!("{number:04}") }
    }

    /// Takes slots for new services of a namespace until a service waits. Returns the number of slots.
    fn fill(slots: &mut Slots, namespace: &str, first: usize) -> usize {
        (first..).take_while(|number| slots.take(&key(namespace, *number))).count()
    }

    #[test]
    fn the_health_checks_of_one_namespace_leave_room_for_others() {
        let mut slots = Slots::new(64);
        let taken = [
            fill(&mut slots, "a", 0),
            fill(&mut slots, "b", 0),
            fill(&mut slots, "a", 100),
            fill(&mut slots, "c", 0),
        ];
        assert_eq!(taken, [48, 12, 0, 3]);
    }

    #[test]
    fn a_freed_slot_goes_to_the_namespace_with_the_fewest() {
        let mut slots = Slots::new(64);
        let taken = [fill(&mut slots, "a", 0), fill(&mut slots, "b", 0), fill(&mut slots, "c", 0)];
        assert_eq!(taken, [48, 12, 3]);
        for number in 100..200 {
            assert!(!slots.take(&key("a", number)));
        }
        assert_eq!(slots.take_next(), None, "nothing was freed");
        assert!(slots.take(&key("a", 0)), "it has a slot");
        slots.release(&key("a", 0));
        assert_eq!(slots.take_next(), Some(key("c", 3)));
        assert_eq!(slots.take_next(), None, "one was freed");
        // A waiting service and an unknown service hold no slot, so the end of such a service frees no slot.
        slots.release(&key("a", 150));
        slots.release(&key("d", 0));
        assert_eq!(slots.take_next(), None);
        assert_eq!(slots.first_waiting(), Some(key("b", 12)));
    }

    #[test]
    fn after_the_end_of_all_services_nothing_is_kept() {
        let mut slots = Slots::new(8);
        let services: Vec<Key> = (0..20).map(|number| key("a", number)).collect();
        let served = services.iter().filter(|key| slots.take(key)).count();
        assert_eq!(served, 6);
        services.iter().for_each(|key| slots.release(key));
        assert_eq!((slots.taken, slots.namespaces.len(), slots.waiting.len()), (0, 0, 0));
        assert_eq!(slots.take_next(), None);
    }
}
