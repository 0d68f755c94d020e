//! The metrics of stateful sets, in the text format of Prometheus. Source: `pkg/controller/statefulset/metrics`.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::metric_text::{head, line};
use crate::object::Key;

const PREFIX: &str = "statefulset_controller_statefulset";

/// The availability of stateful sets with rolling updates. A clone shares it.
#[derive(Clone, Debug, Default)]
pub struct StatefulSetMetrics(Arc<Mutex<BTreeMap<Key, SetAvailability>>>);

/// The availability of the pods of a stateful set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SetAvailability {
    /// Whether the pods are managed in parallel.
    pub(crate) is_parallel: bool,
    /// Maximum number of unavailable pods during a rolling update.
    pub(crate) max_unavailable: usize,
    /// Number of pods that are missing or not available.
    pub(crate) unavailable: usize,
}

// === impl StatefulSetMetrics ===

impl StatefulSetMetrics {
    /// Sets the availability of a stateful set.
    pub(crate) fn set(&self, set: Key, availability: SetAvailability) {
        self.lock().insert(set, availability);
    }

    /// Removes a stateful set that does not exist, or has no rolling updates.
    pub(crate) fn forget(&self, set: &Key) {
        self.lock().remove(set);
    }

    /// Removes all stateful sets, before the first reconcile of a term.
    pub(crate) fn forget_all(&self) {
        self.lock().clear();
    }

    /// All metrics in the text format of Prometheus. Empty without stateful sets.
    #[must_use]
    pub fn text(&self) -> String {
        let sets = self.lock();
        let mut text = String::new();
        let maximum = "Maximum number of unavailable pods during a rolling update.";
        write(&mut text, &sets, "max_unavailable", maximum, |set| set.max_unavailable);
        let unavailable = "Number of pods that are missing or not available.";
        write(&mut text, &sets, "unavailable_replicas", unavailable, |set| set.unavailable);
        text
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Key, SetAvailability>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes a gauge with a value of each stateful set.
fn write(
    text: &mut String,
    sets: &BTreeMap<Key, SetAvailability>,
    name: &str,
    help: &str,
    value: fn(&SetAvailability) -> usize,
) {
    let name = format!("{PREFIX}_{name}");
    head(text, &name, "gauge", help, sets.len());
    for (Key { namespace, name: set }, availability) in sets {
        let policy = if availability.is_parallel { "Parallel" } else { "OrderedReady" };
        let labels = format!(
            "statefulset_namespace=\"{namespace}\",statefulset_name=\"{set}\",pod_management_policy=\"{policy}\""
        );
        line(text, &name, &labels, u64::try_from(value(availability)).unwrap_or(u64::MAX));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stateful_set_has_its_numbers_until_it_is_deleted() {
        let metrics = StatefulSetMetrics::default();
        assert_eq!(metrics.text(), "");
        let key = |name: &str| Key::new("n", name);
        let of = |unavailable| SetAvailability { is_parallel: false, max_unavailable: 2, unavailable };
        metrics.set(key("a"), of(3));
        metrics.set(key("a"), of(1));
        metrics.set(key("b"), SetAvailability { is_parallel: true, ..of(0) });
        let text = metrics.text();
        let labels = |name: &str, policy: &str| {
            format!(
                "statefulset_namespace=\"n\",statefulset_name=\"{name}\",pod_management_policy=\"{policy}\""
            )
        };
        let (a, b) = (labels("a", "OrderedReady"), labels("b", "Parallel"));
        for line in [
            "# TYPE statefulset_controller_statefulset_max_unavailable gauge".to_owned(),
            format!("statefulset_controller_statefulset_max_unavailable{{{a}}} 2"),
            "# TYPE statefulset_controller_statefulset_unavailable_replicas gauge".to_owned(),
            format!("statefulset_controller_statefulset_unavailable_replicas{{{a}}} 1"),
            format!("statefulset_controller_statefulset_unavailable_replicas{{{b}}} 0"),
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
        metrics.forget(&key("a"));
        assert!(!metrics.text().contains("\"a\""));
        metrics.forget_all();
        assert_eq!(metrics.text(), "");
    }
}
