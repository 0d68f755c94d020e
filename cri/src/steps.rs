//! Timing of calls. With the log filter `steps=debug`, each creation and start of a pod or container logs one line
//! with the milliseconds of every step.

use std::fmt::Write as _;

use tokio::time::Instant;
use tracing::debug;

/// Target of the log filter.
const TARGET: &str = "steps";

/// The steps of one call. Without the filter nothing is measured.
pub(crate) struct Steps {
    began: Instant,
    last: Instant,
    text: Option<String>,
}

// === impl Steps ===

impl Steps {
    pub(crate) fn begin() -> Self {
        let enabled = tracing::enabled!(target: TARGET, tracing::Level::DEBUG);
        let now = Instant::now();
        Self { began: now, last: now, text: enabled.then(String::new) }
    }

    /// Records the end of a step.
    pub(crate) fn done(&mut self, step: &str) {
        let Some(text) = self.text.as_mut() else { return };
        let now = Instant::now();
        // Writing into a string cannot fail.
        let _ = write!(text, "{step} {:.1}, ", milliseconds(now - self.last));
        self.last = now;
    }

    /// Logs all steps of the call.
    pub(crate) fn finish(self, call: &str, id: &str) {
        let Some(text) = self.text else { return };
        let all = milliseconds(self.began.elapsed());
        debug!(target: TARGET, id, "{call}: {text}together {all:.1} ms");
    }
}

fn milliseconds(duration: std::time::Duration) -> f64 {
    duration.as_secs_f64() * 1e3
}
