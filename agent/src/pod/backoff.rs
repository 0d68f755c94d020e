//! Exponential back-off by key: by default 10 s to 300 s, reset after 10 minutes without a failure. For cheap retries
//! it is 1 s to 120 s.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::jiff::{SignedDuration, Timestamp};

const FORGET: SignedDuration = SignedDuration::from_secs(600);

/// Delays by key.
#[derive(Clone, Debug)]
pub(crate) struct KeyedBackoff {
    first: SignedDuration,
    most: SignedDuration,
    entries: BTreeMap<String, Entry>,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    delay: SignedDuration,
    updated: Timestamp,
}

impl Default for KeyedBackoff {
    fn default() -> Self {
        Self {
            first: SignedDuration::from_secs(10),
            most: SignedDuration::from_secs(300),
            entries: BTreeMap::new(),
        }
    }
}

impl KeyedBackoff {
    /// Delays of 1 s to 120 s, for operations that are cheap to retry.
    pub(crate) fn short() -> Self {
        Self { first: SignedDuration::from_secs(1), most: SignedDuration::from_secs(120), ..Self::default() }
    }

    /// Delays of 10 s to `most`. If `most` is shorter than 10 s, all delays are `most`. Source: `newCrashLoopBackOff`
    /// of upstream's `pkg/kubelet`.
    pub(crate) fn up_to(most: Duration) -> Self {
        let most = SignedDuration::try_from(most).unwrap_or(SignedDuration::MAX);
        let default = Self::default();
        Self { first: default.first.min(most), most, ..default }
    }

    /// The end of the wait after the event (an exit or a failed attempt). `None` if the wait has ended.
    pub(crate) fn until(&self, key: &str, event: Timestamp, now: Timestamp) -> Option<Timestamp> {
        let entry = self.entries.get(key)?;
        if entry.forgotten(event) {
            return None;
        }
        let until = event.checked_add(entry.delay).unwrap_or(Timestamp::MAX);
        // A clock that was set back must not extend the wait.
        let latest = now.checked_add(entry.delay).unwrap_or(Timestamp::MAX);
        (now < until).then(|| until.min(latest))
    }

    /// The end of the wait after the last [`KeyedBackoff::fail`]. None if the wait is over.
    pub(crate) fn since_failure(&self, key: &str, now: Timestamp) -> Option<Timestamp> {
        let updated = self.entries.get(key)?.updated;
        self.until(key, updated, now)
    }

    /// Time of the last failure.
    pub(crate) fn failed_at(&self, key: &str) -> Option<Timestamp> {
        self.entries.get(key).map(|e| e.updated)
    }

    /// Counts a failure or a restart: the next wait is longer.
    pub(crate) fn fail(&mut self, key: &str, event: Timestamp, now: Timestamp) {
        let delay = match self.entries.get(key) {
            Some(entry) if !entry.forgotten(event) => (entry.delay * 2).min(self.most),
            _ => self.first,
        };
        self.entries.insert(key.to_owned(), Entry { delay, updated: now });
    }

    /// Resets a key after a success.
    pub(crate) fn clear(&mut self, key: &str) {
        self.entries.remove(key);
    }

    /// The current delay of a key in whole seconds.
    pub(crate) fn seconds(&self, key: &str) -> i64 {
        self.entries.get(key).map_or(0, |e| e.delay.as_secs())
    }
}

impl Entry {
    fn forgotten(&self, event: Timestamp) -> bool {
        event.duration_since(self.updated) > FORGET
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_000_000 + seconds).unwrap()
    }

    #[test]
    fn the_first_failure_does_not_wait_and_the_following_wait_twice_as_long_each() {
        let mut backoff = KeyedBackoff::default();
        assert_eq!(backoff.until("a", at(0), at(0)), None);
        let mut now = 0;
        for expected in [10, 20, 40, 80, 160, 300, 300] {
            backoff.fail("a", at(now), at(now));
            assert_eq!(backoff.until("a", at(now), at(now)), Some(at(now + expected)));
            now += expected;
            assert_eq!(backoff.until("a", at(now - expected), at(now)), None);
        }
    }

    #[test]
    fn the_maximum_of_the_wait_can_be_shorter_than_its_default_and_than_the_first_wait() {
        let waits = |most: u64| {
            let mut backoff = KeyedBackoff::up_to(Duration::from_secs(most));
            [0, 1, 2, 3].map(|now| {
                backoff.fail("a", at(now), at(now));
                backoff.seconds("a")
            })
        };
        assert_eq!(waits(300), [10, 20, 40, 80]);
        assert_eq!(waits(30), [10, 20, 30, 30]);
        assert_eq!(waits(2), [2, 2, 2, 2]);
    }

    #[test]
    fn the_back_off_ends_after_ten_minutes_without_a_failure() {
        let mut backoff = KeyedBackoff::default();
        backoff.fail("a", at(0), at(0));
        backoff.fail("a", at(20), at(20));
        assert_eq!(backoff.until("a", at(621), at(621)), None);
        backoff.fail("a", at(621), at(621));
        assert_eq!(backoff.seconds("a"), 10);
    }
}
