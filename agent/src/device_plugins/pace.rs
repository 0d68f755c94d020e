//! Pauses between the lists of a plugin: a list can cause writes of the statuses of the Node and of pods. Pure.

use std::time::Duration;

/// Pause after a list of a plugin that lists rarely.
const SHORT: Duration = Duration::from_millis(100);
/// Maximum pause: the interval in which a kubelet updates the status of its Node (`nodeStatusUpdateFrequency`).
const LONG: Duration = Duration::from_secs(10);
/// Lists with changes at longer intervals do not lengthen the pause.
const QUIET: Duration = Duration::from_secs(1);

/// The pause after the next list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Pace(Duration);

// === impl Pace ===

impl Pace {
    pub(super) fn new() -> Self {
        Self(SHORT)
    }

    /// The pause after a list. `waited` is the time from the end of the previous pause to the list. The pause doubles
    /// while lists arrive without a break, or change something each second.
    pub(super) fn pause_after(&mut self, waited: Duration, is_changed: bool) -> Duration {
        let quiet = if is_changed { QUIET } else { SHORT };
        self.0 = if waited < quiet { (self.0 * 2).min(LONG) } else { SHORT };
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pause_grows_while_a_plugin_lists_without_end() {
        let mut pace = Pace::new();
        assert_eq!(pace.pause_after(Duration::from_secs(60), true), SHORT);
        // A second list soon after the first one waits only briefly.
        assert_eq!(pace.pause_after(Duration::ZERO, true), SHORT * 2);
        let pauses: Vec<_> = (0..10).map(|_| pace.pause_after(Duration::ZERO, false)).collect();
        assert!(pauses.is_sorted() && pauses.last() == Some(&LONG), "{pauses:?}");
        assert_eq!(pace.pause_after(SHORT, false), SHORT, "lists without changes");
        assert_eq!(pace.pause_after(SHORT, true), SHORT * 2, "devices that change all the time");
        assert_eq!(pace.pause_after(QUIET, true), SHORT);
    }
}
