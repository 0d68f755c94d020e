//! Restarts work that ends by itself: the controllers or the scheduler without leader election.

use std::{future::Future, time::Duration};

use coracle_backoff::Backoff;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Back-off before the first restart. It doubles with each restart.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
/// Maximum back-off. After work that ran for at least this time, the first back-off is used again.
const MAX_BACKOFF: Duration = Duration::from_secs(60);

/// Runs `work` until the shutdown. If `work` ends earlier, it starts again after a back-off.
pub(crate) async fn until_shutdown<F>(
    component: &'static str,
    shutdown: CancellationToken,
    work: impl Fn(CancellationToken) -> F,
) where
    F: Future<Output = ()>,
{
    let mut backoff = Backoff::new(FIRST_BACKOFF, MAX_BACKOFF);
    loop {
        let began = Instant::now();
        let running = work(shutdown.clone());
        running.await;
        if shutdown.is_cancelled() {
            return;
        }
        if began.elapsed() >= MAX_BACKOFF {
            backoff.reset();
        }
        let delay = backoff.next_delay();
        tracing::error!(component, seconds = delay.as_secs(), "a component ended by itself and starts again");
        tokio::select! {
            // Cancel-safe: both futures only wait.
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(delay) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn work_that_ends_by_itself_starts_again_with_a_growing_back_off() {
        let (shutdown, start) = (CancellationToken::new(), Instant::now());
        let starts = Mutex::new(Vec::new());
        let work = |token: CancellationToken| {
            let number = {
                let mut starts = starts.lock().unwrap();
                starts.push(start.elapsed().as_secs());
                starts.len()
            };
            async move {
                match number {
                    1..=3 => {}
                    // This run takes long enough to reset the back-off.
                    4 => tokio::time::sleep(MAX_BACKOFF).await,
                    5 => token.cancel(),
                    _ => unreachable!("the shutdown ends the restarts"),
                }
            }
        };
        until_shutdown("test", shutdown.clone(), work).await;
        assert_eq!(*starts.lock().unwrap(), [0, 1, 3, 7, 68]);
        assert!(shutdown.is_cancelled());
    }

    #[tokio::test(start_paused = true)]
    async fn the_shutdown_ends_the_back_off() {
        let shutdown = CancellationToken::new();
        let (running, stopping) = (shutdown.clone(), shutdown.clone());
        let work = until_shutdown("test", running, |_token| std::future::ready(()));
        let stop = async {
            tokio::time::sleep(FIRST_BACKOFF / 2).await;
            stopping.cancel();
        };
        let start = Instant::now();
        tokio::join!(work, stop);
        assert_eq!(start.elapsed(), FIRST_BACKOFF / 2);
    }
}
