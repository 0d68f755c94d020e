//! The listener: TLS connections with HTTP/1.1 and HTTP/2. [`Apiserver::handle`] handles each request.
//!
//! Limits: number of connections ([`coracle_connections`]); duration of handshakes, headers, idle connections and
//! unread responses; streams and memory of one HTTP/2 connection.

mod activity;
mod client;
mod goaway;
mod header_block;
mod header_memory;
mod small_reads;
mod stream_tasks;

use std::{
    convert::Infallible,
    fmt::Display,
    net::{IpAddr, Ipv4Addr},
    sync::{Arc, Weak},
    time::Duration,
};

use bytes::Bytes;
use coracle_connections::{
    ACCEPT_RETRY_DELAY, ConnectionPermit, Connections, LogLimit, PermitStream, Share, UNCERTIFIED_HEADER,
    handshake,
};
use futures::FutureExt as _;
use http::{Request, Response};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::conn::auto,
};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use tokio_util::{io::InspectReader, sync::CancellationToken, task::TaskTracker};

use crate::{
    error::ApiError,
    polled_when_woken::PolledWhenWoken,
    reply,
    server::{Apiserver, PeerAddress},
};
use activity::{Activity, Running};
use client::Client;
use goaway::GoAway;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use header_block::fuzz as fuzz_frames;
use header_memory::HeaderMemory;
use small_reads::SmallReads;
use stream_tasks::StreamTasks;

/// Maximum time for running requests to end after the shutdown, in addition to the grace period of watches.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time without a request, as upstream's idle timeout.
const IDLE_TIMEOUT: Duration = Duration::from_secs(90);
/// Maximum time from the first byte of an HTTP/1.1 request header to its end, as upstream's read header timeout.
const HEADER_TIMEOUT: Duration = Duration::from_secs(32);
/// ALPN name of HTTP/2.
const H2: &[u8] = b"h2";
/// Maximum HTTP/2 streams of one connection. Upstream's default is 100.
const MAX_STREAMS: u32 = 250;
/// Maximum bytes of the headers of one HTTP/2 request.
const MAX_HEADER_BYTES: u32 = 64 << 10;
/// Maximum bytes of request bodies that an HTTP/2 client sends before they are read, on one connection and one stream.
const RECEIVE_WINDOW: u32 = 1 << 20;
/// Maximum bytes of a request body that an HTTP/2 client without a certificate sends before they are read. Until the
/// request is authenticated, its body takes memory that any client can use up. An HTTP/1.1 body does not take more
/// memory: the connection reads at most [`UNCERTIFIED_HEADER`] at once.
const UNCERTIFIED_WINDOW: u32 = 64 << 10;
/// Maximum bytes in the send buffer of one HTTP/2 stream. Above this limit, the stream takes no further piece of the
/// response. Small events of watches wait here, and a user may have thousands of watches.
const MAX_SEND_BUFFER: usize = 16 << 10;
/// Interval of HTTP/2 pings to a client.
const PING_INTERVAL: Duration = Duration::from_secs(60);
/// Maximum time for the response to a ping. After this time, the connection is closed.
const PING_TIMEOUT: Duration = Duration::from_secs(20);

/// The reason why the server ends a connection.
enum Ending {
    /// The client does not read a response.
    Unread,
    /// The header of a request is not complete in time.
    LateHeader,
    /// The connection has no request.
    Idle,
    /// The client must connect again. Its running requests continue.
    GoAway,
    /// The server stops.
    Shutdown,
}

