//! Limits the rate at which one source can guess passwords.
//!
//! A password has less entropy than a token. After [`BURST`] wrong passwords a source may send one password per
//! [`PERIOD`]; further passwords are refused without a check. All wrong passwords are counted, including the passwords
//! of parallel requests that started below the limit. So parallel requests do not increase the mean rate.

use std::{
    hash::{BuildHasher as _, RandomState},
    net::IpAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Number of wrong passwords of a source that are checked without a pause.
const BURST: u32 = 10;
/// Time after which a source gets another attempt.
const PERIOD: Duration = Duration::from_secs(1);
/// Number of counters. Sources share them by a keyed hash, so the memory is constant.
const COUNTERS: usize = 1024;

/// Counters of the wrong passwords of all sources.
pub(super) struct GuessLimit {
    hasher: RandomState,
    /// Time of each counter at which all attempts are available again. `None` if all attempts are available now.
    full: Mutex<Box<[Option<Instant>]>>,
}

// === impl GuessLimit ===

impl GuessLimit {
    pub(super) fn new() -> Self {
        Self { hasher: RandomState::new(), full: Mutex::new(vec![None; COUNTERS].into()) }
    }

    /// Whether a password of this source may be checked now.
    pub(super) fn allows(&self, source: Option<IpAddr>, now: Instant) -> bool {
        let at = self.counter(source);
        let full = self.counters().get(at).copied().flatten();
        full.is_none_or(|full| full.saturating_duration_since(now) <= PERIOD * (BURST - 1))
    }

    /// Counts a wrong password.
    pub(super) fn failed(&self, source: Option<IpAddr>, now: Instant) {
        let at = self.counter(source);
        if let Some(full) = self.counters().get_mut(at) {
            *full = Some(full.map_or(now, |full| full.max(now)) + PERIOD);
        }
    }

    fn counter(&self, source: Option<IpAddr>) -> usize {
        let source = source.map(coracle_connections::source).unwrap_or_default();
        let hash = self.hasher.hash_one(source) % COUNTERS as u64;
        usize::try_from(hash).unwrap_or_default()
    }

    fn counters(&self) -> MutexGuard<'_, Box<[Option<Instant>]>> {
        self.full.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_gets_ten_guesses_then_one_a_second_and_others_are_not_affected() {
        let limit = GuessLimit::new();
        let (a, same) = ("2001:db8::1".parse().ok(), "2001:db8::2".parse().ok());
        let others = (1..=64_u32).map(|number| IpAddr::V4(number.into()));
        // Another source with another counter.
        let other = others.map(Some).find(|other| limit.counter(*other) != limit.counter(a)).unwrap();
        let start = Instant::now();
        for _ in 0..BURST {
            assert!(limit.allows(a, start));
            limit.failed(a, start);
        }
        assert!(!limit.allows(a, start) && !limit.allows(same, start) && limit.allows(other, start));
        let later = start + PERIOD;
        assert!(limit.allows(a, later));
        limit.failed(a, later);
        assert!(!limit.allows(a, later) && limit.allows(a, later + PERIOD));
        let rested = later + PERIOD * BURST;
        for _ in 0..BURST {
            assert!(limit.allows(a, rested));
            limit.failed(a, rested);
        }
        assert!(!limit.allows(a, rested));
    }
}
