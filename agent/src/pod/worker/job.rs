//! The job of a worker that is running.

use std::pin::Pin;
use std::time::Instant;

use tokio_util::sync::CancellationToken;

use super::super::apply::ApplyError;

type JobFuture = Pin<Box<dyn Future<Output = Result<(), Vec<ApplyError>>> + Send>>;

/// A job that is running.
pub(super) struct RunningJob {
    pub(super) future: JobFuture,
    pub(super) interrupt: CancellationToken,
    /// The kubelet's name of the sync: `create`, `sync` or `kill`.
    pub(super) operation: &'static str,
    /// Start of the sync.
    pub(super) begun: Instant,
    /// Grace period in seconds that the job applies to the ending pod. None if the job does not end the pod.
    pub(super) grace: Option<i64>,
}

// === impl RunningJob ===

impl RunningJob {
    /// Interrupts the job if the pod now has to end, or has to end within a shorter grace period.
    pub(super) fn shorten_grace(&mut self, desired: Option<i64>) {
        let is_shorter = match (desired, self.grace) {
            (Some(_), None) => true,
            (Some(desired), Some(current)) => desired < current,
            (None, _) => false,
        };
        if is_shorter {
            self.grace = desired;
            self.interrupt.cancel();
        }
    }
}

/// Waits for the end of the running job. Pending if no job is running.
pub(super) async fn job_end(job: &mut Option<RunningJob>) -> Result<(), Vec<ApplyError>> {
    match job {
        Some(job) => job.future.as_mut().await,
        None => std::future::pending().await,
    }
}
