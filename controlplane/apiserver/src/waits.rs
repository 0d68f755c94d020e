//! Time that a request waits for webhooks and for seats of its priority level. The SLI metric excludes this time.

use std::{cell::Cell, time::Duration};

tokio::task_local! {
    /// Waiting time so far of the request that the task handles.
    static WAITED: Cell<Duration>;
}

/// Runs a request. Returns its output and its total waiting time.
pub(crate) async fn measure<F: Future>(request: F) -> (F::Output, Duration) {
    let measured = async {
        let output = request.await;
        (output, WAITED.with(Cell::get))
    };
    WAITED.scope(Cell::default(), measured).await
}

/// Adds to the waiting time of the current request.
pub(crate) fn add(wait: Duration) {
    // Tasks that do not handle a request have no counter.
    let _is_request = WAITED.try_with(|waited| waited.set(waited.get() + wait));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waits_of_a_request_are_added() {
        add(Duration::from_secs(1));
        let inner = async {
            add(Duration::from_secs(2));
            tokio::task::yield_now().await;
            // A request of the server to itself has its own waits.
            let other = measure(async { add(Duration::from_secs(4)) }).await;
            add(Duration::from_secs(8));
            other.1
        };
        assert_eq!(measure(inner).await, (Duration::from_secs(4), Duration::from_secs(10)));
        assert!(measure(async {}).await.1.is_zero());
    }
}
