//! Restarts work that ends by itself: the controllers or the scheduler without leader election.

use std::{future::Future, time::Duration};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Pause before the first restart. It doubles with each restart.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Maximum pause. After work that ran for at least this time, the first pause is used again.
const MAX_PAUSE: Duration = Duration::from_secs(60);

/// Runs `work` until the shutdown. If `work` ends earlier, it starts again after a pause.
pub(crate) async fn until_shutdown<F>(
    component: &'static str,
    shutdown: CancellationToken,
    work: impl Fn(CancellationToken) -> F,
) where
    F: Future<Output = ()>,
{
    let mut pause = FIRST_PAUSE;
    loop {
        let began = Instant::now();
        let running = work(shutdown.clone());
        running.await;
        if shutdown.is_cancelled() {
            return;
        }
        if began.elapsed() >= MAX_PAUSE {
            pause = FIRST_PAUSE;
        }
        tracing::error!(component, seconds = pause.as_secs(), "a component ended by itself and starts again");
        tokio::select! {
            // Cancel-safe: both futures only wait.
            () = shutdown.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn work_that_ends_by_itself_starts_again_with_a_growing_pause() {
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
                    // This run takes long enough to reset the pause.
                    4 => tokio::time::sleep(MAX_PAUSE).await,
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
    async fn the_shutdown_ends_the_pause() {
        let shutdown = CancellationToken::new();
        let (running, stopping) = (shutdown.clone(), shutdown.clone());
        let work = until_shutdown("test", running, |_token| std::future::ready(()));
        let stop = async {
            tokio::time::sleep(FIRST_PAUSE / 2).await;
            stopping.cancel();
        };
        let start = Instant::now();
        tokio::join!(work, stop);
        assert_eq!(start.elapsed(), FIRST_PAUSE / 2);
    }
}
