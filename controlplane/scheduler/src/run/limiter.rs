//! Limits the time that the searches of one namespace take from the pods of other namespaces.
//!
//! One search for devices is limited, but takes up to a few seconds, and a namespace can have many pods. Its users write
//! the selectors and constraints of the claims. While a namespace rests, its gangs wait too, because their pods may have
//! claims.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::Scheduler;
use crate::config::Profile;
use crate::devices::may_use_devices;
use crate::object::Pod;
use coracle_values::object::ObjectExt;

/// For this many times its duration, an attempt counts as debt of its namespace. So a namespace uses at most a tenth of
/// the scheduler's time.
const SHARE: u32 = 10;
/// The debt above which the pods of a namespace wait: that of attempts of two seconds.
const MAX_DEBT: Duration = Duration::from_secs(20);
/// Maximum duration of an attempt for one pod that does not count, because attempts for pods without claims can take as
/// long.
const SHORT: Duration = Duration::from_millis(10);

/// The debts of namespaces. A debt decreases as time passes.
#[derive(Debug, Default)]
pub(super) struct SearchLimiter {
    /// The time at which each namespace has no debt any more.
    debts: HashMap<String, Instant>,
}

/// An attempt for pods of one namespace that may use devices.
#[derive(Debug)]
pub(super) struct LimitedAttempt {
    namespace: String,
    pods: u32,
    start: Instant,
}

// === impl LimitedAttempt ===

impl LimitedAttempt {
    /// Starts an attempt for these pods. `None` if none of them may use devices.
    pub(super) fn start(pods: &[Pod]) -> Option<Self> {
        let namespace = pods.iter().find(|pod| may_use_devices(pod))?.namespace().to_owned();
        let pods = u32::try_from(pods.len()).unwrap_or(u32::MAX);
        Some(Self { namespace, pods, start: Instant::now() })
    }
}

// === impl SearchLimiter ===

impl SearchLimiter {
    /// The time until which a pod waits. `None` if it need not wait.
    pub(super) fn rest_until(&self, pod: &Pod, now: Instant) -> Option<Instant> {
        let paid_at = *self.debts.get(pod.namespace())?;
        let is_limited = may_use_devices(pod) || pod.group().is_some();
        let rests = is_limited && paid_at.saturating_duration_since(now) > MAX_DEBT;
        rests.then(|| paid_at - MAX_DEBT)
    }

    /// Records an attempt that ends now.
    pub(super) fn finish(&mut self, attempt: LimitedAttempt, now: Instant) {
        let took = now.saturating_duration_since(attempt.start);
        if took <= SHORT.saturating_mul(attempt.pods) {
            return;
        }
        self.debts.retain(|_, paid_at| *paid_at > now);
        *self.debts.entry(attempt.namespace).or_insert(now) += took * SHARE;
    }
}

// === impl Scheduler ===

impl Scheduler {
    /// Schedules a popped pod without a gang, and records the attempt.
    pub(super) fn schedule_single(&mut self, pod: Pod, profile: &Profile) {
        let attempt = self.limited(std::slice::from_ref(&pod));
        self.schedule_alone(pod, profile);
        self.finish_limited(attempt);
    }

    /// Starts an attempt for these pods. `None` if devices are searched for none of them.
    pub(super) fn limited(&self, pods: &[Pod]) -> Option<LimitedAttempt> {
        let searches = pods.iter().any(|pod| self.snapshot.devices.searches(pod));
        searches.then(|| LimitedAttempt::start(pods)).flatten()
    }

    /// Records the end of an attempt.
    pub(super) fn finish_limited(&mut self, attempt: Option<LimitedAttempt>) {
        if let Some(attempt) = attempt {
            self.searches.finish(attempt, Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http::{Request, Response};
    use kube::client::Body;
    use serde_json::json;

    use super::super::{Client, ExtenderCalls, SchedulerConfig};
    use super::*;
    use crate::fixture;

    fn with_claim(namespace: &str) -> Pod {
        let spec = json!({"resourceClaims": [{"name": "c", "resourceClaimName": "c"}]});
        let mut pod = fixture::pod("with-claim", spec);
        pod.metadata.namespace = Some(namespace.to_owned());
        pod
    }

    #[test]
    fn a_namespace_uses_a_tenth_of_the_time_after_two_seconds_of_searches() {
        let (mut limiter, now) = (SearchLimiter::default(), Instant::now());
        let spend =
            |limiter: &mut SearchLimiter, (namespace, pods): (&str, u32), took: Duration, start: Instant| {
                let attempt = LimitedAttempt { namespace: namespace.to_owned(), pods, start };
                limiter.finish(attempt, start + took);
            };
        for _ in 0..1000 {
            spend(&mut limiter, ("short", 1), SHORT, now);
            spend(&mut limiter, ("short", 500), 500 * SHORT, now);
        }
        assert_eq!(limiter.rest_until(&with_claim("short"), now), None);
        let start = now + Duration::from_secs(5);
        spend(&mut limiter, ("a", 1), Duration::from_secs(2), now);
        assert_eq!(limiter.rest_until(&with_claim("a"), now + Duration::from_secs(2)), None);
        spend(&mut limiter, ("a", 2), Duration::from_secs(3), now + Duration::from_secs(2));
        assert_eq!(limiter.rest_until(&with_claim("b"), start), None, "another namespace");
        // The debt of 20 s began after two seconds. Then 30 s were added.
        let until = limiter.rest_until(&with_claim("a"), start).unwrap();
        assert_eq!(until - now, Duration::from_secs(2 + 20 + 30) - MAX_DEBT);
        assert_eq!(limiter.rest_until(&with_claim("a"), until), None);
        let mut without = with_claim("a");
        without.spec.resource_claims.clear();
        assert_eq!(limiter.rest_until(&without, start), None, "a pod without claims");
        spend(&mut limiter, ("b", 1), Duration::from_secs(1), until + MAX_DEBT);
        assert_eq!(limiter.debts.keys().collect::<Vec<_>>(), ["b"], "a debt that is paid needs no memory");
    }

    #[test]
    fn a_gang_is_limited_if_one_of_its_pods_may_use_devices() {
        let plain = fixture::pod("plain", json!({"containers": [{}]}));
        assert!(LimitedAttempt::start(&[plain.clone(), plain.clone()]).is_none());
        let attempt = LimitedAttempt::start(&[plain, with_claim("d")]).unwrap();
        assert_eq!((attempt.namespace.as_str(), attempt.pods), ("d", 2));
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
        let attempt = LimitedAttempt::start(&[with_claim("d")]).unwrap();
        scheduler.searches.finish(attempt, Instant::now() + Duration::from_secs(600));
        scheduler.queue.add(with_claim("d"));
        scheduler.schedule_next();
        // Without a limit the pod would be gated, because its claim does not exist.
        assert!(scheduler.queue.due().is_some_and(|due| due > Instant::now()));
        scheduler.queue.add(fixture::pod("other", json!({"containers": [{}]})));
        scheduler.schedule_next();
        assert!(scheduler.assumed.contains("other"));
    }
}
