//! The state of the checks of a plugin's key.

use std::{sync::mpsc, time::Instant};

use super::{CHECK_INTERVAL, RETRY_INTERVAL};

/// The checks of the plugin's key.
pub(super) struct Checks {
    /// Time of the last request for the plugin's key id.
    pub(super) requested: Instant,
    /// Whether the last request has no result yet.
    pub(super) is_running: bool,
    /// The failure of the last check.
    pub(super) failure: Option<Failure>,
    /// Senders of the callers that wait for the running check. A caller continues when its sender is dropped.
    pub(super) callers: Vec<mpsc::Sender<()>>,
}

/// A failure of the plugin.
pub(super) struct Failure {
    /// Time of the first failure since the last success.
    pub(super) since: Instant,
    pub(super) reason: String,
}

// === impl Checks ===

impl Checks {
    /// The state during the first check.
    pub(super) fn running() -> Self {
        Self { requested: Instant::now(), is_running: true, failure: None, callers: Vec::new() }
    }

    /// A receiver for the end of the running check. `None` if no check runs.
    pub(super) fn join(&mut self) -> Option<mpsc::Receiver<()>> {
        if !self.is_running {
            return None;
        }
        let (caller, ended) = mpsc::channel();
        self.callers.push(caller);
        Some(ended)
    }

    /// Whether a check is due. If it is due, the check counts as requested.
    pub(super) fn begin_if_due(&mut self) -> bool {
        let interval = if self.failure.is_some() { RETRY_INTERVAL } else { CHECK_INTERVAL };
        let is_due = !self.is_running && self.requested.elapsed() > interval;
        if is_due {
            self.requested = Instant::now();
            self.is_running = true;
        }
        is_due
    }

    /// Records the result of a check. Then the waiting callers continue.
    pub(super) fn record(&mut self, outcome: &Result<(), String>) {
        self.is_running = false;
        self.callers.clear();
        let before = self.failure.take();
        if let Err(reason) = outcome {
            let since = before.map_or_else(Instant::now, |before| before.since);
            self.failure = Some(Failure { since, reason: reason.clone() });
        }
    }
}
