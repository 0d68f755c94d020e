//! Whether the API server answers. Shared by all that can go on without it: after one request has failed, the others use
//! what is stored at once instead of waiting for their own timeouts.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub(crate) use coracle_events::is_unavailable;
use tokio::time::Instant;

/// Timeout of a request whose answer is stored.
const WITH_COPY: Duration = Duration::from_secs(2);
/// Timeout of a request whose answer is not.
const WITHOUT_COPY: Duration = Duration::from_secs(5);
/// Time after a failure in which no further request is tried where there is a copy.
const AWAY: Duration = Duration::from_secs(10);

/// Handle; cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct ApiHealth {
    failed: Arc<Mutex<Option<Instant>>>,
}

impl ApiHealth {
    /// Whether a request failed lately, and none has succeeded since.
    pub(crate) fn is_away(&self) -> bool {
        let failed = self.failed.lock().unwrap_or_else(PoisonError::into_inner);
        failed.is_some_and(|at| at.elapsed() < AWAY)
    }

    /// Notes an answer, of whatever content.
    pub(crate) fn answered(&self) {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Notes that there was no answer.
    pub(crate) fn failed(&self) {
        *self.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Makes a request with a timeout: 2 s when its answer is stored, else 5 s.
    ///
    /// # Errors
    /// The request's own, or that it took too long.
    pub(crate) async fn ask<T>(
        &self,
        has_copy: bool,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, kube::Error> {
        let timeout = if has_copy { WITH_COPY } else { WITHOUT_COPY };
        let answer = tokio::time::timeout(timeout, request).await.unwrap_or_else(|_elapsed| {
            let error = std::io::Error::from(std::io::ErrorKind::TimedOut);
            Err(kube::Error::Service(Box::new(error)))
        });
        match &answer {
            Err(error) if is_unavailable(error) => self.failed(),
            _ => self.answered(),
        }
        answer
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_late_answer_spares_the_others_the_wait_and_an_answer_ends_that() {
        let health = ApiHealth::default();
        let began = Instant::now();
        assert!(health.ask(true, std::future::pending::<Result<(), _>>()).await.is_err());
        assert_eq!(began.elapsed(), WITH_COPY);
        assert!(health.is_away());
        tokio::time::advance(AWAY).await;
        assert!(!health.is_away(), "time for another try");
        health.failed();
        assert!(health.ask(false, async { Ok(()) }).await.is_ok());
        assert!(!health.is_away());
    }
}
