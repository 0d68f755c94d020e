//! Waiting for a deadline that may be absent, in a `select!`.

use tokio::time::Instant;

/// Waits until the time. Without a time, the function never returns. Cancel-safe.
pub(crate) async fn until(time: Option<Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn an_absent_deadline_never_passes() {
        let due = Instant::now() + Duration::from_secs(3);
        until(Some(due)).await;
        assert!(Instant::now() >= due);
        assert!(tokio::time::timeout(Duration::from_secs(3600), until(None)).await.is_err());
    }
}
