//! The times for which images of starting pods are pulled. The SLI of pod starts does not include them.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The pulls of pods, by the uid of the pod.
#[derive(Default)]
pub(crate) struct PullTimes(Mutex<HashMap<String, Pulls>>);

/// A running pull. Dropping this value ends it.
pub(crate) struct RunningPull<'a> {
    times: &'a PullTimes,
    uid: &'a str,
}

/// The pulls of one pod. The time between two pulls, for example the back-off of a retry, does not count. Source:
/// `calculateImagePullingTime` of the kubelet.
#[derive(Debug, Default)]
struct Pulls {
    /// Number of running pulls.
    running: usize,
    /// Time since which at least one pull has been running. `None` if no pull runs.
    since: Option<Instant>,
    /// The total time in which at least one pull ran, up to `since` if a pull runs.
    total: Duration,
}

// === impl PullTimes ===

impl PullTimes {
    /// Records the start of a pull.
    pub(crate) fn begin<'a>(&'a self, uid: &'a str) -> RunningPull<'a> {
        self.lock().entry(uid.to_owned()).or_default().begin(Instant::now());
        RunningPull { times: self, uid }
    }

    /// The time in which at least one image of the pod was pulled. Removes the pod.
    pub(crate) fn take(&self, uid: &str) -> Duration {
        let pulls = self.lock().remove(uid).unwrap_or_default();
        pulls.total(Instant::now())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Pulls>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RunningPull<'_> {
    fn drop(&mut self) {
        if let Some(pulls) = self.times.lock().get_mut(self.uid) {
            pulls.end(Instant::now());
        }
    }
}

// === impl Pulls ===

impl Pulls {
    fn begin(&mut self, now: Instant) {
        self.running += 1;
        self.since.get_or_insert(now);
    }

    fn end(&mut self, now: Instant) {
        self.running = self.running.saturating_sub(1);
        if self.running == 0 {
            self.total = self.total(now);
            self.since = None;
        }
    }

    fn total(&self, now: Instant) -> Duration {
        let running = self.since.map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        self.total + running
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_pulls_are_one_time_and_pauses_do_not_count() {
        let zero = Instant::now();
        let at = |seconds: u64| zero + Duration::from_secs(seconds);
        let mut pulls = Pulls::default();
        pulls.begin(at(0));
        pulls.begin(at(3));
        pulls.end(at(5));
        assert_eq!(pulls.total(at(6)), Duration::from_secs(6), "one still runs");
        pulls.end(at(7));
        assert_eq!(pulls.total(at(100)), Duration::from_secs(7));
        pulls.begin(at(100));
        pulls.end(at(102));
        assert_eq!(pulls.total(at(200)), Duration::from_secs(9));
    }

    #[test]
    fn the_time_of_a_pod_is_taken_once() {
        let times = PullTimes::default();
        let (first, second) = (times.begin("u"), times.begin("v"));
        times.take("other");
        drop(first);
        assert_eq!(times.lock().len(), 2);
        times.take("u");
        times.take("v");
        drop(second);
        assert!(times.lock().is_empty(), "the end of a pull does not add the pod again");
    }
}
