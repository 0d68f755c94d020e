//! Reconnecting to a live shim after its connection ended.
//!
//! A connection can end while both processes live: one side cannot read a message, or the shim drops a runtime that
//! reads too slowly. A shim serves the client that connected last. A run directory belongs to one runtime at a time, so
//! a new connection does not replace a connection of another runtime.

use std::time::Duration;

use coracle_proto::shim::State;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::sandbox::Sandbox;
use crate::shim_client::{self, ConnectResult, Shim};

/// Pause before the first reconnect.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Maximum pause between reconnects.
const MAX_PAUSE: Duration = Duration::from_secs(10);

/// A connection that lasted this long resets the back-off.
const STABLE: Duration = Duration::from_secs(60);

/// Exponential back-off between connections to a shim.
#[derive(Debug)]
pub(super) struct Backoff {
    next: Duration,
    connected: Instant,
}

// === impl Backoff ===

impl Backoff {
    pub(super) fn new() -> Self {
        Self { next: FIRST_PAUSE, connected: Instant::now() }
    }

    fn take(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(MAX_PAUSE);
        pause
    }

    fn connected(&mut self) {
        self.connected = Instant::now();
    }

    fn ended(&mut self) {
        if self.connected.elapsed() > STABLE {
            self.next = FIRST_PAUSE;
        }
    }
}

/// Connects again to a live shim. `None` if the pod, the runtime (`is_ending`) or the shim is ending.
pub(super) async fn reconnect(
    shim: &Shim,
    sandbox: &Sandbox,
    backoff: &mut Backoff,
    is_ending: impl Fn() -> bool,
) -> Option<(Shim, State)> {
    backoff.ended();
    loop {
        tokio::select! {
            // Cancel safe: both arms only wait.
            () = sleep(backoff.take()) => {}
            () = shim.ended() => return None,
        }
        if sandbox.is_over() || is_ending() {
            return None;
        }
        match connect(shim).await {
            Ok(connected) => {
                if is_ending() {
                    return None;
                }
                backoff.connected();
                info!(sandbox = sandbox.id, "connected to the shim again");
                return Some(connected);
            }
            Err(error) => warn!(sandbox = sandbox.id, %error, "cannot connect to the shim again"),
        }
    }
}

/// Waits for the answer of a silent shim as long as the shim lives.
async fn connect(shim: &Shim) -> Result<(Shim, State), shim_client::Error> {
    match shim.reconnect().await? {
        ConnectResult::Answers(shim, state) => Ok((shim, state)),
        ConnectResult::Silent(shim) => {
            let state = shim.hello().await?;
            Ok((shim, state))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn pauses_grow_until_a_connection_was_stable() {
        let mut backoff = Backoff::new();
        assert_eq!([(); 3].map(|()| backoff.take().as_millis()), [100, 200, 400]);
        backoff.connected();
        backoff.ended();
        assert_eq!(backoff.take().as_millis(), 800);
        assert_eq!((0..20).map(|_| backoff.take()).max(), Some(MAX_PAUSE));
        backoff.connected();
        tokio::time::advance(STABLE * 2).await;
        backoff.ended();
        assert_eq!(backoff.take(), FIRST_PAUSE);
    }
}
