//! Waits of a request: for webhooks, for other servers, for long functions of other requests, and for seats of its
//! priority level.
//!
//! The SLI metric excludes the time of waits for webhooks and seats. A request that waits for a long time gives its
//! seats back.

use std::{cell::Cell, future::poll_fn, pin::pin, time::Duration};

/// Maximum time that a request waits while it has seats.
const SLOW: Duration = Duration::from_millis(500);

tokio::task_local! {
    /// Waiting time so far of the request that the task handles.
    static WAITED: Cell<Duration>;
    /// Whether the request that the task handles has waited for longer than [`SLOW`].
    static IS_SLOW: Cell<bool>;
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

/// Waits for the answer of another server. After [`SLOW`] the request loses what it [holds](holding).
pub(crate) fn for_server<F: Future>(answer: F) -> impl Future<Output = F::Output> {
    without_seats(answer)
}

/// Runs a wait during which the request needs no seats. After [`SLOW`] the request loses what it [holds](holding).
pub(crate) async fn without_seats<F: Future>(wait: F) -> F::Output {
    let mut wait = pin!(wait);
    if let Ok(output) = tokio::time::timeout(SLOW, wait.as_mut()).await {
        return output;
    }
    // Tasks that do not handle a request hold nothing.
    let _is_request = IS_SLOW.try_with(|is_slow| is_slow.set(true));
    wait.await
}

/// Runs a request that holds a resource of this server, such as seats. The resource is dropped when the request waits
/// for a slow server, or for a long function of another request. Otherwise one slow server, or one user, could use up a
/// resource that all requests share.
pub(crate) async fn holding<T, F: Future>(held: &mut Option<T>, request: F) -> F::Output {
    let running = async move {
        let mut request = pin!(request);
        poll_fn(|context| {
            let polled = request.as_mut().poll(context);
            if IS_SLOW.with(Cell::get) {
                *held = None;
            }
            polled
        })
        .await
    };
    IS_SLOW.scope(Cell::new(false), running).await
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

    #[tokio::test(start_paused = true)]
    async fn a_request_that_waits_for_a_slow_server_loses_what_it_holds() {
        let answer_after = |wait: Duration| for_server(tokio::time::sleep(wait));
        let seats = std::sync::Arc::new(());
        let mut held = Some(seats.clone());
        holding(&mut held, answer_after(SLOW / 2)).await;
        assert!(held.is_some());
        let mut request = Box::pin(holding(&mut held, answer_after(SLOW * 4)));
        assert!(tokio::time::timeout(SLOW * 2, request.as_mut()).await.is_err());
        assert_eq!(std::sync::Arc::strong_count(&seats), 1, "given back during the wait");
        request.await;
        assert!(held.is_none());
        // A wait outside of a request.
        answer_after(SLOW * 2).await;
    }
}
