//! The CRI client for a container runtime in another process, over its unix socket.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use coracle_proto::cri;
use coracle_proto::cri::image_service_client::ImageServiceClient;
use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, TryFutureExt, TryStreamExt};
use http::Response;
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio::sync::watch;
use tonic::transport::{Channel, Endpoint};
use tonic::{Status, Streaming};

use super::deadline::{CALL_TIMEOUT, within};
use super::relist::Relist;
use super::streams::{Body, Proxy, Streams};
use super::{Events, Host, ImageChanges, RuntimeError};

/// Maximum size in bytes of a message, as in the kubelet: a list of all containers exceeds gRPC's default.
const MESSAGE_MAX: usize = 16 << 20;
/// Timeout of a connection attempt, at the start and after a restart of the runtime.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time in which a runtime without support for events refuses the call. A server in Go sends no response
/// headers before the first event, so a call that is still pending after this time counts as successful.
const EVENTS_REFUSED_WITHIN: Duration = Duration::from_millis(500);

/// A container runtime behind a unix socket: containerd, CRI-O.
#[derive(Clone, Debug)]
pub struct Remote {
    pub(super) runtime: RuntimeServiceClient<Channel>,
    pub(super) images: ImageServiceClient<Channel>,
    relist: Arc<Relist>,
}

/// The reason why a container runtime cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The endpoint is not of the form `unix:///PATH`.
    #[error("the container runtime endpoint {0:?} is not of the form unix:///PATH")]
    Endpoint(String),
    /// The socket does not accept connections.
    #[error("cannot connect to the container runtime at {path}; is it running?")]
    Connect {
        /// Path of the socket.
        path: PathBuf,
        /// Cause.
        #[source]
        source: tonic::transport::Error,
    },
    /// The runtime does not implement the CRI v1.
    #[error("the container runtime at {path} does not serve the CRI v1")]
    Cri {
        /// Path of the socket.
        path: PathBuf,
        /// Cause.
        #[source]
        source: RuntimeError,
    },
}

// === impl Remote ===

impl Remote {
    /// A client on this channel. The channel can connect lazily.
    #[must_use]
    pub fn new(channel: Channel) -> Self {
        let runtime = RuntimeServiceClient::new(channel.clone()).max_decoding_message_size(MESSAGE_MAX);
        let images = ImageServiceClient::new(channel).max_decoding_message_size(MESSAGE_MAX);
        let relist = Arc::new(Relist::new(runtime.clone()));
        Self { runtime, images, relist }
    }

    /// Connects to `unix:///PATH` and checks that the CRI v1 is served there. The client connects again after the
    /// runtime has restarted.
    ///
    /// # Errors
    /// [`ConnectError`]
    pub async fn connect(endpoint: &str) -> Result<Self, ConnectError> {
        let path = endpoint.strip_prefix("unix://").map(PathBuf::from).filter(|path| path.is_absolute());
        let path = path.ok_or_else(|| ConnectError::Endpoint(endpoint.to_owned()))?;
        let socket = path.clone();
        let connector = tower::service_fn(move |_: http::Uri| open(socket.clone()));
        // The URL only sets the authority of the requests. The connector ignores it.
        let channel = Endpoint::from_static("http://localhost")
            .connect_timeout(CONNECT_TIMEOUT)
            .connect_with_connector(connector)
            .await
            .map_err(|source| ConnectError::Connect { path: path.clone(), source })?;
        let remote = Self::new(channel);
        let version = remote.version(cri::VersionRequest::default()).await;
        version.map_err(|source| ConnectError::Cri { path, source })?;
        Ok(remote)
    }
}

async fn open(socket: impl AsRef<Path>) -> io::Result<TokioIo<UnixStream>> {
    UnixStream::connect(socket).await.map(TokioIo::new)
}

#[tonic::async_trait]
impl Host for Remote {
    async fn version(&self, request: cri::VersionRequest) -> Result<cri::VersionResponse, RuntimeError> {
        within(Some(CALL_TIMEOUT), "version", self.runtime.clone().version(request)).await
    }

    async fn status(&self, request: cri::StatusRequest) -> Result<cri::StatusResponse, RuntimeError> {
        within(Some(CALL_TIMEOUT), "status", self.runtime.clone().status(request)).await
    }

    async fn runtime_config(
        &self,
        request: cri::RuntimeConfigRequest,
    ) -> Result<cri::RuntimeConfigResponse, RuntimeError> {
        within(Some(CALL_TIMEOUT), "runtime_config", self.runtime.clone().runtime_config(request)).await
    }

    async fn update_runtime_config(
        &self,
        request: cri::UpdateRuntimeConfigRequest,
    ) -> Result<cri::UpdateRuntimeConfigResponse, RuntimeError> {
        let mut client = self.runtime.clone();
        within(Some(CALL_TIMEOUT), "update_runtime_config", client.update_runtime_config(request)).await
    }

    /// The runtime's events. If the runtime sends no events, the differences between lists replace them.
    async fn events(&self) -> Result<Events, RuntimeError> {
        if self.relist.is_needed() {
            return Ok(self.relist.subscribe());
        }
        let mut client = self.runtime.clone();
        let mut call = async move {
            let stream = client.get_container_events(cri::GetEventsRequest {}).await?.into_inner();
            // A stream that ends without an event also counts as a refusal.
            let (first, rest) = stream.into_future().await;
            Ok((first, rest))
        }
        .boxed();
        let refused = |error: RuntimeError| match error {
            RuntimeError::Unsupported(_) => Ok(self.relist.need()),
            error => Err(error),
        };
        match tokio::time::timeout(EVENTS_REFUSED_WITHIN, &mut call).await {
            Err(_pending) => Ok(call.map_ok(opened).map_err(RuntimeError::from).try_flatten_stream().boxed()),
            Ok(Ok((None, _))) => Ok(self.relist.need()),
            Ok(Ok((Some(Err(status)), _)) | Err(status)) => refused(status.into()),
            Ok(Ok(begun)) => Ok(opened(begun)),
        }
    }
}

type OpenedEvents =
    (Option<Result<cri::ContainerEventResponse, Status>>, Streaming<cri::ContainerEventResponse>);

/// The stream with the item that was taken from it.
fn opened((first, rest): OpenedEvents) -> Events {
    futures::stream::iter(first).chain(rest).map_err(RuntimeError::from).boxed()
}

impl ImageChanges for Remote {
    fn image_changes(&self) -> Option<watch::Receiver<()>> {
        None
    }
}

impl Streams for Remote {
    fn stream(&self, url: &str, request: http::Request<Incoming>) -> BoxFuture<'static, Response<Body>> {
        Proxy.stream(url, request)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_endpoint_must_be_the_absolute_path_of_an_existing_socket() {
        for bad in ["", "/run/containerd/containerd.sock", "tcp://127.0.0.1:1", "unix://relative.sock"] {
            assert!(matches!(Remote::connect(bad).await, Err(ConnectError::Endpoint(_))), "{bad}");
        }
        let absent = Remote::connect("unix:///nonexistent/cri.sock").await;
        assert!(matches!(absent, Err(ConnectError::Connect { .. })));
    }
}
