//! Connections to shims that ended while both sides live: the shim could not read what it was sent, or we what it
//! sent, or it cut us off since we were too far behind. It serves whoever connects last, and the run directory has one
//! runtime at a time: a connection that is made again takes nobody else's place.

use std::sync::{Arc, Weak};
use std::time::Duration;

use coracle_proto::shim::State;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use crate::runtime::{Inner, Runtime};
use crate::sandbox::Sandbox;
use crate::shim_client::{Reached, Shim};

/// The rest before the first new connection, and the longest one.
const RESTS: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

/// A connection that lasted that long was a good one.
const GOOD: Duration = Duration::from_secs(60);

/// How long to rest before the next connection to a shim.
#[derive(Debug)]
pub(crate) struct Rest {
    next: Duration,
    connected: Instant,
}

// === impl Rest ===

impl Rest {
    pub(crate) fn new() -> Self {
        Self { next: RESTS.0, connected: Instant::now() }
    }

    fn take(&mut self) -> Duration {
        let rest = self.next;
        self.next = (rest * 2).min(RESTS.1);
        rest
    }

    fn connected(&mut self) {
        self.connected = Instant::now();
    }

    fn ended(&mut self) {
        if self.connected.elapsed() > GOOD {
            self.next = RESTS.0;
        }
    }
}

/// Connects again to a shim that lives, and catches up with it. None when its pod, the runtime or the shim itself is
/// about to end.
pub(crate) async fn connect_again(
    runtime: &Weak<Inner>,
    sandbox: &Arc<Sandbox>,
    shim: &Shim,
    rest: &mut Rest,
) -> Option<Shim> {
    rest.ended();
    loop {
        tokio::select! {
            // Both arms only wait.
            () = sleep(rest.take()) => {}
            () = shim.died() => return None,
        }
        if sandbox.is_over() || runtime.strong_count() == 0 {
            return None;
        }
        match connected(shim).await {
            Ok((shim, state)) => {
                let runtime = Runtime { inner: runtime.upgrade()? };
                rest.connected();
                info!(sandbox = sandbox.id, "connected to the shim again");
                return runtime.shim_linked(sandbox, &shim, state).await.then_some(shim);
            }
            Err(error) => warn!(sandbox = sandbox.id, %error, "could not connect to the shim again"),
        }
    }
}

/// One that does not answer is waited for as long as it lives.
async fn connected(shim: &Shim) -> Result<(Shim, State), crate::shim_client::Error> {
    match shim.reach_again().await? {
        Reached::Answers(shim, state) => Ok((shim, state)),
        Reached::Silent(shim) => {
            let state = shim.hello().await?;
            Ok((shim, state))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn rests_grow_until_a_connection_was_a_good_one() {
        let mut rest = Rest::new();
        assert_eq!([(); 3].map(|()| rest.take().as_millis()), [100, 200, 400]);
        rest.connected();
        rest.ended();
        assert_eq!(rest.take().as_millis(), 800);
        assert_eq!((0..20).map(|_| rest.take()).max(), Some(RESTS.1));
        rest.connected();
        tokio::time::advance(GOOD * 2).await;
        rest.ended();
        assert_eq!(rest.take(), RESTS.0);
    }
}
