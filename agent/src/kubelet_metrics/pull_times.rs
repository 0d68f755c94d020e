//! The times in which images of starting pods are pulled, which do not count as a part of the start.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// From the begin of a pod's first pull to the end of its last one, by the uid of the pod.
#[derive(Default)]
pub(crate) struct PullTimes(Mutex<HashMap<String, [Instant; 2]>>);

/// A running pull. It ends when it is dropped.
pub(crate) struct RunningPull<'a> {
    times: &'a PullTimes,
    uid: &'a str,
}

// === impl PullTimes ===

impl PullTimes {
    /// Records the begin of a pull.
    pub(crate) fn begin<'a>(&'a self, uid: &'a str) -> RunningPull<'a> {
        let now = Instant::now();
        self.lock().entry(uid.to_owned()).or_insert([now, now]);
        RunningPull { times: self, uid }
    }

    /// The time between the begin of the first pull and the end of the last one. Removes the pod.
    pub(crate) fn take(&self, uid: &str) -> Duration {
        let [begin, end] = self.lock().remove(uid).unwrap_or_else(|| [Instant::now(); 2]);
        end.saturating_duration_since(begin)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, [Instant; 2]>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RunningPull<'_> {
    fn drop(&mut self) {
        if let Some([_, end]) = self.times.lock().get_mut(self.uid) {
            *end = Instant::now();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlapping_pulls_are_one_time() {
        let times = PullTimes::default();
        let (first, second) = (times.begin("u"), times.begin("u"));
        drop(first);
        let [begin, after_first] = times.lock()["u"];
        drop(second);
        let [same, end] = times.lock()["u"];
        assert!(begin == same && end >= after_first && after_first >= begin);
        assert_eq!(times.take("u"), end - begin);
        assert!(times.lock().is_empty());
        drop(times.begin("v"));
        times.take("other");
        assert_eq!(times.lock().len(), 1);
    }
}
