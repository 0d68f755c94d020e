//! Delays between the lists of a plugin: a list can cause writes of the statuses of the Node and of pods. Pure.

use std::time::Duration;

/// Delay after a list of a plugin that lists rarely.
const MIN_DELAY: Duration = Duration::from_millis(100);
/// Maximum delay: the interval in which a kubelet updates the status of its Node (`nodeStatusUpdateFrequency`).
const MAX_DELAY: Duration = Duration::from_secs(10);
/// Lists with changes at longer intervals do not increase the delay.
const QUIET_INTERVAL: Duration = Duration::from_secs(1);

/// The delay after the next list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pace(Duration);

// === impl Pace ===

impl Pace {
    pub(super) fn new() -> Self {
        Self(MIN_DELAY)
    }

    /// The delay after a list. `waited` is the time from the end of the previous delay to the list. The delay doubles
    /// while lists arrive without a break, or change something each second.
    pub(super) fn delay_after(&mut self, waited: Duration, is_changed: bool) -> Duration {
        let quiet = if is_changed { QUIET_INTERVAL } else { MIN_DELAY };
        self.0 = if waited < quiet { (self.0 * 2).min(MAX_DELAY) } else { MIN_DELAY };
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_delay_grows_while_a_plugin_lists_without_end() {
        let mut pace = Pace::new();
        assert_eq!(pace.delay_after(Duration::from_secs(60), true), MIN_DELAY);
        // A second list soon after the first one waits only briefly.
        assert_eq!(pace.delay_after(Duration::ZERO, true), MIN_DELAY * 2);
        let delays: Vec<_> = (0..10).map(|_| pace.delay_after(Duration::ZERO, false)).collect();
        assert!(delays.is_sorted() && delays.last() == Some(&MAX_DELAY), "{delays:?}");
        assert_eq!(pace.delay_after(MIN_DELAY, false), MIN_DELAY, "lists without changes");
        assert_eq!(pace.delay_after(MIN_DELAY, true), MIN_DELAY * 2, "devices that change all the time");
        assert_eq!(pace.delay_after(QUIET_INTERVAL, true), MIN_DELAY);
    }
}
