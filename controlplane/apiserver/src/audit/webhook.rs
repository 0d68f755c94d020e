//! The client of the webhook backend. Source: `k8s.io/apiserver/plugin/pkg/audit/webhook`.

use std::{path::Path, time::Duration};

use crate::remote::Remote;

/// Timeout of sending a request with events, including all attempts.
const TIMEOUT: Duration = Duration::from_secs(30);

/// The client of the server that a kubeconfig file names.
///
/// # Errors
/// The file cannot be used.
pub(super) fn remote(file: &Path, backoff: Option<Duration>) -> Result<Remote, String> {
    let remote = Remote::read(file, TIMEOUT).map_err(|reason| format!("{}: {reason}", file.display()))?;
    let remote = remote.with_connection_retries();
    Ok(match backoff {
        Some(first) => remote.with_retry_backoff(first),
        None => remote,
    })
}

/// The EventList of encoded events that are separated by commas.
pub(super) fn list(events: &str) -> String {
    format!(r#"{{"kind":"EventList","apiVersion":"audit.k8s.io/v1","metadata":{{}},"items":[{events}]}}"#)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::remote::tests::Hook;

    #[tokio::test]
    async fn a_failed_request_is_repeated_four_times_after_a_configured_back_off() {
        let hook = Hook::start(|_| (500, String::new())).await;
        let remote = remote(&hook.file(), Some(Duration::from_millis(1))).unwrap();
        remote.post_text("{}".into()).await.unwrap_err();
        assert_eq!(hook.count(), 5);
    }
}
