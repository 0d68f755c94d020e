//! Changes of the overlay that the Node reports.
//!
//! By its own annotations, another node can change the faults of the paths to itself at any time. Without a limit, all
//! nodes would write their status as often. So changes of the faults alone have a minimum interval.

use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;

use crate::deadline::until;
use crate::overlay::State;

/// Minimum time between two updates of the Node because of faults.
const MIN_FAULT_INTERVAL: Duration = Duration::from_secs(5);

/// Changes of the state of the overlay.
pub(super) struct OverlayChanges {
    states: watch::Receiver<State>,
    /// The state at the last reported change.
    reported: State,
    /// Earliest time of the next update for faults.
    next: Instant,
}

// === impl OverlayChanges ===

impl OverlayChanges {
    pub(super) fn new(states: watch::Receiver<State>) -> Self {
        Self { states, reported: State::default(), next: Instant::now() }
    }

    /// Waits until a change must be reported. Cancel-safe.
    pub(super) async fn changed(&mut self) {
        loop {
            let (is_urgent, has_new_faults) = self.difference();
            if is_urgent || has_new_faults && Instant::now() >= self.next {
                break;
            }
            let due = has_new_faults.then_some(self.next);
            // Both arms are cancel-safe: the states are compared again.
            tokio::select! {
                // The sender is dropped only when the agent ends.
                changed = self.states.changed() => if changed.is_err() { std::future::pending().await },
                () = until(due) => {}
            }
        }
        self.reported = self.states.borrow_and_update().clone();
        self.next = Instant::now() + MIN_FAULT_INTERVAL;
    }

    /// Whether the current state differs from the reported one, except in its faults, and whether its faults differ.
    fn difference(&mut self) -> (bool, bool) {
        let (state, reported) = (self.states.borrow_and_update(), &self.reported);
        let is_urgent = state.reached != reported.reached || state.announced != reported.announced;
        (is_urgent, state.impaired != reported.impaired)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::timeout;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn faults_are_reported_with_an_interval_and_other_changes_at_once() {
        let (sender, states) = watch::channel(State::default());
        let mut changes = OverlayChanges::new(states);
        let fault = |text: &str| sender.send_modify(|state| state.impaired = vec![text.to_owned()]);
        let begun = Instant::now();
        fault("one");
        changes.changed().await;
        fault("two");
        assert!(timeout(MIN_FAULT_INTERVAL / 2, changes.changed()).await.is_err());
        sender.send_modify(|state| state.reached = Some(Ok(())));
        changes.changed().await;
        assert!(begun.elapsed() < MIN_FAULT_INTERVAL);
        fault("three");
        fault("two");
        assert!(timeout(MIN_FAULT_INTERVAL * 2, changes.changed()).await.is_err(), "the same faults again");
        fault("four");
        changes.changed().await;
        assert_eq!(changes.reported.impaired, ["four"]);
    }
}
