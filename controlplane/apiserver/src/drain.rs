//! Refuses new requests at the shutdown, until the requests in flight have ended (`--shutdown-send-retry-after`). The
//! listener stays open until then, so that clients get a response. Source: `WithRetryAfter` and `WithWaitGroup` of
//! `k8s.io/apiserver`.

use std::time::Duration;

use http::{HeaderMap, HeaderValue, Request, Version, header};
use tokio_util::{
    sync::CancellationToken,
    task::{TaskTracker, task_tracker::TaskTrackerToken},
};

use crate::{
    in_flight::is_long_running,
    reply::{self, Reply},
    request::RequestInfo,
    short_lived::ShortLived,
};

/// Prefixes of the paths of probes and metrics. Requests for these paths are served until the end of the shutdown.
const EXEMPT_PATHS: [&str; 4] = ["/readyz", "/livez", "/healthz", "/metrics"];
/// Prefix of the user agent of API servers. Their requests are served until the end of the shutdown.
const EXEMPT_AGENT: &[u8] = b"kube-apiserver/";
/// Seconds after which a client may send a refused request again.
const RETRY_SECONDS: &str = "5";

/// The requests in flight, and whether further requests are refused.
#[derive(Default)]
pub(crate) struct Drain {
    refusing: CancellationToken,
    running: TaskTracker,
}

/// The result of [`Drain::begin`].
pub(crate) enum Begun {
    /// The shutdown waits until all copies of the token are dropped.
    Counted(TaskTrackerToken),
    /// The shutdown does not wait for the request: it is long-running, for a probe or for metrics, or from another API
    /// server.
    NotCounted,
    /// The request must not run.
    Refused,
}

/// Marks a refusal. The connection of its client ends after the running requests.
#[derive(Clone, Copy)]
pub(crate) struct Refused;

fn is_exempt(path: &str, headers: &HeaderMap) -> bool {
    let agent = headers.get(header::USER_AGENT).map(HeaderValue::as_bytes).unwrap_or_default();
    agent.starts_with(EXEMPT_AGENT) || EXEMPT_PATHS.iter().any(|exempt| path.starts_with(exempt))
}

/// The response to a refused request. HTTP/2 has no header `Connection`; its connections end by a GOAWAY.
pub(crate) fn refusal(version: Version) -> Reply {
    let mut reply = reply::text(429, "The apiserver is shutting down, please try again later.\n");
    let headers = reply.headers_mut();
    headers.insert(header::RETRY_AFTER, HeaderValue::from_static(RETRY_SECONDS));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if version < Version::HTTP_2 {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    reply.extensions_mut().insert(ShortLived::default());
    reply.extensions_mut().insert(Refused);
    reply
}

// === impl Drain ===

impl Drain {
    /// Begins a request from the network.
    pub(crate) fn begin<B>(&self, request: &Request<B>) -> Begun {
        if is_exempt(request.uri().path(), request.headers()) {
            return Begun::NotCounted;
        }
        // The request is counted first. Otherwise `finish` could miss a request that is not refused.
        let token = self.running.token();
        if self.refusing.is_cancelled() {
            return Begun::Refused;
        }
        match is_long_running(&RequestInfo::parse(request.method(), request.uri())) {
            true => Begun::NotCounted,
            false => Begun::Counted(token),
        }
    }

    /// Refuses further requests, and waits at most `limit` for the requests in flight.
    pub(crate) async fn finish(&self, limit: Duration) {
        self.refusing.cancel();
        self.running.close();
        if tokio::time::timeout(limit, self.running.wait()).await.is_err() {
            let requests = self.running.len();
            tracing::warn!(requests, "stopping the listener before all requests in flight have ended");
        }
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt as _;

    use super::*;

    fn get(path: &str) -> Request<()> {
        Request::get(path).body(()).unwrap()
    }

    #[tokio::test]
    async fn a_shutdown_waits_for_requests_that_are_not_long_running() {
        let drain = Drain::default();
        let Begun::Counted(running) = drain.begin(&get("/api/v1/pods")) else { panic!("not counted") };
        for path in ["/api/v1/pods?watch=1", "/api/v1/namespaces/a/pods/b/log", "/readyz/shutdown"] {
            assert!(matches!(drain.begin(&get(path)), Begun::NotCounted), "{path}");
        }
        let mut finish = std::pin::pin!(drain.finish(Duration::from_secs(3600)));
        assert!(finish.as_mut().now_or_never().is_none());
        for path in ["/api/v1/pods", "/api/v1/pods?watch=1", "/version"] {
            assert!(matches!(drain.begin(&get(path)), Begun::Refused), "{path}");
        }
        for path in ["/readyz", "/livez/ping", "/healthz", "/metrics/slis"] {
            assert!(matches!(drain.begin(&get(path)), Begun::NotCounted), "{path}");
        }
        let mut of_server = get("/version");
        of_server
            .headers_mut()
            .insert(header::USER_AGENT, HeaderValue::from_static("kube-apiserver/v1.36.0"));
        assert!(matches!(drain.begin(&of_server), Begun::NotCounted));
        assert!(finish.as_mut().now_or_never().is_none());
        drop(running);
        finish.await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_shutdown_does_not_wait_longer_than_its_limit() {
        let drain = Drain::default();
        let Begun::Counted(_running) = drain.begin(&get("/version")) else { panic!("not counted") };
        drain.finish(Duration::from_secs(60)).await;
    }

    #[test]
    fn a_refusal_ends_the_connection_of_its_client() {
        let reply = refusal(Version::HTTP_11);
        assert_eq!(reply.status().as_u16(), 429);
        assert_eq!(reply.headers()["retry-after"], "5");
        assert_eq!(reply.headers()["connection"], "close");
        let reply = refusal(Version::HTTP_2);
        assert!(!reply.headers().contains_key("connection"));
        assert!(reply.extensions().get::<Refused>().is_some());
    }
}
