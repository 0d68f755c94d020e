//! HTTP servers of health checks. Anyone may connect, so connections are limited and replies are small.

use std::convert::Infallible;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use coracle_connections::{ACCEPT_RETRY_DELAY, ConnectionPermit, Connections, PermitStream};
use http::{HeaderValue, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use ipnetwork::IpNetwork;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

/// Maximum time between two requests of a connection.
const IDLE: Duration = Duration::from_secs(30);
/// Maximum bytes of a request's header.
const HEADER_MAX: usize = 16 << 10;
/// Delay before the next attempt to listen at a port that another program uses.
const RETRY: Duration = Duration::from_secs(30);

/// A reply to a health check.
pub(crate) type Reply = Response<Full<Bytes>>;

/// Makes the reply to a path and a client's address. It is one type for all servers, so that the code of an HTTP server
/// is compiled once.
type MakeReply = Arc<dyn Fn(&str, IpAddr) -> Reply + Send + Sync>;

/// Listen addresses for all interfaces, in order of preference: `[::]` for both families, or `0.0.0.0` on a machine
/// without IPv6.
pub(crate) fn everywhere(port: u16) -> Vec<SocketAddr> {
    let any = [IpAddr::V6(Ipv6Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::UNSPECIFIED)];
    any.map(|address| SocketAddr::new(address, port)).to_vec()
}

/// Listens at the first possible address until dropped. Only connections to the node's addresses in `ranges` are
/// served. If `ranges` has no range of a family, all addresses of that family are served. `reply` gets the path of a
/// request and the client's address.
pub(crate) async fn serve(
    addresses: Vec<SocketAddr>,
    ranges: Arc<[IpNetwork]>,
    connections: Connections,
    reply: impl Fn(&str, IpAddr) -> Reply + Send + Sync + 'static,
) {
    serve_replies(addresses, ranges, connections, Arc::new(reply)).await;
}

async fn serve_replies(
    addresses: Vec<SocketAddr>,
    ranges: Arc<[IpNetwork]>,
    connections: Connections,
    reply: MakeReply,
) {
    let mut tasks = JoinSet::new();
    let listener = listen(&addresses).await;
    loop {
        // Both arms are cancel-safe: an accepted connection is returned at once, and an ended task needs no
        // action.
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _client)) if !is_served(&stream, &ranges) => drop(stream),
                Ok((stream, client)) => {
                    // At the limit the connection is closed without a response, and the client tries again.
                    if let Ok(permit) = connections.admit(client.ip()) {
                        let reply = Arc::clone(&reply);
                        tasks.spawn(connection(stream, client.ip(), Arc::new(permit), reply));
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, ?addresses, "cannot accept a health check");
                    tokio::time::sleep(ACCEPT_RETRY_DELAY).await;
                }
            },
            Some(_ended) = tasks.join_next() => {}
        }
    }
}

fn is_served(stream: &TcpStream, ranges: &[IpNetwork]) -> bool {
    stream.local_addr().is_ok_and(|address| is_in_ranges(address.ip().to_canonical(), ranges))
}

fn is_in_ranges(address: IpAddr, ranges: &[IpNetwork]) -> bool {
    let mut of_family = ranges.iter().filter(|range| range.is_ipv4() == address.is_ipv4()).peekable();
    of_family.peek().is_none() || of_family.any(|range| range.contains(address))
}

async fn listen(addresses: &[SocketAddr]) -> TcpListener {
    let mut is_logged = false;
    loop {
        match TcpListener::bind(addresses).await {
            Ok(listener) => return listener,
            Err(error) if !is_logged => {
                tracing::warn!(%error, ?addresses, "cannot listen for health checks, retrying");
                is_logged = true;
            }
            Err(_again) => {}
        }
        tokio::time::sleep(RETRY).await;
    }
}

async fn connection(stream: TcpStream, client: IpAddr, permit: Arc<ConnectionPermit>, reply: MakeReply) {
    let held = PermitStream::new(stream, Arc::clone(&permit));
    let service = hyper::service::service_fn(move |request: Request<Incoming>| {
        let reply = reply(request.uri().path(), client);
        async move { Ok::<_, Infallible>(reply) }
    });
    let served = hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(IDLE)
        .max_header_size(HEADER_MAX)
        .max_buf_size(HEADER_MAX)
        .serve_connection(TokioIo::new(held), service);
    tokio::select! {
        // Both arms may be dropped: the connection is closed then.
        _ended = served => {}
        () = permit.expired() => {}
    }
}

/// A reply with a JSON value.
pub(crate) fn json(status: StatusCode, body: &serde_json::Value) -> Reply {
    typed(status, "application/json", body.to_string())
}

/// A reply with a text.
pub(crate) fn text(status: StatusCode, body: &str) -> Reply {
    typed(status, "text/plain; charset=utf-8", body.to_owned())
}

fn typed(status: StatusCode, kind: &'static str, body: String) -> Reply {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(kind));
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}

/// Opens more silent connections than any health server accepts from one address without a request, and waits until the
/// oldest one is closed. Without a limit, that connection would be closed only after [`IDLE`].
#[cfg(test)]
pub(crate) async fn assert_limited(port: u16) {
    use tokio::io::AsyncReadExt as _;

    let connect = async || TcpStream::connect(("127.0.0.1", port)).await.ok();
    let mut first = coracle_testing::eventually_async("the server listens", 10, connect).await;
    let mut silent = Vec::new();
    for _ in 0..64 {
        silent.push(TcpStream::connect(("127.0.0.1", port)).await.unwrap());
    }
    let closed = tokio::time::timeout(IDLE * 2 / 3, first.read(&mut [0])).await;
    assert!(matches!(closed, Ok(Ok(0) | Err(_))), "the oldest connection is not closed");
}

#[cfg(test)]
mod tests {
    use coracle_connections::Limits;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn a_long_header_is_refused_before_its_end() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut client = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (stream, address) = listener.accept().await.unwrap();
        let permit = Arc::new(Connections::new(Limits::of_total(64)).admit(address.ip()).unwrap());
        let reply: MakeReply = Arc::new(|_path: &str, _client: IpAddr| text(StatusCode::OK, "ok"));
        let serving = tokio::spawn(connection(stream, address.ip(), permit, reply));
        let mut head = "GET / HTTP/1.1\r\nHost: n1\r\nA: ".to_owned();
        head.push_str(&"x".repeat(HEADER_MAX - head.len()));
        client.write_all(head.as_bytes()).await.unwrap();
        let mut status = [0; 12];
        client.read_exact(&mut status).await.unwrap();
        assert_eq!(&status, b"HTTP/1.1 431");
        serving.await.unwrap();
    }

    #[test]
    fn ranges_of_a_family_limit_its_addresses() {
        let ranges: Vec<IpNetwork> = vec!["192.0.2.0/24".parse().unwrap()];
        let of = |address: &str| is_in_ranges(address.parse().unwrap(), &ranges);
        assert_eq!(["192.0.2.1", "198.51.100.1", "2001:db8::1"].map(of), [true, false, true]);
        assert!(is_in_ranges([198, 51, 100, 1].into(), &[]));
    }
}
