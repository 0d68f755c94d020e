//! Times of the changes that EndpointSlices show: the service proxy and cluster DNS measure how long a change takes to
//! reach the node.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use coracle_dns::{Metrics, ServiceKind};
use coracle_services::{EndpointSlice, Tables, is_headless};
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

/// Annotation of EndpointSlices with the time of the change, in RFC 3339.
const ANNOTATION: &str = "endpoints.kubernetes.io/last-change-trigger-time";
/// Maximum times that wait for the service proxy. Further times are not counted.
const TIMES_MAX: usize = 1000;

/// The times that the service proxy has not counted yet.
#[derive(Debug)]
pub(super) struct TriggerTimes {
    /// Earlier changes are not counted, as in kube-proxy.
    start: Timestamp,
    times: Mutex<Vec<Timestamp>>,
    /// The metrics of cluster DNS, if this node serves it.
    dns: OnceLock<Arc<Metrics>>,
}

impl Default for TriggerTimes {
    fn default() -> Self {
        Self { start: Timestamp::now(), times: Mutex::default(), dns: OnceLock::new() }
    }
}

// === impl TriggerTimes ===

impl TriggerTimes {
    /// Sets the metrics of cluster DNS. They can be set once.
    pub(super) fn measure_dns(&self, metrics: Arc<Metrics>) {
        let _is_set = self.dns.set(metrics);
    }

    /// Adds the time of a changed slice. Cluster DNS reads the tables, so it serves the change already. `kind` is the
    /// kind of the slice's service, `None` if the service is unknown.
    pub(super) fn add(&self, time: Timestamp, kind: Option<ServiceKind>) {
        if time <= self.start {
            return;
        }
        if let Some((metrics, kind)) = self.dns.get().zip(kind) {
            // The clocks of machines differ: a negative duration counts as 0.
            let took = Timestamp::now().duration_since(time);
            metrics.programmed(kind, Duration::try_from(took).unwrap_or_default());
        }
        let mut times = self.times.lock().unwrap_or_else(PoisonError::into_inner);
        if times.len() < TIMES_MAX {
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

/// The kind of the slice's service. `None` if the service is unknown. As in CoreDNS, a service whose slices have the
/// annotation counts as a service with a selector.
pub(super) fn kind(tables: &Tables, slice: &EndpointSlice) -> Option<ServiceKind> {
    let service = tables.get(slice.metadata.namespace.as_deref()?, slice.service()?)?;
    Some(if is_headless(service) { ServiceKind::HeadlessWithSelector } else { ServiceKind::ClusterIp })
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
        times.add(of(&slice("2020-01-01T00:00:00Z")).unwrap(), None);
        assert!(times.take().is_empty());
        let later = of(&slice("9000-01-01T00:00:00.5Z")).unwrap();
        (0..=TIMES_MAX).for_each(|_| times.add(later, None));
        assert_eq!(times.take(), vec![later; TIMES_MAX]);
        assert!(times.take().is_empty());
    }
}
