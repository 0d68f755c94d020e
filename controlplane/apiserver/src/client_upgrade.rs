//! The upgrade of a client's connection to another protocol.

use std::sync::Arc;

use coracle_connections::ConnectionPermit;
use http::Request;
use hyper::upgrade::{OnUpgrade, Upgraded};
use tokio_util::sync::CancellationToken;

use crate::{metrics::LongRunning, unread_bytes::Reader};

/// The client's connection after a response that switches protocols.
pub(crate) struct ClientUpgrade {
    pub(crate) on: OnUpgrade,
    /// The permit of the connection. `None` for requests from this process.
    pub(crate) permit: Option<Arc<ConnectionPermit>>,
    /// Counts the request as long-running until the connection ends. The response itself ends earlier, with the switch
    /// of protocols.
    pub(crate) running: Option<LongRunning>,
}

// === impl ClientUpgrade ===

impl ClientUpgrade {
    /// Takes the upgrade out of a request, with the permit of its connection.
    pub(crate) fn of<B>(request: &mut Request<B>) -> Self {
        let permit = request.extensions().get::<Arc<ConnectionPermit>>().cloned();
        Self { on: hyper::upgrade::on(request), permit, running: None }
    }

    /// The reader of a watch. Its owner is the caller, who may impersonate another user. `None` for requests of this
    /// process.
    pub(crate) fn reader(&self) -> Option<Arc<Reader>> {
        self.running.as_ref().and_then(LongRunning::reader)
    }

    /// Serves the connection in a task until `serve` returns or the server shuts down. The task also ends if the
    /// connection is evicted, or if the reader of its watch is evicted because of the limit on unread bytes. `serve`
    /// can be cancelled at any time.
    pub(crate) fn serve<F>(
        self,
        shutdown: CancellationToken,
        serve: impl FnOnce(Upgraded) -> F + Send + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        coracle_threads::spawn(async move {
            let reader_evicted = self.reader().map(|reader| reader.evicted());
            let Self { on, permit, running: _running } = self;
            let connection = match on.await {
                Ok(connection) => connection,
                Err(error) => return tracing::debug!(%error, "cannot upgrade the connection of a client"),
            };
            let evicted = async {
                match &permit {
                    Some(permit) => permit.evicted().await,
                    None => std::future::pending().await,
                }
            };
            let reader_evicted = async {
                match &reader_evicted {
                    Some(token) => token.cancelled().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                // All arms may be dropped: this closes the connection.
                () = serve(connection) => {}
                () = shutdown.cancelled() => {}
                () = evicted => {}
                () = reader_evicted => {}
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::net::IpAddr;
    use std::time::Duration;

    use bytes::Bytes;
    use coracle_connections::{Connections, Limits};
    use http::{Response, StatusCode, header};
    use http_body_util::Empty;
    use hyper::body::Incoming;
    use hyper::service::service_fn;
    use hyper_util::rt::TokioIo;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// Sends the first byte back, and then waits.
    async fn echo_once(connection: Upgraded) {
        let mut connection = TokioIo::new(connection);
        let byte = connection.read_u8().await.expect("a byte");
        connection.write_all(&[byte]).await.expect("written");
        std::future::pending::<()>().await;
    }

    fn switch(mut request: Request<Incoming>, permit: Arc<ConnectionPermit>) -> Response<Empty<Bytes>> {
        request.extensions_mut().insert(permit);
        ClientUpgrade::of(&mut request).serve(CancellationToken::new(), echo_once);
        let mut response = Response::new(Empty::new());
        *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        response.headers_mut().insert(header::CONNECTION, header::HeaderValue::from_static("Upgrade"));
        response.headers_mut().insert(header::UPGRADE, header::HeaderValue::from_static("echo"));
        response
    }

    #[tokio::test]
    async fn an_evicted_connection_ends_after_its_upgrade() {
        let limits = Limits { total: 8, per_source: 8, unauthenticated: 8, unauthenticated_per_source: 1 };
        let (port, address) = (Connections::new(limits), IpAddr::from([192, 0, 2, 1]));
        let permit = Arc::new(port.admit(address).expect("a permit"));
        let (mut client, server) = tokio::io::duplex(1 << 10);
        let service = service_fn(move |request| {
            let response = switch(request, permit.clone());
            async move { Ok::<_, Infallible>(response) }
        });
        let server =
            hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(server), service);
        tokio::spawn(server.with_upgrades());
        let head = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
        client.write_all(head).await.expect("written");
        let mut response = Vec::new();
        while !response.ends_with(b"\r\n\r\n") {
            response.push(client.read_u8().await.expect("a response"));
        }
        client.write_all(b"x").await.expect("written");
        assert_eq!(client.read_u8().await.expect("the echo"), b'x');
        // The next connection from this source evicts the upgraded connection.
        let _other = port.admit(address).expect("a permit");
        let mut rest = Vec::new();
        let ended = tokio::time::timeout(Duration::from_secs(600), client.read_to_end(&mut rest)).await;
        assert_eq!(ended.expect("an end").expect("read"), 0);
    }
}
