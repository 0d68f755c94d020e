//! Retries of requests: which errors are temporary, and how long to wait.

use std::time::Duration;

use jiff::Timestamp;
use reqwest::header::{HeaderMap, RETRY_AFTER};

use super::RegistryError;

/// Maximum attempts for a document.
pub(super) const TRIES: u32 = 4;
/// Maximum delay that a registry may request. If it requests more, the error is returned to the caller.
const REQUESTED_MAX: Duration = Duration::from_secs(30);

/// The delay before a retry after this many consecutive failures. `None` if a retry is pointless.
pub(super) fn delay(error: &RegistryError, failures: u32) -> Option<Duration> {
    if !error.is_temporary() {
        return None;
    }
    match error.requested_delay() {
        Some(requested) if requested > REQUESTED_MAX => None,
        requested => Some(backoff(failures).max(requested.unwrap_or_default())),
    }
}

/// The back-off after this many consecutive failures: 0.1 s, 0.3 s, 0.9 s, then always 2.7 s.
pub(super) fn backoff(failures: u32) -> Duration {
    Duration::from_millis(100 * 3_u64.pow(failures.saturating_sub(1).min(3)))
}

/// Parses `Retry-After`: seconds, or a date (RFC 9110, 10.2.3).
pub(super) fn requested(headers: &HeaderMap, now: Timestamp) -> Option<Duration> {
    let value = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if let Ok(seconds) = value.parse() {
        return Some(Duration::from_secs(seconds));
    }
    let date = jiff::fmt::rfc2822::parse(value).ok()?.timestamp();
    Some(Duration::try_from(date.duration_since(now)).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use reqwest::StatusCode;
    use reqwest::header::{HeaderMap, RETRY_AFTER};

    use super::{delay, requested};
    use crate::registry::RegistryError;

    fn busy(retry_after: Option<u64>) -> RegistryError {
        RegistryError::Status {
            url: String::new(),
            status: StatusCode::TOO_MANY_REQUESTS,
            detail: String::new(),
            retry_after: retry_after.map(Duration::from_secs),
        }
    }

    #[test]
    fn requested_delays_are_respected_up_to_a_maximum() {
        assert_eq!(delay(&busy(None), 1), Some(Duration::from_millis(100)));
        assert_eq!(delay(&busy(None), 3), Some(Duration::from_millis(900)));
        assert_eq!(delay(&busy(Some(2)), 1), Some(Duration::from_secs(2)));
        assert_eq!(delay(&busy(Some(3600)), 1), None);
    }

    #[test]
    fn delays_are_seconds_or_dates() {
        let now = "2026-10-21T07:28:00Z".parse().unwrap();
        for (value, seconds) in [
            ("7", Some(7)),
            ("Wed, 21 Oct 2026 07:28:05 GMT", Some(5)),
            ("Wed, 21 Oct 2020 07:28:05 GMT", Some(0)),
            ("soon", None),
        ] {
            let headers = HeaderMap::from_iter([(RETRY_AFTER, value.parse().unwrap())]);
            assert_eq!(requested(&headers, now), seconds.map(Duration::from_secs), "{value}");
        }
    }
}
