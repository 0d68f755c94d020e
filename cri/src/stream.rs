//! Streams to clients: exec, attach and port-forward, over WebSocket and SPDY/3.1.
//!
//! A client's path contains a token. The token's ticket has the validated request. The upgraded connection goes to a
//! transport, which converts it to channels: `websocket` and `spdy_command` for `command` and `attach`, `websocket` and
//! `spdy_forward` for `forward`.

mod attach;
mod client;
mod command;
mod command_limit;
mod forward;
mod idle;
mod open;
mod pump;
mod queue;
mod spdy;
mod spdy_command;
mod spdy_forward;
mod token;
mod upgrade;
mod websocket;

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use coracle_connections::{
    ACCEPT_RETRY_DELAY, Abandonment, ConnectionPermit, Connections, LogLimit, PermitStream, ReadWatch, Share,
    keep_alive, watch_reads,
};
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use self::client::Client;
pub(crate) use self::forward::Forwarder;
use self::idle::Connection;
use self::spdy::Session;
use self::spdy_command::expected_streams;
pub(crate) use self::token::{StreamRequest, Tokens};
use self::upgrade::{Codec, Protocol, Transport};
use crate::services::execs::ExecService;
use crate::tables::Tables;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::spdy::fuzz as fuzz_spdy;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::spdy_command::fuzz as fuzz_resize;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::websocket::fuzz as fuzz_websocket;

/// Body of a response: a short text. Streams use the upgraded connection.
pub type BoxBody = Full<Bytes>;

/// Timeout for the head of a request.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum bytes of the head of a request: a path with the token, and the headers of the transport.
const HEAD_MAX: usize = 32 << 10;

/// Serves streams: exec, attach and port-forward.
#[derive(Clone)]
pub(crate) struct StreamService {
    pub(crate) tables: Arc<Tables>,
    pub(crate) execs: ExecService,
    pub(crate) forwarder: Forwarder,
    pub(crate) tokens: Arc<Tokens>,
    /// Base URL of streams, without a trailing slash.
    pub(crate) url: Arc<str>,
    /// Time without traffic after which a stream is closed. `None` disables the limit.
    pub(crate) idle_limit: Option<Duration>,
}

// === impl StreamService ===

impl StreamService {
    /// Answers a request for `/exec/{token}`, `/attach/{token}` or `/portforward/{token}`, and serves the stream on the
    /// upgraded connection.
    pub(crate) async fn stream<B: Send>(&self, mut request: Request<B>) -> Response<BoxBody> {
        let path = request.uri().path().trim_matches('/');
        let ticket = path.rsplit_once('/').and_then(|(before, token)| {
            let verb = before.rsplit('/').next().unwrap_or(before);
            self.tokens.take(verb, token)
        });
        let Some(ticket) = ticket else {
            return text(StatusCode::NOT_FOUND, "no such stream: the token is unknown, used or expired");
        };
        let transport = match upgrade::negotiate(request.headers(), &ticket) {
            Ok(transport) => transport,
            Err(refusal) => return text(StatusCode::BAD_REQUEST, refusal),
        };
        let response = transport.response();
        let service = self.clone();
        let permit = request.extensions().get::<Arc<ConnectionPermit>>().cloned();
        let upgraded = hyper::upgrade::on(&mut request);
        coracle_threads::spawn(async move {
            match upgraded.await {
                Ok(connection) => {
                    let (connection, abandonment) = watch_reads(TokioIo::new(connection), permit);
                    service.serve_upgraded(ticket, transport, connection, abandonment).await;
                }
                Err(error) => debug!(%error, "a client did not upgrade its connection"),
            }
        });
        response
    }

    /// Serves a stream until it ends, its idle limit is reached, or its client is gone.
    async fn serve_upgraded(
        &self,
        ticket: StreamRequest,
        transport: Transport,
        connection: ReadWatch<TokioIo<Upgraded>>,
        abandonment: Abandonment,
    ) {
        let (connection, idle) = idle::watch(connection);
        // Clients close standard input and ports by messages of the protocol. So a half-closed connection means that the
        // client has disconnected.
        let abandonment = abandonment.without_half_close();
        tokio::select! {
            // The other arm is dropped; its tasks end with the connection, whose reads and writes fail from now on.
            () = idle.expired(self.idle_limit, abandonment.happened()) => {
                debug!("closed a stream that was idle or whose client has closed the connection");
            }
            () = self.serve_stream(ticket, transport, connection) => {}
        }
    }

