//! Times of the changes that EndpointSlices show: the service proxy measures how long a change takes to reach the node.

use std::sync::{Mutex, PoisonError};

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Annotation of EndpointSlices with the time of the change, in RFC 3339.
const ANNOTATION: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// Maximum times that wait for the service proxy. Further ones are not counted.
const TIMES_MAX: usize = 1000;

/// The times that the service proxy has not counted yet.
#[derive(Debug)]
pub(super) struct TriggerTimes {
    /// Earlier changes are not counted, as in kube-proxy.
    start: Timestamp,
    times: Mutex<Vec<Timestamp>>,
}

impl Default for TriggerTimes {
    fn default() -> Self {
        Self { start: Timestamp::now(), times: Mutex::default() }
    }
}

// === impl TriggerTimes ===

impl TriggerTimes {
    /// Adds the time of a changed slice.
    pub(super) fn add(&self, time: Timestamp) {
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        if time > self.start && times.len() < TIMES_MAX {
            times.push(time);
        }
    }

    /// Returns the times until now.
    pub(super) fn take(&self) -> Vec<Timestamp> {
        std::mem::take(&mut *self.times.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// The time in the annotation of a slice.
pub(super) fn of(slice: &ObjectMeta) -> Option<Timestamp> {
    slice.annotations.as_ref()?.get(ANNOTATION)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recent_times_are_kept_up_to_a_limit() {
        let times = TriggerTimes::default();
        let slice = |time: &str| ObjectMeta {
            annotations: Some([(ANNOTATION.to_owned(), time.to_owned())].into()),
            ..ObjectMeta::default()
        };
        assert_eq!([of(&slice("soon")), of(&ObjectMeta::default())], [None, None]);
        times.add(of(&slice("2020-01-01T00:00:00Z")).unwrap());
        assert!(times.take().is_empty());
        let later = of(&slice("9000-01-01T00:00:00.5Z")).unwrap();
        (0..=TIMES_MAX).for_each(|_| times.add(later));
        assert_eq!(times.take(), vec![later; TIMES_MAX]);
        assert!(times.take().is_empty());
    }
}
