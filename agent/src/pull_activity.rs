//! Whether images are being pulled, imported or exported. The disk space of this work does not count as usage of pods.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The pulls, imports and exports of this node. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct PullActivity(Arc<Mutex<Pulls>>);

/// A running pull, import or export. Dropping this value ends it.
#[derive(Debug)]
pub struct ActivePull(PullActivity);

#[derive(Debug, Default)]
struct Pulls {
    running: usize,
    /// End of the last pull.
    ended: Option<Instant>,
}

// === impl PullActivity ===

impl PullActivity {
    /// Records the start of a pull.
    pub fn begin(&self) -> ActivePull {
        self.lock().running += 1;
        ActivePull(self.clone())
    }

    /// Whether a pull is running, or ran at any time after `since`.
    pub fn was_active_since(&self, since: Instant) -> bool {
        let pulls = self.lock();
        pulls.running > 0 || pulls.ended.is_some_and(|ended| ended >= since)
    }

    fn lock(&self) -> MutexGuard<'_, Pulls> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for ActivePull {
    fn drop(&mut self) {
        let mut pulls = self.0.lock();
        pulls.running -= 1;
        pulls.ended = Some(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_pull_counts_while_it_runs_and_for_the_time_in_which_it_ran() {
        let (activity, begin) = (PullActivity::default(), Instant::now());
        let later = begin + Duration::from_secs(3600);
        assert!(!activity.was_active_since(begin), "there was no pull");
        let (first, second) = (activity.begin(), activity.begin());
        drop(first);
        assert!(activity.was_active_since(later), "the second one is running");
        drop(second);
        assert!(activity.was_active_since(begin) && !activity.was_active_since(later));
    }
}