    async fn serve_stream(&self, ticket: StreamRequest, transport: Transport, connection: Connection) {
        match (ticket, transport.protocol()) {
            (StreamRequest::PortForward(request), Protocol::WebSocketChannels(_)) => {
                websocket::forward(&self.forwarder, request, connection).await;
            }
            (StreamRequest::PortForward(request), Protocol::WebSocketSpdy) => {
                let session = Session::open(websocket::tunnel(connection));
                spdy_forward::forward(&self.forwarder, &request, session).await;
            }
            (StreamRequest::PortForward(request), Protocol::Spdy) => {
                spdy_forward::forward(&self.forwarder, &request, Session::open(connection)).await;
            }
            (command, Protocol::Spdy) => {
                let (session, wanted) = (Session::open(connection), expected_streams(&command));
                spdy_command::command(session, &wanted, async |client| self.run(command, client).await).await;
            }
            (command, protocol @ (Protocol::WebSocketChannels(_) | Protocol::WebSocketSpdy)) => {
                let codec = match protocol {
                    Protocol::WebSocketChannels(codec) => codec,
                    Protocol::WebSocketSpdy | Protocol::Spdy => Codec::default(),
                };
                websocket::command(connection, codec, async |client| self.run(command, client).await).await;
            }
        }
    }

    async fn run(&self, ticket: StreamRequest, client: Client) {
        match ticket {
            StreamRequest::Exec(request) => command::exec(&self.tables, &self.execs, request, client).await,
            StreamRequest::Attach(request) => attach::attach(&self.tables, request, client).await,
            // `serve_stream` handles port-forward.
            StreamRequest::PortForward(_) => {}
        }
    }
}

fn text(status: StatusCode, text: &str) -> Response<BoxBody> {
    let mut response = Response::new(Full::from(text.to_owned()));
    *response.status_mut() = status;
    response
}

/// Serves streams over HTTP until `shutdown`.
pub(crate) async fn serve(service: StreamService, listener: TcpListener, shutdown: CancellationToken) {
    let connections = Connections::new(Share::StreamConnections.limits());
    let serve = move |connection, permit| {
        coracle_threads::spawn(serve_connection(service.clone(), connection, permit));
    };
    accept(listener, connections, shutdown, serve).await;
}

/// Accepts connections until `shutdown`. Connections above the limits are closed.
async fn accept(
    listener: TcpListener,
    connections: Connections,
    shutdown: CancellationToken,
    serve: impl Fn(TcpStream, Arc<ConnectionPermit>),
) {
    let (refusals, failures) = (LogLimit::default(), LogLimit::default());
    loop {
        let accepted = tokio::select! {
            // Both arms are cancel safe: an accepted connection is always returned.
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (connection, client) = match accepted {
            Ok((connection, client)) => (connection, client.ip()),
            Err(error) => {
                if let Some(suppressed) = failures.allow(IpAddr::V4(Ipv4Addr::UNSPECIFIED)) {
                    warn!(%error, suppressed, "cannot accept a connection for streams");
                }
                sleep(ACCEPT_RETRY_DELAY).await;
                continue;
            }
        };
        let permit = match connections.admit(client) {
            Ok(permit) => Arc::new(permit),
            Err(reason) => {
                if let Some(suppressed) = refusals.allow(client) {
                    warn!(%client, %reason, suppressed, "refused a connection for streams");
                }
                continue;
            }
        };
        keep_alive(&connection);
        serve(connection, permit);
    }
}

/// Serves one connection until it is upgraded or ends, or its permit expires.
async fn serve_connection(service: StreamService, connection: TcpStream, permit: Arc<ConnectionPermit>) {
    let held = PermitStream::of_socket(connection, permit.clone());
    let authenticating = permit.clone();
    let handler = hyper::service::service_fn(move |mut request: Request<Incoming>| {
        let (service, permit) = (service.clone(), authenticating.clone());
        request.extensions_mut().insert(permit.clone());
        async move {
            let response = service.stream(request).await;
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                // The token was valid.
                permit.set_authenticated();
            }
            Ok::<_, Infallible>(response)
        }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_header_size(HEAD_MAX)
        .max_buf_size(HEAD_MAX)
        .serve_connection(TokioIo::new(held), handler)
        .with_upgrades();
    tokio::select! {
        // Both arms may be dropped: this closes the connection.
        served = served => if let Err(error) = served {
            debug!(%error, "a streaming connection failed");
        },
        () = permit.expired() => debug!("closed a streaming connection that was evicted or had no valid token in time"),
    }
}

#[cfg(test)]
mod tests {
    use coracle_connections::Limits;
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn more_silent_connections_than_the_limit_are_closed() {
        let limits = Limits { total: 2, per_source: 2, unauthenticated: 2, unauthenticated_per_source: 2 };
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shutdown = CancellationToken::new();
        // Serves a connection until it is evicted.
        let serve = |connection: TcpStream, permit: Arc<ConnectionPermit>| {
            tokio::spawn(async move {
                permit.evicted().await;
                drop(connection);
            });
        };
        let accepting = tokio::spawn(accept(listener, Connections::new(limits), shutdown.clone(), serve));
        let mut connections = Vec::new();
        for _ in 0..3 {
            connections.push(TcpStream::connect(address).await.unwrap());
        }
        // The third connection is refused, and the oldest connection is evicted.
        for closed in [2, 0] {
            let limit = Duration::from_secs(30);
            let read = tokio::time::timeout(limit, connections[closed].read(&mut [0])).await;
            assert!(matches!(read, Ok(Ok(0) | Err(_))), "connection {closed} is open");
        }
        shutdown.cancel();
        accepting.await.unwrap();
    }
}
