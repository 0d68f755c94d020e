//! The CRI services over [`Runtime`]: one call a file, and the gRPC server on a Unix socket.

mod container_create;
mod container_remove;
mod container_start;
mod container_status;
mod container_stop;
mod events_get;
mod exec_sync;
mod image_pull;
mod image_service;
mod later;
mod runtime_service;
mod runtime_status;
mod sandbox_remove;
mod sandbox_run;
mod sandbox_status;
mod sandbox_stop;
pub(crate) mod status;
mod stream_open;

use coracle_proto::cri::image_service_server::ImageServiceServer;
use coracle_proto::cri::runtime_service_server::RuntimeServiceServer;
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

pub(crate) use self::exec_sync::{Exec, exit_code};
pub(crate) use self::sandbox_run::now;
use crate::error::Error;
use crate::runtime::Runtime;

/// The largest message of a client: the kubelet's own limit.
const MESSAGE_LIMIT: usize = 16 << 20;

impl Runtime {
    /// Serves CRI over gRPC until `shutdown` and until the calls under way are answered.
    ///
    /// # Errors
    /// When the listener breaks.
    pub async fn serve(self, listener: UnixListener, shutdown: CancellationToken) -> Result<(), Error> {
        let runtime = RuntimeServiceServer::new(self.clone())
            .max_decoding_message_size(MESSAGE_LIMIT)
            .max_encoding_message_size(MESSAGE_LIMIT);
        let image = ImageServiceServer::new(self)
            .max_decoding_message_size(MESSAGE_LIMIT)
            .max_encoding_message_size(MESSAGE_LIMIT);
        Server::builder()
            .add_service(runtime)
            .add_service(image)
            .serve_with_incoming_shutdown(UnixListenerStream::new(listener), shutdown.cancelled_owned())
            .await
            .map_err(Error::Serve)
    }
}
