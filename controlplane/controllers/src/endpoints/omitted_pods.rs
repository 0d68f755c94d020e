//! Pods that are not endpoints of their service, because there is no room for their ports.

use std::collections::BTreeSet;

use coracle_events::Event;

use crate::object::{ObjectExt, Pod};

/// Maximum ports in all subsets of Endpoints, and in all slices of an address family, if there is more than one list of
/// ports. Pods with different numbers for a named port have separate lists, each with all ports of the service.
pub(super) const PORTS_MAX: usize = 32_768;
/// Maximum number of pods that the event names.
const NAMED: usize = 3;

/// The names of the pods, in order.
#[derive(Debug, Default)]
pub(crate) struct OmittedPods(BTreeSet<String>);

// === impl OmittedPods ===

impl OmittedPods {
    /// Adds a pod. A pod with addresses of two families counts once.
    pub(crate) fn add(&mut self, pod: &Pod) {
        if !self.0.contains(pod.name()) {
            self.0.insert(pod.name().to_owned());
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The event about the service. `None` if all pods are endpoints.
    pub(crate) fn event(&self) -> Option<Event> {
        let count = self.0.len();
        let named: Vec<&str> = self.0.iter().take(NAMED).map(String::as_str).collect();
        let more = match count.saturating_sub(named.len()) {
            0 => String::new(),
            more => format!(" and {more} more"),
        };
        let message = format!(
            "Pods that are not endpoints: {count} ({}{more}). Pods with different numbers for a named port need more than \
             {PORTS_MAX} ports",
            named.join(", ")
        );
        (count > 0).then(|| Event::warning("TooManyPorts", message))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn the_event_names_the_first_pods_and_counts_all() {
        let mut omitted = OmittedPods::default();
        assert!(omitted.event().is_none() && omitted.is_empty());
        let message = |omitted: &OmittedPods| omitted.event().expect("an event").message;
        for name in ["b", "a", "b"] {
            let pod = json!({"metadata": {"name": name, "namespace": "d"}});
            omitted.add(&serde_json::from_value(pod).unwrap());
        }
        let two = message(&omitted);
        assert!(two.starts_with("Pods that are not endpoints: 2 (a, b). "), "{two}");
        for number in 0..10 {
            let pod = json!({"metadata": {"name": format!("c{number}"), "namespace": "d"}});
            omitted.add(&serde_json::from_value(pod).unwrap());
        }
        let many = message(&omitted);
        assert!(many.contains(": 12 (a, b, c0 and 9 more). "), "{many}");
    }
}
