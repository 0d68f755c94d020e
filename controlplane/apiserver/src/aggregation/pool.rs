//! Idle connections to the server of one APIService.
//!
//! Only GET and HEAD requests without a body and without an upgrade use these connections. Such a request can be
//! repeated if the server has closed the idle connection. Source: `http.Transport` of Go, which kube-aggregator uses.
//!
//! Idle connections are closed at each change of the APIService, and at each check of the server. A check follows each
//! change of the Service and of its EndpointSlices. Without a change, a check is made every 30 s. So the pool needs no
//! timer.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use http::{Method, Request, Response, header};
use http_body::Body as _;
use hyper::body::Incoming;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::{
    error::Result,
    reply::{Body, full},
    target::{Endpoint, Sender, late, request_failed},
};

/// Maximum idle connections to the server of one APIService.
const MAX_IDLE: usize = 4;
/// Permits for the idle connections to all servers. Without a permit, a connection is closed after its response.
static ALL_IDLE: Semaphore = Semaphore::const_new(32);

/// The idle connections.
#[derive(Default)]
pub(super) struct Pool(Mutex<Vec<Idle>>);

struct Idle {
    endpoint: Endpoint,
    sender: Sender,
    _permit: SemaphorePermit<'static>,
}

/// Whether a request may be sent again if its connection fails before the response.
pub(super) fn is_repeatable(request: &Request<Body>) -> bool {
    matches!(*request.method(), Method::GET | Method::HEAD)
        && request.body().is_end_stream()
        && !request.headers().contains_key(header::UPGRADE)
}

/// The same request without a body.
fn repeated(request: &Request<Body>) -> Request<Body> {
    let mut repeated = Request::new(full(""));
    repeated.method_mut().clone_from(request.method());
    repeated.uri_mut().clone_from(request.uri());
    repeated.headers_mut().clone_from(request.headers());
    repeated
}

// === impl Pool ===

impl Pool {
    /// Sends a [repeatable](is_repeatable) request to an endpoint, on an idle connection or on a new connection. The
    /// connection is idle again after the response. `connect` makes the new connection.
    pub(super) async fn send(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        request: Request<Body>,
        limit: Duration,
        connect: impl Future<Output = Result<Sender>>,
    ) -> Result<Response<Incoming>> {
        if let Some(sender) = self.take(endpoint) {
            let first = repeated(&request);
            match self.exchange(endpoint, sender, first, limit).await? {
                Ok(answer) => return Ok(answer),
                Err(error) => tracing::debug!(%endpoint, %error, "an idle connection has failed"),
            }
        }
        let answer = self.exchange(endpoint, connect.await?, request, limit).await?;
        answer.map_err(|error| request_failed(&endpoint.to_string(), &error))
    }

    /// Closes all idle connections.
    pub(super) fn clear(&self) {
        self.idle().clear();
    }

    /// Sends a request, and waits for the head of the response.
    async fn exchange(
        self: &Arc<Self>,
        endpoint: &Endpoint,
        mut sender: Sender,
        request: Request<Body>,
        limit: Duration,
    ) -> Result<hyper::Result<Response<Incoming>>> {
        let answered = tokio::time::timeout(limit, sender.send_request(request)).await;
        let answered = answered.map_err(|_elapsed| late(&endpoint.to_string(), limit))?;
        if answered.is_ok() {
            let (pool, endpoint) = (Arc::downgrade(self), endpoint.clone());
            coracle_threads::spawn(async move {
                // Ready means that the client has read the whole response. After an error the connection has ended.
                if sender.ready().await.is_ok()
                    && let Some(pool) = pool.upgrade()
                {
                    pool.put(endpoint, sender);
                }
            });
        }
        Ok(answered)
    }

    /// Takes the newest idle connection to an endpoint.
    fn take(&self, endpoint: &Endpoint) -> Option<Sender> {
        let mut idle = self.idle();
        idle.retain(|one| one.sender.is_ready());
        let newest = idle.iter().rposition(|one| one.endpoint == *endpoint)?;
        Some(idle.remove(newest).sender)
    }

    /// Keeps an idle connection. Closes it if there are too many.
    fn put(&self, endpoint: Endpoint, sender: Sender) {
        let mut idle = self.idle();
        idle.retain(|one| one.sender.is_ready());
        if idle.len() < MAX_IDLE
            && let Ok(permit) = ALL_IDLE.try_acquire()
        {
            idle.push(Idle { endpoint, sender, _permit: permit });
        }
    }

    fn idle(&self) -> MutexGuard<'_, Vec<Idle>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use coracle_testing::eventually_async;
    use http_body_util::BodyExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

    use super::*;
    use crate::{error::ApiError, target};

    const LIMIT: Duration = Duration::from_secs(60);

    fn endpoint(address: &str) -> Endpoint {
        Endpoint::of(address, 443).unwrap()
    }

    fn get() -> Request<Body> {
        Request::get("/apis/far.io/v1").header("Host", "far").body(full("")).unwrap()
    }

    /// A connection, and the server's end of the connection.
    async fn connection() -> (Sender, DuplexStream) {
        let (ours, theirs) = tokio::io::duplex(1 << 12);
        (target::open(ours, "far").await.unwrap(), theirs)
    }