impl Apiserver {
    /// Serves connections until the shutdown token is cancelled, then waits for running requests.
    pub async fn serve(self, listener: TcpListener, tls: Arc<rustls::ServerConfig>) {
        let acceptor = TlsAcceptor::from(tls);
        let tasks = TaskTracker::new();
        let shutdown = self.state.shutdown.clone();
        let connections = Connections::new(Share::ApiConnections.limits());
        let (refusals, failures) = (LogLimit::default(), LogLimit::default());
        loop {
            let accepted = tokio::select! {
                // At the shutdown, closing the listener also closes the connections in its backlog.
                accepted = listener.accept() => accepted,
                () = shutdown.cancelled() => break,
            };
            match accepted {
                Ok((stream, client)) => match connections.admit(client.ip()) {
                    Ok(permit) => {
                        tasks.spawn(
                            connection(self.clone(), acceptor.clone(), stream, Arc::new(permit)).boxed(),
                        );
                    }
                    Err(reason) => {
                        if let Some(suppressed) = refusals.allow(client.ip()) {
                            tracing::warn!(client = %client.ip(), %reason, suppressed, "refused a connection");
                        }
                    }
                },
                Err(error) => {
                    if let Some(suppressed) = failures.allow(IpAddr::V4(Ipv4Addr::UNSPECIFIED)) {
                        tracing::warn!(%error, suppressed, "cannot accept a connection");
                    }
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            }
        }
        tasks.close();
        let limit = SHUTDOWN_TIMEOUT.saturating_add(self.state.watch_grace);
        let _ = tokio::time::timeout(limit, tasks.wait()).await;
        if let Some(auditor) = &self.state.auditor {
            auditor.flush().await;
        }
    }
}

/// Serves one connection until it ends or the limit on connections closes it.
async fn connection(
    server: Apiserver,
    acceptor: TlsAcceptor,
    stream: TcpStream,
    permit: Arc<ConnectionPermit>,
) {
    let _ = stream.set_nodelay(true);
    coracle_connections::keep_alive(&stream);
    let serving = async {
        match handshake(acceptor.accept(stream)).await {
            Some(Ok(stream)) => requests(server, stream, permit.clone()).await,
            Some(Err(error)) => {
                server.state.metrics.serving.failed_handshake();
                tracing::debug!(%error, "cannot complete the TLS handshake with a client");
            }
            None => server.state.metrics.serving.failed_handshake(),
        }
    };
    let expired = PolledWhenWoken::new(Box::pin(permit.expired()));
    tokio::select! {
        // Both futures can be dropped: dropping them closes the connection.
        () = serving => {}
        () = expired => tracing::debug!("closed a connection that was evicted or not authenticated in time"),
    }
}

async fn requests(server: Apiserver, stream: TlsStream<TcpStream>, permit: Arc<ConnectionPermit>) {
    let certificates = stream.get_ref().1.peer_certificates();
    let certificate = certificates.and_then(|chain| server.state.authenticators.peer(chain));
    let is_certified = certificate.is_some();
    if is_certified {
        // The handshake has verified the client certificate, so the connection counts as authenticated.
        permit.set_authenticated();
    }
    let address = stream.get_ref().0.peer_addr().ok().map(|address| PeerAddress(address.ip().to_canonical()));
    let shutdown = server.state.shutdown.clone();
    let is_http2 = stream.get_ref().1.alpn_protocol() == Some(H2);
    let activity = Arc::new(Activity::new(server.state.request_timeout));
    let header = Arc::new(HeaderMemory::new(server.state.in_flight.clone(), permit.clone(), is_http2));
    // The first received bytes start the time limit of a request header. After an upgrade, `header` is dropped: the
    // bytes of another protocol do not count.
    let (receiving, incomplete, closing) = (activity.clone(), Arc::downgrade(&header), permit.clone());
    let limiting = if is_certified || is_http2 { Weak::new() } else { incomplete.clone() };
    let permitted = SmallReads::new(PermitStream::of_socket(stream, permit.clone()), limiting);
    let held = InspectReader::new(permitted, move |received: &[u8]| {
        let is_between = !received.is_empty() && receiving.received();
        check_header(&incomplete, &closing, received, is_between);
    });
    let go_away = Arc::new(GoAway::new(server.state.goaway_chance, is_http2));
    let (of_requests, client) = (activity.clone(), Client { certificate, address, permit });
    let deciding = go_away.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        deciding.decide();
        let buffered = header.complete();
        let attached = client.attach(&mut request, &server.state.in_flight, buffered);
        let request = attached.map(|()| request);
        let closing = deciding.clone();
        let responded = respond(server.clone(), request, of_requests.begin());
        responded.map(move |response| Ok::<_, Infallible>(closing.after(response)))
    });
    let builder = builder(is_certified);
    let mut served = std::pin::pin!(builder.serve_connection_with_upgrades(TokioIo::new(held), service));
    let ended = loop {
        let ending = wait_for_ending(&activity, &shutdown, &go_away, is_http2);
        let ending = tokio::select! {
            ended = served.as_mut() => break ended,
            ending = PolledWhenWoken::new(Box::pin(ending)) => ending,
        };
        match ending {
            Ending::Unread => return tracing::debug!("closed a connection whose client does not read"),
            Ending::LateHeader => {
                return tracing::debug!("closed a connection: its request header was not complete in time");
            }
            Ending::GoAway => served.as_mut().graceful_shutdown(),
            Ending::Idle => {
                served.as_mut().graceful_shutdown();
                break tokio::time::timeout(SHUTDOWN_TIMEOUT, served).await.unwrap_or(Ok(()));
            }
            Ending::Shutdown => {
                served.as_mut().graceful_shutdown();
                break served.await;
            }
        }
    };
    if let Err(error) = ended {
        tracing::debug!(error, "a connection failed");
    }
}

