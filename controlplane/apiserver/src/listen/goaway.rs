//! Asks HTTP/2 clients by chance to connect again, so that they spread over several API servers. Source:
//! `WithProbabilisticGoaway` of `k8s.io/apiserver`.

use tokio::sync::Notify;

/// The decision about one connection.
pub(super) struct GoAway {
    /// Probability for each request; 0 for never.
    chance: f64,
    decided: Notify,
}

// === impl GoAway ===

impl GoAway {
    /// The decision about a connection. HTTP/1.1 has no GOAWAY.
    pub(super) fn new(chance: f64, is_http2: bool) -> Self {
        Self { chance: if is_http2 { chance } else { 0.0 }, decided: Notify::new() }
    }

    /// Decides by chance, for one request.
    pub(super) fn decide(&self) {
        if self.chance > 0.0 && rand::random::<f64>() < self.chance {
            self.decided.notify_one();
        }
    }

    /// Waits until a request has decided that the client must connect again. Cancel-safe: a decision without a waiting
    /// task is kept.
    pub(super) async fn decided(&self) {
        self.decided.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    #[test]
    fn a_client_of_http2_must_connect_again_by_chance() {
        for (chance, is_http2, expect) in [(1.0, true, true), (1.0, false, false), (0.0, true, false)] {
            let go_away = GoAway::new(chance, is_http2);
            (0..1000).for_each(|_request| go_away.decide());
            assert_eq!(go_away.decided().now_or_never().is_some(), expect, "{chance} {is_http2}");
            assert!(go_away.decided().now_or_never().is_none(), "one decision is enough");
        }
    }
}
