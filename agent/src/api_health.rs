//! Availability of the API server, shared by all callers that have stored copies. After a failed request the other
//! callers use their copies immediately, instead of waiting for their own timeouts.

use std::future::Future;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) use coracle_events::is_unavailable;
use tokio::time::Instant;

/// Timeout of a request with a stored copy of the response.
const TIMEOUT_WITH_COPY: Duration = Duration::from_secs(2);
/// Timeout of a request without a stored copy.
const TIMEOUT_WITHOUT_COPY: Duration = Duration::from_secs(5);
/// Time after a failure in which no request with a stored copy is sent.
const FAILURE_BACKOFF: Duration = Duration::from_secs(10);

/// A handle to the shared state; cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct ApiHealth {
    last: Arc<Mutex<LastRequest>>,
}

/// The result of the last request that has ended.
#[derive(Clone, Copy, Debug, Default)]
enum LastRequest {
    /// No request has ended since the start.
    #[default]
    Unknown,
    /// The API server responded, possibly with an error.
    Answered,
    /// At this time, a request got no response, or a response that the server is unavailable.
    Failed(Instant),
}

impl ApiHealth {
    /// Whether a request got no response in the last ten seconds, and no later request has got a response.
    pub(crate) fn is_unavailable(&self) -> bool {
        matches!(*self.last(), LastRequest::Failed(at) if at.elapsed() < FAILURE_BACKOFF)
    }

    /// Whether the API server has responded since the start, and no later request has failed.
    pub(crate) fn has_responded(&self) -> bool {
        matches!(*self.last(), LastRequest::Answered)
    }

    /// Records that the API server responded, with any status.
    pub(crate) fn record_response(&self) {
        *self.last() = LastRequest::Answered;
    }

    /// Records that a request got no response.
    pub(crate) fn failed(&self) {
        *self.last() = LastRequest::Failed(Instant::now());
    }

    fn last(&self) -> MutexGuard<'_, LastRequest> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request with a timeout: 2 s with a stored copy of the response, else 5 s.
    ///
    /// # Errors
    /// The request's own error, or a timeout.
    pub(crate) async fn request<T>(
        &self,
        has_copy: bool,
        request: impl Future<Output = Result<T, kube::Error>>,
    ) -> Result<T, kube::Error> {
        let timeout = if has_copy { TIMEOUT_WITH_COPY } else { TIMEOUT_WITHOUT_COPY };
        let answer = tokio::time::timeout(timeout, request).await.unwrap_or_else(|_elapsed| {
            let error = std::io::Error::from(std::io::ErrorKind::TimedOut);
            Err(kube::Error::Service(Box::new(error)))
        });
        match &answer {
            Err(error) if is_unavailable(error) && !is_internal(error) => self.failed(),
            _ => self.record_response(),
        }
        answer
    }
}

/// Whether the API server failed to serve this request. Other requests may succeed: the server cannot read Secrets, for
/// example, while their key management service is away. If such an error counted as no response, pods would start with
/// old copies of other objects. They would also start before the first list of network policies.
fn is_internal(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 500)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn after_one_timeout_stored_copies_are_used_until_a_response_arrives() {
        let health = ApiHealth::default();
        let began = Instant::now();
        assert!(health.request(true, std::future::pending::<Result<(), _>>()).await.is_err());
        assert_eq!(began.elapsed(), TIMEOUT_WITH_COPY);
        assert!(health.is_unavailable() && !health.has_responded());
        tokio::time::advance(FAILURE_BACKOFF).await;
        assert!(!health.is_unavailable(), "time for another try");
        health.failed();
        assert!(health.request(false, async { Ok(()) }).await.is_ok());
        assert!(!health.is_unavailable() && health.has_responded());
    }

    #[tokio::test]
    async fn an_internal_error_of_one_request_does_not_make_the_server_unavailable() {
        let health = ApiHealth::default();
        let request = async |code: u16| {
            let status = kube::core::Status::failure("refused", "Refused").with_code(code);
            let answer = async { Err::<(), _>(kube::Error::Api(Box::new(status))) };
            assert!(health.request(true, answer).await.is_err());
        };
        request(500).await;
        assert!(!health.is_unavailable() && health.has_responded());
        request(503).await;
        assert!(health.is_unavailable() && !health.has_responded());
    }
}