/// Closes a connection if there is no memory for its incomplete request header. After an upgrade there is no header.
fn check_header(
    header: &Weak<HeaderMemory>,
    connection: &ConnectionPermit,
    received: &[u8],
    is_between: bool,
) {
    if let Some(header) = header.upgrade()
        && header.received(received, is_between).is_err()
    {
        tracing::debug!("closed a connection: no memory for its incomplete request header");
        connection.close();
    }
}

/// Waits until the server must end a connection, or ask the client to connect again.
async fn wait_for_ending(
    activity: &Activity,
    shutdown: &CancellationToken,
    go_away: &GoAway,
    is_http2: bool,
) -> Ending {
    tokio::select! {
        // Cancel-safe: all branches only wait.
        () = activity.response_timeout() => Ending::Unread,
        () = activity.late_header(HEADER_TIMEOUT), if !is_http2 => Ending::LateHeader,
        () = activity.idle(IDLE_TIMEOUT) => Ending::Idle,
        () = go_away.decided() => Ending::GoAway,
        () = shutdown.cancelled() => Ending::Shutdown,
    }
}

/// The response to a request. `request` is an error if there was no memory for the request. The task of an HTTP/2
/// stream has the size of this future until the response is sent. The task of a watch has this size until the watch
/// ends. The large future of the handler is therefore boxed: its memory is released when the response begins.
async fn respond<B>(
    server: Apiserver,
    request: Result<Request<B>, ApiError>,
    running: Running,
) -> Response<reply::Body>
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Display,
{
    let response = match request {
        Ok(request) => Box::pin(server.handle_network(request)).await,
        Err(error) => client::refusal(&error),
    };
    running.until_sent(response)
}

