//! Reconnecting to a live shim after its connection ended.
//!
//! A connection can end while both processes live: one side cannot read a message, or the shim drops a runtime that
//! reads too slowly. A shim serves the client that connected last. A run directory belongs to one runtime at a time, so
//! a new connection does not replace a connection of another runtime.

use std::time::Duration;

use coracle_backoff::Backoff;
use coracle_proto::shim::State;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::sandbox::Sandbox;
use crate::shim_client::{self, ConnectResult, Shim};

/// Back-off before the first reconnect. It doubles up to [`MAX_BACKOFF`].
const FIRST_BACKOFF: Duration = Duration::from_millis(100);
const MAX_BACKOFF: Duration = Duration::from_secs(10);
/// A connection that lasted this long resets the back-off.
const STABLE: Duration = Duration::from_secs(60);

/// Back-off between connections to a shim.
#[derive(Debug)]
pub(super) struct ReconnectBackoff {
    backoff: Backoff,
    /// Time of the last connection.
    connected: Instant,
}

// === impl ReconnectBackoff ===

impl ReconnectBackoff {
    /// The back-off of a connection that begins now.
    pub(super) fn new() -> Self {
        Self { backoff: Backoff::new(FIRST_BACKOFF, MAX_BACKOFF), connected: Instant::now() }
    }

    fn next_delay(&mut self) -> Duration {
        self.backoff.next_delay()
    }

    fn connected(&mut self) {
        self.connected = Instant::now();
    }

    fn ended(&mut self) {
        if self.connected.elapsed() > STABLE {
            self.backoff.reset();
        }
    }
}

/// Connects again to a live shim. `None` if the pod, the runtime (`is_ending`) or the shim is ending.
pub(super) async fn reconnect(
    shim: &Shim,
    sandbox: &Sandbox,
    backoff: &mut ReconnectBackoff,
    is_ending: impl Fn() -> bool,
) -> Option<(Shim, State)> {
    backoff.ended();
    loop {
        tokio::select! {
            // Cancel safe: both arms only wait.
            () = sleep(backoff.next_delay()) => {}
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

/// Waits for the answer of a silent shim as long as the shim runs.
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
    async fn delays_grow_until_a_connection_was_stable() {
        let mut backoff = ReconnectBackoff::new();
        assert_eq!([(); 3].map(|()| backoff.next_delay().as_millis()), [100, 200, 400]);
        backoff.connected();
        backoff.ended();
        assert_eq!(backoff.next_delay().as_millis(), 800);
        assert_eq!((0..20).map(|_| backoff.next_delay()).max(), Some(MAX_BACKOFF));
        backoff.connected();
        tokio::time::advance(STABLE * 2).await;
        backoff.ended();
        assert_eq!(backoff.next_delay(), FIRST_BACKOFF);
    }
}
