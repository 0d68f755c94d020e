//! Batches the changes of pods that very many services select. Each change of such a pod rewrites all of their
//! endpoints.

use std::time::Duration;

use crate::object::Service;
use crate::queue::{Next, pause_after_endpoints};

/// The period in which all changes of a pod count as one change, by the number of services that select the pod. `None`
/// for few services: every change is then written at once. Upstream has one period for all services, by default 0
/// (`--endpointslice-updates-batch-period`).
fn period(services: usize) -> Option<Duration> {
    const FEW: usize = 10;
    const PER_SERVICE: Duration = Duration::from_millis(10);
    const MAX: Duration = Duration::from_secs(20);
    let all = PER_SERVICE.saturating_mul(u32::try_from(services).unwrap_or(u32::MAX));
    (services > FEW).then_some(all.min(MAX))
}

/// The delay until a changed pod's service is reconciled. `place` is the place of the service among the services of the
/// pod. The reconciles are spread over the second half of the period, so that other services do not wait for all of
/// these reconciles.
pub(crate) fn delay(place: usize, services: usize) -> Option<Duration> {
    let half = period(services)? / 2;
    Some(half + half.mul_f64(place as f64 / services as f64))
}

/// The pause after a reconcile. `sharing` is the number of services that share pods with this service. The pause is
/// half of the period of these services. Without the pause, the service's own write, which queues the service again,
/// would end the batch.
pub(crate) fn pause(endpoints: usize, service: &Service, sharing: usize) -> Next {
    let own = pause_after_endpoints(endpoints, service.spec.ports.as_ref().map_or(0, Vec::len));
    match (own, period(sharing).map(|period| period / 2)) {
        (own, None) => own,
        (Next::Pause(own), Some(shared)) => Next::Pause(own.max(shared)),
        (Next::NotBefore(own), Some(shared)) => Next::NotBefore(own.max(shared)),
        (Next::AfterPause { after, pause }, Some(shared)) => {
            Next::AfterPause { after, pause: pause.max(shared) }
        }
        (Next::Wait | Next::After(_), Some(shared)) => Next::Pause(shared),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_services_are_reconciled_at_once_and_many_are_spread() {
        let service = Service::default();
        assert_eq!(delay(9, 10), None);
        assert!(matches!(pause(99, &service, 10), Next::Wait));
        assert_eq!(
            (delay(0, 20), delay(10, 20)),
            (Some(Duration::from_millis(100)), Some(Duration::from_millis(150)))
        );
        assert!(matches!(pause(99, &service, 20), Next::Pause(delay) if delay.as_millis() == 100));
        assert!(matches!(pause(500, &service, 20), Next::Pause(delay) if delay.as_millis() == 500));
        let last = delay(49_999, 50_000);
        assert!(last.is_some_and(|last| (19..=20).contains(&last.as_secs())), "{last:?}");
    }
}
