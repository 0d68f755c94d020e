//! The CRI services over [`Runtime`]: one call a file, and the gRPC server on a Unix socket.

mod authority;
mod checkpoint;
mod container_create;
mod container_remove;
mod container_start;
mod container_status;
mod container_stop;
mod container_update;
mod container_volumes;
mod deadline;
mod events_get;
mod exec_sync;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzz;
mod image_pull;
mod image_service;
mod list_stream;
mod pid_namespace;
mod pod_checkpoint;
mod pod_restore;
mod runtime_service;
mod runtime_status;
mod sandbox_process;
mod sandbox_remove;
mod sandbox_run;
mod sandbox_status;
mod sandbox_stop;
mod sandbox_update;
mod stats_list;
pub(crate) mod status;
mod stream_open;
mod verbose;

use std::sync::Arc;

use coracle_proto::cri::image_service_server::ImageServiceServer;
use coracle_proto::cri::runtime_service_server::RuntimeServiceServer;
use tokio::net::UnixListener;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::Server;

pub(crate) use self::exec_sync::{Exec, exit_code};
pub(crate) use self::list_stream::batches;
pub(crate) use self::sandbox_run::now;
pub(crate) use self::status::Streamed;
use crate::error::Error;
use crate::runtime::Runtime;

/// The largest message of a client: the kubelet's own limit.
const MESSAGE_LIMIT: usize = 16 << 20;

impl Runtime {
    /// Serves CRI over gRPC until `shutdown` and until the calls under way are answered; then NRI plugins are
    /// told that the runtime ends.
    ///
    /// # Errors
    /// When the listener breaks.
    pub async fn serve(self, listener: UnixListener, shutdown: CancellationToken) -> Result<(), Error> {
        let inner = Arc::clone(&self.inner);
        let stop = async move {
            shutdown.cancelled_owned().await;
            // Streams of events are calls that would never be answered to the end.
            inner.events.end();
        };
        let runtime = RuntimeServiceServer::new(self.clone())
            .max_decoding_message_size(MESSAGE_LIMIT)
            .max_encoding_message_size(MESSAGE_LIMIT);
        let nri = self.inner.nri.clone();
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
