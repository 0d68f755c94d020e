//! Streams to clients: exec, attach and port-forward, over WebSocket and SPDY/3.1.
//!
//! A client comes with a token in its path; the ticket behind it says what it may do. The upgraded
//! connection is given to one of the transports, which turn it into the same few channels:
//! `websocket` and `spdy_command` for `command`, `websocket` and `spdy_forward` for `forward`.

mod command;
mod descriptor;
mod forward;
mod idle;
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
use coracle_connections::{ACCEPT_PAUSE, Connections, Held, Limits, LogLimit, Slot};
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use hyper::upgrade::Upgraded;
use hyper_util::rt::{TokioIo, TokioTimer};
use nix::sys::socket::{setsockopt, sockopt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};

use self::command::Client;
pub(crate) use self::descriptor::Descriptor;
use self::idle::Watched;
use self::spdy::Session;
use self::spdy_command::wanted;
pub(crate) use self::token::{Ticket, Tokens};
use self::upgrade::{Codec, Protocol, Transport};
pub(crate) use self::websocket::MOST_PORTS;
use crate::runtime::Runtime;

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use self::spdy::fuzz as fuzz_spdy;

/// The body of an answer: short texts only, the streams go over the upgraded connection.
pub type BoxBody = Full<Bytes>;

/// What a client's streams go over.
type Connection = Watched<TokioIo<Upgraded>>;

/// How long a client may take to write the head of its request.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// How long a connection is silent before its other end is asked whether it is still there, by the kernel; how long
/// until it is asked again, and how often in vain until the connection ends. Seconds.
const SILENT: u32 = 60;
const ASK_AGAIN: u32 = 15;
const ASK_TIMES: u32 = 4;
/// The port's share of the process's descriptors is one in this many.
const SHARE: u64 = 8;
/// Maximum connections, whatever the descriptor limit.
const CONNECTIONS: usize = 4 << 10;

impl Runtime {
    /// Answers a request for `/exec/{token}`, `/attach/{token}` or `/portforward/{token}` and serves
    /// the stream on the connection that it upgrades.
    pub async fn stream<B: Send>(&self, mut request: Request<B>) -> Response<BoxBody> {
        let path = request.uri().path().trim_matches('/');
        let ticket = path.rsplit_once('/').and_then(|(before, token)| {
            let verb = before.rsplit('/').next().unwrap_or(before);
            self.inner.tokens.take(verb, token)
        });
        let Some(ticket) = ticket else {
            return text(StatusCode::NOT_FOUND, "no such stream: its token is unknown, used or too old");
        };
        let transport = match upgrade::negotiate(request.headers(), &ticket) {
            Ok(transport) => transport,
            Err(refusal) => return text(StatusCode::BAD_REQUEST, refusal),
        };
        let response = transport.response();
        let runtime = self.clone();
        let upgraded = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            match upgraded.await {
                Ok(connection) => runtime.serve_upgraded(ticket, transport, connection).await,
                Err(error) => debug!(%error, "a client did not upgrade its connection"),
            }
        });
        response
    }

    /// Until the stream ends, or nothing has moved on it for so long that it is given up.
    async fn serve_upgraded(&self, ticket: Ticket, transport: Transport, connection: Upgraded) {
        let (connection, idle) = idle::watch(TokioIo::new(connection));
        tokio::select! {
            // What serves it is dropped; its tasks end with the connection.
            () = idle.expired(self.inner.config.stream_idle_limit) => {
                debug!("a stream on which nothing moves was given up");
            }
            () = self.serve_stream(ticket, transport, connection) => {}
        }
    }

    async fn serve_stream(&self, ticket: Ticket, transport: Transport, connection: Connection) {
        match (ticket, transport.protocol()) {
            (Ticket::PortForward(request), Protocol::WebSocketChannels(_)) => {
                websocket::forward(self, request, websocket::accept(connection).await).await;
            }
            (Ticket::PortForward(request), Protocol::WebSocketSpdy) => {
                let tunnel = websocket::tunnel(websocket::accept(connection).await);
                spdy_forward::forward(self, &request, Session::open(tunnel)).await;
            }
            (Ticket::PortForward(request), Protocol::Spdy) => {
                spdy_forward::forward(self, &request, Session::open(connection)).await;
            }
            (command, Protocol::Spdy) => {
                let (session, wanted) = (Session::open(connection), wanted(&command));
                spdy_command::command(session, &wanted, async |client| self.run(command, client).await).await;
            }
            (command, protocol @ (Protocol::WebSocketChannels(_) | Protocol::WebSocketSpdy)) => {
                let codec = match protocol {
                    Protocol::WebSocketChannels(codec) => codec,
                    Protocol::WebSocketSpdy | Protocol::Spdy => Codec::default(),
                };
                let socket = websocket::accept(connection).await;
                websocket::command(socket, codec, async |client| self.run(command, client).await).await;
            }
        }
    }

    async fn run(&self, ticket: Ticket, client: Client) {
        match ticket {
            Ticket::Exec(request) => command::exec(self, request, client).await,
            Ticket::Attach(request) => command::attach(self, request, client).await,
            // Forwards are no commands: `serve_stream` has taken them.
            Ticket::PortForward(_) => {}
        }
    }
}

