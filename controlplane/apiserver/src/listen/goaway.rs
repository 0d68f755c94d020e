//! Asks randomly chosen HTTP/2 clients to connect again, so that they spread over several API servers. Source:
//! `WithProbabilisticGoaway` of `k8s.io/apiserver`.

use http::Response;
use tokio::sync::Notify;

use crate::drain::Refused;

/// The decision about one connection.
pub(super) struct GoAway {
    /// Probability for each request; 0 for never.
    chance: f64,
    is_http2: bool,
    decided: Notify,
}

// === impl GoAway ===

impl GoAway {
    /// The decision about a connection. HTTP/1.1 has no GOAWAY.
    pub(super) fn new(chance: f64, is_http2: bool) -> Self {
        Self { chance: if is_http2 { chance } else { 0.0 }, is_http2, decided: Notify::new() }
    }

    /// Decides for one request: with the probability `chance`, the client must connect again.
    pub(super) fn decide(&self) {
        if self.chance > 0.0 && rand::random::<f64>() < self.chance {
            self.decided.notify_one();
        }
    }

    /// Decides that the client must connect again if the response is a refusal of the shutdown. Returns the response.
    /// HTTP/1.1 has the header `Connection` for this.
    pub(super) fn after<B>(&self, response: Response<B>) -> Response<B> {
        if self.is_http2 && response.extensions().get::<Refused>().is_some() {
            self.decided.notify_one();
        }
        response
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

    #[test]
    fn a_refused_client_of_http2_must_connect_again() {
        let mut refusal = Response::new(());
        refusal.extensions_mut().insert(Refused);
        for (response, is_http2) in [(refusal.clone(), true), (refusal, false), (Response::new(()), true)] {
            let expect = is_http2 && response.extensions().get::<Refused>().is_some();
            let go_away = GoAway::new(0.0, is_http2);
            go_away.after(response);
            assert_eq!(go_away.decided().now_or_never().is_some(), expect);
        }
    }
}
