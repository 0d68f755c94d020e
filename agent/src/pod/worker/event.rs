//! Events that start a pass of a worker, and their queues.

use std::time::Duration;

use futures::StreamExt;
use futures::channel::mpsc;
use tokio::sync::Notify;

use super::super::apply::Report;
use super::super::probe::Finding;

/// Delay of events while a job runs. Most of these events are effects of the job, and the end of the job starts a pass.
const JOB_EVENT_DELAY: Duration = Duration::from_millis(50);

/// An event that starts a pass. A change of the desired pod, the end of a job and a timer also start a pass.
pub(super) enum Event {
    Report(Report),
    Finding(Finding),
    /// A container event, or a request of pod sync.
    Woken,
}

/// The sender and the receiver of an unbounded queue. Jobs and probes hold clones of the sender. A queue of tokio would
/// take 2 to 4 kB in each pod even if empty, because it allocates places for 32 items.
pub(super) struct Queue<T> {
    pub(super) sender: mpsc::UnboundedSender<T>,
    pub(super) receiver: mpsc::UnboundedReceiver<T>,
}

// === impl Queue ===

impl<T> Queue<T> {
    pub(super) fn new() -> Self {
        let (sender, receiver) = mpsc::unbounded();
        Self { sender, receiver }
    }
}

/// Waits for the next event. Cancel safe: no event is taken before the function returns.
pub(super) async fn next_event(
    reports: &mut mpsc::UnboundedReceiver<Report>,
    findings: &mut mpsc::UnboundedReceiver<Finding>,
    wake: &Notify,
    has_job: bool,
) -> Event {
    if has_job {
        tokio::time::sleep(JOB_EVENT_DELAY).await;
    }
    tokio::select! {
        Some(report) = reports.next() => Event::Report(report),
        Some(finding) = findings.next() => Event::Finding(finding),
        () = wake.notified() => Event::Woken,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn events_are_delayed_while_a_job_runs() {
        let (mut reports, mut findings, wake) = (Queue::new(), Queue::new(), Notify::new());
        wake.notify_one();
        let begin = tokio::time::Instant::now();
        let event = next_event(&mut reports.receiver, &mut findings.receiver, &wake, true).await;
        assert!(matches!(event, Event::Woken) && begin.elapsed() >= JOB_EVENT_DELAY);
        wake.notify_one();
        // The next event comes at once: the future is ready at the first poll.
        let event = next_event(&mut reports.receiver, &mut findings.receiver, &wake, false);
        assert!(futures::FutureExt::now_or_never(event).is_some());
    }
}