fn text(status: StatusCode, text: &str) -> Response<BoxBody> {
    let mut response = Response::new(Full::from(text.to_owned()));
    *response.status_mut() = status;
    response
}

/// So that a client that lost its power or its way, and says no word, is noticed in minutes. There is no limit for
/// what was sent and is not taken: who looks at a long output a page at a time takes none for hours.
pub fn notice_lost_client(connection: &TcpStream) {
    // A connection for which it cannot be set is served as it is.
    let _set = setsockopt(connection, sockopt::TcpKeepIdle, &SILENT);
    let _set = setsockopt(connection, sockopt::TcpKeepInterval, &ASK_AGAIN);
    let _set = setsockopt(connection, sockopt::TcpKeepCount, &ASK_TIMES);
    let _set = setsockopt(connection, sockopt::KeepAlive, &true);
}

/// Serves streams over HTTP until `shutdown`: for gRPC clients, which are given URLs.
pub async fn serve(runtime: Runtime, listener: TcpListener, shutdown: CancellationToken) {
    let connections = Connections::new(Limits::share(SHARE, CONNECTIONS));
    let (refusals, failures) = (LogLimit::default(), LogLimit::default());
    loop {
        let accepted = tokio::select! {
            // Both arms are cancel safe: nothing is accepted that is not returned.
            () = shutdown.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (connection, client) = match accepted {
            Ok((connection, client)) => (connection, client.ip()),
            Err(error) => {
                if let Some(suppressed) = failures.pass(IpAddr::V4(Ipv4Addr::UNSPECIFIED)) {
                    warn!(%error, suppressed, "cannot accept a connection for streams");
                }
                sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let slot = match connections.admit(client) {
            Ok(slot) => Arc::new(slot),
            Err(reason) => {
                if let Some(suppressed) = refusals.pass(client) {
                    warn!(%client, %reason, suppressed, "refused a connection for streams");
                }
                continue;
            }
        };
        notice_lost_client(&connection);
        tokio::spawn(serve_connection(runtime.clone(), connection, slot));
    }
}

/// Serves one connection until it is upgraded or ends, or its place is taken from it.
async fn serve_connection(runtime: Runtime, connection: TcpStream, slot: Arc<Slot>) {
    let held = Held::new(connection, slot.clone());
    let proven = slot.clone();
    let service = hyper::service::service_fn(move |request| {
        let (runtime, slot) = (runtime.clone(), proven.clone());
        async move {
            let response = runtime.stream(request).await;
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                // Its token was a valid one.
                slot.prove();
            }
            Ok::<_, Infallible>(response)
        }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(held), service)
        .with_upgrades();
    tokio::select! {
        // Both may be dropped: the connection is closed then.
        served = served => if let Err(error) = served {
            debug!(%error, "a streaming connection ended badly");
        },
        () = slot.expired() => debug!("closed a streaming connection without a token"),
    }
}
