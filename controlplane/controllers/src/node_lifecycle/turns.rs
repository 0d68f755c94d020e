//! When a node of a zone may be given up: one at a time. Pure.

use std::time::Duration;

use tokio::time::Instant;

/// The turns of a zone's nodes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turns {
    /// Between two of them; nothing while none may be given up.
    interval: Option<Duration>,
    next: Instant,
}

// === impl Turns ===

impl Turns {
    /// Of a zone that is seen for the first time: its first node need not wait.
    pub(crate) fn new(interval: Option<Duration>, now: Instant) -> Self {
        Self { interval, next: now }
    }

    /// Goes on at another pace; false when it is the same. Who waits does so for an interval of the new pace: what was
    /// slow goes on soon when its zone has recovered, and where none could be given up, nodes that come back with the
    /// first one have time to say so.
    pub(crate) fn pace(&mut self, interval: Option<Duration>, now: Instant) -> bool {
        let changes = interval != self.interval;
        if changes && (self.interval.is_none() || self.next > now) {
            self.next = now + interval.unwrap_or_default();
        }
        self.interval = interval;
        changes
    }

    /// The time until the next turn; nothing when that is not known.
    pub(crate) fn left(&self, now: Instant) -> Option<Duration> {
        self.interval.map(|_| self.next.saturating_duration_since(now))
    }

    /// A node took its turn.
    pub(crate) fn taken(&mut self, now: Instant) {
        self.next = now + self.interval.unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Option<Duration> = Some(Duration::from_secs(10));
    const SLOW: Option<Duration> = Some(Duration::from_secs(100));

    /// Seconds until the next turn, after these changes of pace, each at a second.
    fn left(changes: &[(u64, Option<Duration>)], taken_at: Option<u64>, at: u64) -> Option<u64> {
        let zero = Instant::now();
        let time = |second: u64| zero + Duration::from_secs(second);
        let mut turns = Turns::new(FAST, zero);
        if let Some(second) = taken_at {
            turns.taken(time(second));
        }
        for (second, interval) in changes {
            turns.pace(*interval, time(*second));
        }
        turns.left(time(at)).map(|left| left.as_secs())
    }

    #[test]
    fn one_at_a_time_and_the_first_at_once() {
        assert_eq!(left(&[], None, 0), Some(0));
        assert_eq!(left(&[], Some(0), 3), Some(7));
        assert_eq!(left(&[], Some(0), 30), Some(0), "what was not used is not saved up");
    }

    #[test]
    fn who_waits_goes_on_waiting_at_the_new_pace() {
        assert_eq!(left(&[(4, SLOW)], Some(0), 4), Some(100));
        assert_eq!(left(&[(4, SLOW), (30, FAST)], Some(0), 30), Some(10));
        assert_eq!(left(&[(4, FAST)], Some(0), 4), Some(6), "the pace is the same");
        assert_eq!(left(&[(4, SLOW)], None, 4), Some(0), "nobody waited");
    }

    #[test]
    fn none_is_given_up_before_an_interval_is_over_that_begins_when_some_may_be_again() {
        assert_eq!(left(&[(4, None)], None, 50), None);
        assert_eq!(left(&[(4, None), (50, FAST)], None, 50), Some(10));
        assert_eq!(left(&[(4, None), (50, SLOW)], Some(0), 60), Some(90));
    }
}
