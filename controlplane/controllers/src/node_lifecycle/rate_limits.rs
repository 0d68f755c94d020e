//! The rate limit of NoExecute taints in a zone: one node at a time. No I/O.

use std::time::Duration;

use tokio::time::Instant;

/// The rate limit of one zone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ZoneRateLimit {
    /// The interval between two nodes. `None` if no node may be tainted.
    interval: Option<Duration>,
    next: Instant,
}

// === impl ZoneRateLimit ===

impl ZoneRateLimit {
    /// A new zone: its first node does not wait.
    pub(crate) fn new(interval: Option<Duration>, now: Instant) -> Self {
        Self { interval, next: now }
    }

    /// Changes the interval. Returns false if it is the same.
    ///
    /// A waiting node waits for one new interval from the last change, so that a recovering zone continues soon. When
    /// taints are allowed again, nodes that recover together have one interval to send a heartbeat.
    pub(crate) fn set_interval(&mut self, interval: Option<Duration>, now: Instant) -> bool {
        let changes = interval != self.interval;
        if changes && (self.interval.is_none() || self.next > now) {
            self.next = now + interval.unwrap_or_default();
        }
        self.interval = interval;
        changes
    }

    /// The time until the next node may be tainted. `None` if no node may be tainted.
    pub(crate) fn remaining(&self, now: Instant) -> Option<Duration> {
        self.interval.map(|_| self.next.saturating_duration_since(now))
    }

    /// Records that a node was tainted.
    pub(crate) fn record_taint(&mut self, now: Instant) {
        self.next = now + self.interval.unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAST: Option<Duration> = Some(Duration::from_secs(10));
    const SLOW: Option<Duration> = Some(Duration::from_secs(100));

    /// Seconds until the next node may be tainted. `changes` has the time of each change in seconds, and the new
    /// interval.
    fn remaining(changes: &[(u64, Option<Duration>)], taken_at: Option<u64>, at: u64) -> Option<u64> {
        let zero = Instant::now();
        let time = |second: u64| zero + Duration::from_secs(second);
        let mut rate_limits = ZoneRateLimit::new(FAST, zero);
        if let Some(second) = taken_at {
            rate_limits.record_taint(time(second));
        }
        for (second, interval) in changes {
            rate_limits.set_interval(*interval, time(*second));
        }
        rate_limits.remaining(time(at)).map(|left| left.as_secs())
    }

    #[test]
    fn one_at_a_time_and_the_first_at_once() {
        assert_eq!(remaining(&[], None, 0), Some(0));
        assert_eq!(remaining(&[], Some(0), 3), Some(7));
        assert_eq!(remaining(&[], Some(0), 30), Some(0), "unused permits do not accumulate");
    }

    #[test]
    fn a_waiting_node_waits_by_the_new_interval() {
        assert_eq!(remaining(&[(4, SLOW)], Some(0), 4), Some(100));
        assert_eq!(remaining(&[(4, SLOW), (30, FAST)], Some(0), 30), Some(10));
        assert_eq!(remaining(&[(4, FAST)], Some(0), 4), Some(6), "the pace is the same");
        assert_eq!(remaining(&[(4, SLOW)], None, 4), Some(0), "no node waits");
    }

    #[test]
    fn when_tainting_becomes_possible_again_the_first_node_waits_for_one_interval() {
        assert_eq!(remaining(&[(4, None)], None, 50), None);
        assert_eq!(remaining(&[(4, None), (50, FAST)], None, 50), Some(10));
        assert_eq!(remaining(&[(4, None), (50, SLOW)], Some(0), 60), Some(90));
    }
}
