//! The metrics of stateful sets, in the text format of Prometheus. Source: `pkg/controller/statefulset/metrics`.
//!
//! Each stateful set has time series of its own. A namespace may have very many sets, so only some of them are shown.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::metric_text::{head, line};
use crate::object::Key;

const PREFIX: &str = "statefulset_controller_statefulset";
/// Maximum number of stateful sets of a namespace in the metrics. The first sets by name are shown.
const MAX_OF_NAMESPACE: usize = 100;

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

/// The stateful sets with time series.
fn shown(sets: &BTreeMap<Key, SetAvailability>) -> Vec<(&Key, &SetAvailability)> {
    let (mut namespace, mut count) = (None, 0);
    let mut shown = Vec::new();
    // The keys are in the order of their namespaces.
    for (key, availability) in sets {
        if namespace != Some(&key.namespace) {
            (namespace, count) = (Some(&key.namespace), 0);
        }
        count += 1;
        if count <= MAX_OF_NAMESPACE {
            shown.push((key, availability));
        }
    }
    shown
}

// === impl StatefulSetMetrics ===

impl StatefulSetMetrics {
    /// Sets the availability of a stateful set.
    pub(crate) fn set(&self, set: Key, availability: SetAvailability) {
        self.lock().insert(set, availability);
    }

    /// Removes a stateful set that does not exist, is being deleted, or has no rolling updates.
    pub(crate) fn forget(&self, set: &Key) {
        self.lock().remove(set);
    }

    /// Removes all stateful sets, before the first reconcile of a leadership term.
    pub(crate) fn forget_all(&self) {
        self.lock().clear();
    }

    /// All metrics in the text format of Prometheus. Empty without stateful sets.
    #[must_use]
    pub fn text(&self) -> String {
        let sets = self.lock();
        let sets = shown(&sets);
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
    sets: &[(&Key, &SetAvailability)],
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

    #[test]
    fn a_namespace_has_a_limited_number_of_time_series() {
        let metrics = StatefulSetMetrics::default();
        let availability = SetAvailability { is_parallel: false, max_unavailable: 1, unavailable: 0 };
        for number in 0..MAX_OF_NAMESPACE * 2 {
            metrics.set(Key::new("eve", &format!("s{number}")), availability);
        }
        metrics.set(Key::new("other", "s"), availability);
        let text = metrics.text();
        let count = |namespace: &str| {
            let label = format!("statefulset_namespace=\"{namespace}\"");
            text.lines().filter(|line| line.contains(&label)).count()
        };
        assert_eq!((count("eve"), count("other")), (2 * MAX_OF_NAMESPACE, 2));
    }
}