/// The settings of HTTP for a connection. `is_certified` is true if the client has a certificate.
fn builder(is_certified: bool) -> auto::Builder<StreamTasks> {
    let mut builder = auto::Builder::new(StreamTasks);
    builder.http1().timer(TokioTimer::new()).header_read_timeout(IDLE_TIMEOUT);
    if !is_certified {
        builder.http1().max_buf_size(UNCERTIFIED_HEADER);
    }
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_concurrent_streams(MAX_STREAMS)
        .max_header_list_size(MAX_HEADER_BYTES)
        .max_send_buf_size(MAX_SEND_BUFFER)
        .initial_connection_window_size(RECEIVE_WINDOW)
        .initial_stream_window_size(if is_certified { RECEIVE_WINDOW } else { UNCERTIFIED_WINDOW })
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    builder
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use http_body::Frame;
    use http_body_util::{BodyExt as _, Full, StreamBody};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};

    use super::*;

    /// Runs `client` on a connection to a server that answers each request. Returns the result of `client`.
    async fn connected<T>(is_certified: bool, client: impl AsyncFnOnce(DuplexStream) -> T) -> T {
        let (stream, connection) = tokio::io::duplex(1 << 20);
        let service = service_fn(|_request: Request<Incoming>| async {
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        });
        let builder = builder(is_certified);
        let served = builder.serve_connection_with_upgrades(TokioIo::new(connection), service);
        // The connection ends after the client.
        tokio::join!(served, client(stream)).1
    }

    /// The start of the response to a request with a header field of this length.
    async fn status(is_certified: bool, field: usize) -> String {
        let exchange = async move |mut client: DuplexStream| {
            let field = "x".repeat(field);
            let head = format!("GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nA: {field}\r\n\r\n");
            client.write_all(head.as_bytes()).await.unwrap();
            let mut status = [0; 12];
            client.read_exact(&mut status).await.unwrap();
            String::from_utf8_lossy(&status).into_owned()
        };
        connected(is_certified, exchange).await
    }

    /// Whether the server can read a body with these chunks.
    async fn is_read(chunks: &str) -> bool {
        let (mut client, connection) = tokio::io::duplex(1 << 20);
        let (send, mut results) = tokio::sync::mpsc::unbounded_channel();
        let service = service_fn(move |request: Request<Incoming>| {
            let send = send.clone();
            async move {
                send.send(request.into_body().collect().await.is_ok()).unwrap();
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }
        });
        let head = "POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n";
        client.write_all(format!("{head}{chunks}").as_bytes()).await.unwrap();
        let builder = builder(true);
        let _ended = builder.serve_connection_with_upgrades(TokioIo::new(connection), service).await;
        results.recv().await == Some(true)
    }

    #[tokio::test]
    async fn trailers_and_chunk_extensions_of_a_body_are_limited() {
        for (length, expect) in [(1 << 10, true), (20 << 10, false)] {
            let text = "x".repeat(length);
            assert_eq!(is_read(&format!("0\r\na: {text}\r\n\r\n")).await, expect, "trailers");
            assert_eq!(is_read(&format!("1;{text}\r\nx\r\n0\r\n\r\n")).await, expect, "extensions");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_holds_few_small_pieces_for_a_client_that_does_not_read() {
        let (mut client, connection) = tokio::io::duplex(4 << 10);
        let taken = Arc::<AtomicUsize>::default();
        let counter = taken.clone();
        let service = service_fn(move |_request: Request<Incoming>| {
            let counter = counter.clone();
            let pieces = futures::stream::repeat_with(move || {
                counter.fetch_add(1 << 10, Ordering::Relaxed);
                Ok::<_, Infallible>(Frame::data(Bytes::from_static(&[0; 1 << 10])))
            });
            async move { Ok::<_, Infallible>(Response::new(StreamBody::new(pieces))) }
        });
        tokio::spawn(async move {
            let builder = builder(true);
            let _ended = builder.serve_connection_with_upgrades(TokioIo::new(connection), service).await;
        });
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        // The settings permit 1 MiB on a stream. The window update permits 1 MiB on the connection.
        client.write_all(&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4, 0, 16, 0, 0]).await.unwrap();
        client.write_all(&[0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 16, 0, 0]).await.unwrap();
        // GET http://a/
        client.write_all(&[0, 0, 6, 1, 5, 0, 0, 0, 1, 0x82, 0x86, 0x84, 0x41, 1, b'a']).await.unwrap();
        // The clock advances when the server has nothing to do.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let taken = taken.load(Ordering::Relaxed);
        assert!((1..48 << 10).contains(&taken), "{taken}");
    }

    /// The start of an HTTP/2 connection of a client, with empty settings.
    const START: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

    /// The setting with this number of a connection.
    async fn setting(is_certified: bool, number: u8) -> u32 {
        let exchange = async move |mut client: DuplexStream| {
            client.write_all(START).await.unwrap();
            // The settings are the first frame: 3 bytes of length, type, flags and stream, then 6 bytes a setting.
            let mut header = [0_u8; 9];
            client.read_exact(&mut header).await.unwrap();
            let mut settings = vec![0_u8; usize::from(header[2])];
            client.read_exact(&mut settings).await.unwrap();
            let found = settings.chunks(6).find(|setting| setting[..2] == [0, number]).unwrap();
            u32::from_be_bytes(found[2..].try_into().unwrap())
        };
        connected(is_certified, exchange).await
    }

    #[tokio::test]
    async fn a_client_without_a_certificate_sends_little_of_a_body_that_is_not_read() {
        // SETTINGS_INITIAL_WINDOW_SIZE
        assert_eq!(setting(true, 4).await, RECEIVE_WINDOW);
        assert_eq!(setting(false, 4).await, UNCERTIFIED_WINDOW);
    }

    #[tokio::test]
    async fn the_streams_and_the_headers_of_a_connection_are_limited() {
        // SETTINGS_MAX_CONCURRENT_STREAMS and SETTINGS_MAX_HEADER_LIST_SIZE
        assert_eq!((setting(true, 3).await, setting(true, 6).await), (250, 64 << 10));
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_does_not_answer_a_ping_is_disconnected() {
        let exchange = async |mut client: DuplexStream| {
            client.write_all(START).await.unwrap();
            let (began, mut frames) = (tokio::time::Instant::now(), Vec::new());
            let ended = tokio::time::timeout(PING_INTERVAL * 3, client.read_to_end(&mut frames)).await;
            assert!(ended.is_ok() && began.elapsed() >= PING_INTERVAL, "{:?}", began.elapsed());
        };
        connected(true, exchange).await;
    }

    fn size_of_future<A, B, C, F: Future>(_function: impl Fn(A, B, C) -> F) -> usize {
        size_of::<F>()
    }

    #[test]
    fn the_task_of_a_stream_is_small() {
        let size = size_of_future(respond::<Incoming>);
        assert!(size < 2 << 10, "{size}");
    }

    #[test]
    fn the_memory_of_a_request_covers_its_handler() {
        let size = size_of_future(Apiserver::handle::<Incoming>) + size_of_future(respond::<Incoming>);
        assert!(size < client::TASK_BYTES, "{size}");
    }

    #[tokio::test]
    async fn a_client_without_a_certificate_sends_short_headers() {
        assert_eq!(status(true, 300 << 10).await, "HTTP/1.1 200");
        assert_eq!(status(false, 300 << 10).await, "HTTP/1.1 431");
        assert_eq!(status(false, 48 << 10).await, "HTTP/1.1 200");
    }
}