    /// Reads a request, and writes a response with the text `yes` or with another head.
    async fn serve(server: &mut DuplexStream, head: &str) {
        let mut request = Vec::new();
        while !request.ends_with(b"\r\n\r\n") {
            request.push(server.read_u8().await.unwrap());
        }
        server.write_all(format!("HTTP/1.1 200 OK\r\n{head}\r\n\r\nyes").as_bytes()).await.unwrap();
    }

    /// Sends a request, reads the response, and waits until the pool has `idle` connections.
    async fn sent(pool: &Arc<Pool>, to: &str, connect: Result<Sender>, idle: usize) -> Vec<u8> {
        let answer = pool.send(&endpoint(to), get(), LIMIT, async { connect }).await.unwrap();
        let body = answer.into_body().collect().await.unwrap().to_bytes().to_vec();
        eventually_async("the connections are idle", 20, async || pool.idle().len() == idle).await;
        body
    }

    fn none() -> Result<Sender> {
        Err(ApiError::unavailable("a second connection"))
    }

    #[tokio::test]
    async fn a_connection_is_used_again_by_requests_to_the_same_endpoint() {
        let pool = Arc::<Pool>::default();
        let ((first, mut server), (second, mut other)) = (connection().await, connection().await);
        let yes = "content-length: 3";
        let (body, ()) = tokio::join!(sent(&pool, "10.0.0.1", Ok(first), 1), serve(&mut server, yes));
        assert_eq!(body, b"yes");
        let (body, ()) = tokio::join!(sent(&pool, "10.0.0.1", none(), 1), serve(&mut server, yes));
        assert_eq!(body, b"yes");
        tokio::join!(sent(&pool, "10.0.0.2", Ok(second), 2), serve(&mut other, yes));
        pool.clear();
        assert!(pool.take(&endpoint("10.0.0.1")).is_none());
        assert_eq!(server.read(&mut [0; 1]).await.unwrap(), 0, "the connection has ended");
    }

    #[tokio::test]
    async fn a_request_is_repeated_if_the_server_has_closed_the_idle_connection() {
        let pool = Arc::<Pool>::default();
        let ((first, mut server), (second, mut other)) = (connection().await, connection().await);
        let yes = "content-length: 3";
        tokio::join!(sent(&pool, "10.0.0.1", Ok(first), 1), serve(&mut server, yes));
        // The server reads the second request, and closes the connection without a response.
        let close = async {
            assert_ne!(server.read(&mut [0; 1 << 10]).await.unwrap(), 0);
            drop(server);
        };
        let (body, (), ()) =
            tokio::join!(sent(&pool, "10.0.0.1", Ok(second), 1), close, serve(&mut other, yes));
        assert_eq!(body, b"yes");
    }

    #[tokio::test]
    async fn a_connection_that_the_server_ends_or_that_is_not_read_to_its_end_is_not_kept() {
        let pool = Arc::<Pool>::default();
        let (first, mut server) = connection().await;
        let last = "content-length: 3\r\nconnection: close";
        tokio::join!(sent(&pool, "10.0.0.1", Ok(first), 0), serve(&mut server, last));
        let (second, mut server) = connection().await;
        let answer = {
            let to = endpoint("10.0.0.1");
            let sending = pool.send(&to, get(), LIMIT, async { Ok(second) });
            tokio::join!(sending, serve(&mut server, "content-length: 300")).0.unwrap()
        };
        drop(answer);
        assert_eq!(server.read(&mut [0; 1]).await.unwrap(), 0, "the connection has ended");
        assert!(pool.take(&endpoint("10.0.0.1")).is_none());
    }

    #[tokio::test]
    async fn few_connections_are_kept() {
        let pool = Arc::<Pool>::default();
        let mut servers = Vec::new();
        for number in 0..=MAX_IDLE {
            let (sender, mut server) = connection().await;
            let to = format!("10.0.0.{number}");
            let kept = MAX_IDLE.min(number + 1);
            tokio::join!(sent(&pool, &to, Ok(sender), kept), serve(&mut server, "content-length: 3"));
            servers.push(server);
        }
        assert_eq!(servers[MAX_IDLE].read(&mut [0; 1]).await.unwrap(), 0, "the connection has ended");
    }

    #[test]
    fn only_reads_without_a_body_and_an_upgrade_are_repeated() {
        let request = |method: Method, body: &'static str, upgrade: bool| {
            let mut request = Request::new(full(body));
            *request.method_mut() = method;
            if upgrade {
                request.headers_mut().insert(header::UPGRADE, header::HeaderValue::from_static("websocket"));
            }
            is_repeatable(&request)
        };
        assert!(request(Method::GET, "", false) && request(Method::HEAD, "", false));
        assert!(!request(Method::GET, "x", false) && !request(Method::GET, "", true));
        assert!(
            ![Method::POST, Method::PUT, Method::PATCH, Method::DELETE]
                .map(|of| request(of, "", false))
                .contains(&true)
        );
        let mut first = get();
        first.headers_mut().append("x-remote-user", header::HeaderValue::from_static("ann"));
        let again = repeated(&first);
        assert_eq!(
            (again.method(), again.uri(), again.headers()),
            (first.method(), first.uri(), first.headers())
        );
    }
}
