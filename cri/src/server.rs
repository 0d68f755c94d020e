//! The gRPC server of the CRI services, on a Unix socket.

mod authority;
mod deadline;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod grpc_status;
mod image_service;
mod runtime_service;
mod transaction;

use coracle_proto::cri::image_service_server::ImageServiceServer;
use coracle_proto::cri::runtime_service_server::RuntimeServiceServer;
use futures::future::BoxFuture;
use tokio::net::UnixListener;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

use crate::error::Error;
use crate::runtime::Runtime;
pub use authority::Stream as UnixClient;

/// Maximum bytes of a message: the limit of the kubelet.
const MESSAGE_LIMIT: usize = 16 << 20;

impl Runtime {
    /// Serves the CRI over gRPC until `shutdown`, and until calls in progress are answered. Then disconnects NRI plugins.
    ///
    /// The future is boxed: otherwise the caller's crate would compile the server, too.
    ///
    /// # Errors
    /// If the listener fails.
    pub fn serve(
        self,
        listener: UnixListener,
        shutdown: CancellationToken,
    ) -> BoxFuture<'static, Result<(), Error>> {
        Box::pin(self.serve_calls(listener, shutdown))
    }

    async fn serve_calls(self, listener: UnixListener, shutdown: CancellationToken) -> Result<(), Error> {
        let outbox = self.outbox.clone();
        let stop = async move {
            shutdown.cancelled_owned().await;
            // Event streams would never end on their own.
            outbox.end_streams();
        };
        let runtime = RuntimeServiceServer::new(self.clone())
            .max_decoding_message_size(MESSAGE_LIMIT)
            .max_encoding_message_size(MESSAGE_LIMIT);
        let nri = self.nri.clone();
        let image = ImageServiceServer::new(self)
            .max_decoding_message_size(MESSAGE_LIMIT)
            .max_encoding_message_size(MESSAGE_LIMIT);
        let incoming = UnixListenerStream::new(listener).map(|stream| stream.map(authority::Stream::new));
        let served = Server::builder()
            .layer(deadline::Deadlines)
            .add_service(runtime)
            .add_service(image)
            .serve_with_incoming_shutdown(incoming, stop)
            .await;
        nri.close().await;
        served.map_err(Error::Serve)
    }
}
