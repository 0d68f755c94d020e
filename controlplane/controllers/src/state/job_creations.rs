//! The rate at which all jobs of a namespace together create pods.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Time for each pod: 500 pods in a second. Upstream's controllers together send at most 20 requests in a second
/// (`--kube-api-qps`), and one reconcile of a job creates at most 500 pods (`MaxPodCreateDeletePerSync`).
const PER_POD: Duration = Duration::from_millis(2);
/// Maximum credit of a namespace. After a second without creations, its jobs create 500 pods without a wait.
const CREDIT: Duration = Duration::from_secs(1);

/// The start of the credit of each namespace. The credit is the time since the start, at most [`CREDIT`]. Until a start
/// in the future there is no credit. An absent namespace has the maximum credit.
#[derive(Debug, Default)]
pub(crate) struct JobCreations(Mutex<HashMap<String, Instant>>);

// === impl JobCreations ===

impl JobCreations {
    /// Takes the credit for pods of a namespace. Returns the wait before the next attempt if the credit is used up.
    /// Otherwise all pods may be created, even if they cost more than the rest of the credit.
    pub(crate) fn charge(&self, namespace: &str, pods: usize, now: Instant) -> Option<Duration> {
        let cost = PER_POD.saturating_mul(u32::try_from(pods).unwrap_or(u32::MAX));
        let earliest = now.checked_sub(CREDIT).unwrap_or(now);
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(used_up) = all.get_mut(namespace) {
            if *used_up > now {
                return Some(*used_up - now);
            }
            *used_up = (*used_up).max(earliest) + cost;
            return None;
        }
        all.retain(|_, used_up| *used_up > earliest);
        all.insert(namespace.to_owned(), earliest + cost);
        None
    }

    /// Gives back the credit for pods that were not created, for example because a quota refused them.
    pub(crate) fn refund(&self, namespace: &str, pods: usize) {
        let cost = PER_POD.saturating_mul(u32::try_from(pods).unwrap_or(u32::MAX));
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(used_up) = all.get_mut(namespace) {
            *used_up = used_up.checked_sub(cost).unwrap_or(*used_up);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_jobs_of_a_namespace_share_a_rate() {
        let (creations, begin) = (JobCreations::default(), Instant::now());
        let mut created = 0;
        for millis in 0..4000 {
            let now = begin + Duration::from_millis(millis);
            // Twenty jobs try to create 500 pods each, all the time.
            for _ in 0..20 {
                let wait = creations.charge("n", 500, now);
                assert!(wait.is_none_or(|wait| wait <= Duration::from_secs(1)), "{wait:?}");
                created += if wait.is_none() { 500 } else { 0 };
            }
        }
        assert_eq!(created, 2500, "1,000 at once, and 500 after each second");
        let now = begin + Duration::from_millis(3999);
        assert_eq!(creations.charge("other", 500, now), None, "another namespace has its own rate");
    }

    #[test]
    fn refused_pods_do_not_use_the_rate() {
        let (creations, now) = (JobCreations::default(), Instant::now());
        for _ in 0..100 {
            assert_eq!(creations.charge("n", 500, now), None);
            creations.refund("n", 500);
        }
        assert_eq!(creations.charge("n", 2000, now), None);
        creations.refund("n", 1000);
        assert_eq!(creations.charge("n", 1, now), Some(Duration::from_secs(1)));
        creations.refund("unknown", 1);
    }

    #[test]
    fn jobs_of_an_ordinary_namespace_do_not_wait() {
        let (creations, now) = (JobCreations::default(), Instant::now());
        assert!((0..500).all(|_| creations.charge("n", 1, now).is_none()));
        let later = now + Duration::from_secs(1);
        assert_eq!(creations.charge("n", 500, later), None);
        creations.charge("other", 1, now + Duration::from_secs(60));
        assert_eq!(creations.0.lock().unwrap().len(), 1, "namespaces without creations are forgotten");
    }
}
