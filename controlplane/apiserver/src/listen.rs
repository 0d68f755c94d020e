//! The network side: TLS connections, HTTP/1.1 and HTTP/2, each request handed to [`Apiserver::handle`].

use std::{convert::Infallible, sync::Arc, time::Duration};

use http::Request;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_util::task::TaskTracker;

use crate::server::{Apiserver, PeerCertificate};

/// A client that has not finished its handshake by then is gone.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Requests that run when the server stops get so long to end.
const FAREWELL: Duration = Duration::from_secs(5);
/// After an error of accept, as of too many open files, others get the time to close some.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

impl Apiserver {
    /// Serves connections until the server's shutdown token is cancelled, then lets running requests end.
    pub async fn serve(self, listener: TcpListener, tls: Arc<rustls::ServerConfig>) {
        let acceptor = TlsAcceptor::from(tls);
        let connections = TaskTracker::new();
        let shutdown = self.state.shutdown.clone();
        loop {
            let accepted = tokio::select! {
                // A connection that is accepted but not taken is closed with the listener.
                accepted = listener.accept() => accepted,
                () = shutdown.cancelled() => break,
            };
            match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(self.clone(), acceptor.clone(), stream));
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        connections.close();
        let _ = tokio::time::timeout(FAREWELL, connections.wait()).await;
    }
}

async fn connection(server: Apiserver, acceptor: TlsAcceptor, stream: TcpStream) {
    let _ = stream.set_nodelay(true);
    let stream = match tokio::time::timeout(HANDSHAKE, acceptor.accept(stream)).await {
        Ok(Ok(stream)) => stream,
        Ok(Err(error)) => return tracing::debug!(%error, "no TLS with a client"),
        Err(_elapsed) => return,
    };
    let certificates = stream.get_ref().1.peer_certificates();
    let peer = certificates.and_then(|chain| chain.first());
    let peer = peer.map(|certificate| PeerCertificate(Arc::new(certificate.clone().into_owned())));
    let shutdown = server.state.shutdown.clone();
    let service = service_fn(move |mut request: Request<Incoming>| {
        if let Some(peer) = &peer {
            request.extensions_mut().insert(peer.clone());
        }
        let server = server.clone();
        async move { Ok::<_, Infallible>(server.handle(request, None).await) }
    });
    let builder = auto::Builder::new(TokioExecutor::new());
    let mut served = std::pin::pin!(builder.serve_connection_with_upgrades(TokioIo::new(stream), service));
    let ended = tokio::select! {
        ended = served.as_mut() => ended,
        () = shutdown.cancelled() => {
            served.as_mut().graceful_shutdown();
            served.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(error, "a connection broke");
    }
}
