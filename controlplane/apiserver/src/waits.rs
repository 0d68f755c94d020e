//! The time in which a request waits for others: for webhooks, and for seats of its priority level. The metric of the
//! service level (SLI) does not have this time.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

tokio::task_local! {
    /// The waits of the request that the task handles.
    static WAITED: Cell<Duration>;
}

/// Handles a request. Returns its waits, too.
pub(crate) async fn measure<F: Future>(request: F) -> (F::Output, Duration) {
    let measured = async {
        let output = request.await;
        (output, WAITED.with(Cell::get))
    };
    WAITED.scope(Cell::default(), measured).await
}

/// Adds the duration of a wait to those of the current request.
pub(crate) async fn counted<F: Future>(wait: F) -> F::Output {
    let began = Instant::now();
    let output = wait.await;
    // Work of another task belongs to no request.
    let _is_request = WAITED.try_with(|waited| waited.set(waited.get() + began.elapsed()));
    output
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waits_of_a_request_are_added() {
        let wait = async |millis| {
            counted(tokio::time::sleep(Duration::from_millis(millis))).await;
            counted(std::future::ready(())).await;
        };
        wait(0).await;
        let (output, waited) = measure(async {
            wait(10).await;
            tokio::time::sleep(Duration::from_millis(1)).await;
            wait(5).await;
            7
        })
        .await;
        assert_eq!(output, 7);
        assert!(waited >= Duration::from_millis(15), "{waited:?}");
        assert!(measure(async {}).await.1.is_zero());
    }
}
