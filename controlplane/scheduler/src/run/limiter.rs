//! Limits the time that the searches of one namespace take from the pods of other namespaces.
//!
//! One search for devices is limited, but takes up to a few seconds, and a namespace can have many pods. Its users write
//! the selectors and constraints of the claims. Gangs are limited too, because their pods may have claims.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use crate::devices::may_use_devices;
use crate::object::Pod;
use coracle_values::object::ObjectExt;

/// For this many times its duration, an attempt counts as debt of its namespace. So a namespace uses at most a tenth of
/// the scheduler's time.
const SHARE: u32 = 10;
/// The debt above which the pods of a namespace wait: that of attempts of two seconds.
const MAX_DEBT: Duration = Duration::from_secs(20);
/// Maximum duration of an attempt that does not count, because attempts for pods without claims can take as long.
const SHORT: Duration = Duration::from_millis(10);

/// The debts of namespaces. A debt decreases as time passes.
#[derive(Debug, Default)]
pub(super) struct SearchLimiter {
    /// The time at which each namespace has no debt any more.
    debts: HashMap<String, Instant>,
}

// === impl SearchLimiter ===

impl SearchLimiter {
    /// The namespace whose share an attempt for the pod uses. `None` if attempts for the pod are not limited.
    pub(super) fn payer(pod: &Pod) -> Option<String> {
        (may_use_devices(pod) || pod.group().is_some()).then(|| pod.namespace().to_owned())
    }

    /// The time until which the pods of a namespace wait. `None` if they need not wait.
    pub(super) fn rest_until(&self, namespace: &str, now: Instant) -> Option<Instant> {
        let paid_at = *self.debts.get(namespace)?;
        (paid_at.saturating_duration_since(now) > MAX_DEBT).then(|| paid_at - MAX_DEBT)
    }

    /// Records the duration of an attempt for a pod of a namespace.
    pub(super) fn used(&mut self, namespace: String, took: Duration, now: Instant) {
        if took <= SHORT {
            return;
        }
        self.debts.retain(|_, paid_at| *paid_at > now);
        *self.debts.entry(namespace).or_insert(now) += took * SHARE;
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::super::{Client, ExtenderCalls, Scheduler, SchedulerConfig};
    use super::*;
    use crate::fixture;

    #[test]
    fn a_namespace_uses_a_tenth_of_the_time_after_two_seconds_of_searches() {
        let (mut limiter, start) = (SearchLimiter::default(), Instant::now());
        let of = |name: &str| name.to_owned();
        for _ in 0..1000 {
            limiter.used(of("short"), SHORT, start);
        }
        limiter.used(of("a"), Duration::from_secs(2), start);
        assert_eq!(limiter.rest_until("short", start), None);
        assert_eq!(limiter.rest_until("a", start), None);
        limiter.used(of("a"), Duration::from_secs(3), start);
        assert_eq!(limiter.rest_until("b", start), None, "another namespace");
        let until = limiter.rest_until("a", start).unwrap();
        assert_eq!(until - start, Duration::from_secs(30));
        assert_eq!(limiter.rest_until("a", until), None);
        limiter.used(of("b"), Duration::from_secs(1), until + MAX_DEBT);
        assert_eq!(limiter.debts.keys().collect::<Vec<_>>(), ["b"], "a debt that is paid needs no memory");
    }

    #[tokio::test]
    async fn pods_with_claims_of_a_namespace_with_long_searches_wait_and_other_pods_do_not() {
        let service = tower::service_fn(|_request: Request<Body>| async {
            Ok::<_, Infallible>(Response::new(Body::from(b"{}".to_vec())))
        });
        let (client, config) = (Client::new(service, ""), SchedulerConfig::default());
        let (recorder, _) = coracle_events::recorder(client.clone(), "");
        let calls = ExtenderCalls::new(&config).unwrap();
        let is_saturated = tokio::sync::watch::Sender::new(false);
        let mut scheduler = Scheduler::new(client, config, (recorder, is_saturated), calls);
        scheduler.snapshot.set_node(&fixture::node("a", json!({})));
        let with_claim = json!({"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]});
        scheduler.searches.used("d".to_owned(), Duration::from_secs(600), Instant::now());
        scheduler.queue.add(fixture::pod("with-claim", with_claim));
        scheduler.schedule_next();
        // Without a limit the pod would be gated, because its claim does not exist.
        assert!(scheduler.queue.due().is_some_and(|due| due > Instant::now()));
        scheduler.queue.add(fixture::pod("other", json!({"containers": [{}]})));
        scheduler.schedule_next();
        assert!(scheduler.assumed.contains("other"));
    }
}
