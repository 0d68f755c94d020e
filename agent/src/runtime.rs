//! What pod sync and the kubelet API need from a container runtime, in CRI types: five small traits under
//! one name, with two implementers: the cri crate in process (no gRPC, no serialization) and a tonic
//! client for a foreign runtime.

use coracle_proto::cri::image_service_client::ImageServiceClient;
use coracle_proto::cri::image_service_server::ImageService;
use coracle_proto::cri::runtime_service_client::RuntimeServiceClient;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_proto::cri::{self, ContainerEventResponse, GetEventsRequest};
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use http::uri::PathAndQuery;
use http::{Response, Uri};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::watch;
use tonic::transport::Channel;
use tonic::{Request, Status};

use crate::server::{Body, Proxy, Streams};

/// Container events as they come; an error item ends the stream.
pub type Events = BoxStream<'static, Result<ContainerEventResponse, Status>>;

/// Everything together; implemented by whatever implements the parts.
pub trait Runtime: Sandboxes + Containers + Execs + Images + Host {}

impl<T: Sandboxes + Containers + Execs + Images + Host> Runtime for T {}

/// The runtime in this process.
#[derive(Clone, Debug)]
pub struct InProcess<T>(pub T);

/// A runtime behind a unix socket.
#[derive(Clone, Debug)]
pub struct Remote {
    runtime: RuntimeServiceClient<Channel>,
    images: ImageServiceClient<Channel>,
}

impl Remote {
    /// Speaks CRI over a channel that is connected (or connects lazily).
    #[must_use]
    pub fn new(channel: Channel) -> Self {
        Self { runtime: RuntimeServiceClient::new(channel.clone()), images: ImageServiceClient::new(channel) }
    }
}

/// One trait of unary calls, with both implementations: they differ only in where the call goes.
macro_rules! calls {
    ($(#[$doc:meta])* $name:ident, $service:ident, $client:ident,
     { $($(#[$call_doc:meta])* $call:ident($request:ident) -> $response:ident;)* }) => {
        $(#[$doc])*
        #[tonic::async_trait]
        pub trait $name: Send + Sync + 'static {
            $($(#[$call_doc])*
            async fn $call(&self, request: cri::$request) -> Result<cri::$response, Status>;)*
        }

        #[tonic::async_trait]
        impl<T: RuntimeService + ImageService> $name for InProcess<T> {
            $(async fn $call(&self, request: cri::$request) -> Result<cri::$response, Status> {
                $service::$call(&self.0, Request::new(request)).await.map(tonic::Response::into_inner)
            })*
        }

        #[tonic::async_trait]
        impl $name for Remote {
            $(async fn $call(&self, request: cri::$request) -> Result<cri::$response, Status> {
                self.$client.clone().$call(request).await.map(tonic::Response::into_inner)
            })*
        }
    };
}

calls!(
    /// Pod sandboxes.
    Sandboxes, RuntimeService, runtime, {
        /// Creates and starts a sandbox with its network.
        run_pod_sandbox(RunPodSandboxRequest) -> RunPodSandboxResponse;
        /// Stops what runs in a sandbox and frees its network; the absent is stopped.
        stop_pod_sandbox(StopPodSandboxRequest) -> StopPodSandboxResponse;
        /// Forgets a sandbox and its containers; the absent is removed.
        remove_pod_sandbox(RemovePodSandboxRequest) -> RemovePodSandboxResponse;
        /// State, addresses and namespaces of one sandbox.
        pod_sandbox_status(PodSandboxStatusRequest) -> PodSandboxStatusResponse;
        /// The sandboxes that a filter selects.
        list_pod_sandbox(ListPodSandboxRequest) -> ListPodSandboxResponse;
    }
);

calls!(
    /// Containers.
    Containers, RuntimeService, runtime, {
        /// Makes a container, not started.
        create_container(CreateContainerRequest) -> CreateContainerResponse;
        /// Starts a made container.
        start_container(StartContainerRequest) -> StartContainerResponse;
        /// Sends the stop signal and, after the time-out, SIGKILL; the absent is stopped.
        stop_container(StopContainerRequest) -> StopContainerResponse;
        /// Removes a container with its root filesystem; the absent is removed.
        remove_container(RemoveContainerRequest) -> RemoveContainerResponse;
        /// State, times and exit code of one container.
        container_status(ContainerStatusRequest) -> ContainerStatusResponse;
        /// The containers that a filter selects.
        list_containers(ListContainersRequest) -> ListContainersResponse;
        /// Reopens a log file that was moved away.
        reopen_container_log(ReopenContainerLogRequest) -> ReopenContainerLogResponse;
        /// CPU, memory and disk figures of one container.
        container_stats(ContainerStatsRequest) -> ContainerStatsResponse;
        /// Figures of all containers that a filter selects.
        list_container_stats(ListContainerStatsRequest) -> ListContainerStatsResponse;
    }
);

calls!(
    /// Processes beside a container's own, and ways into a pod.
    Execs, RuntimeService, runtime, {
        /// Runs a command to its end and returns its output.
        exec_sync(ExecSyncRequest) -> ExecSyncResponse;
        /// Prepares a streaming exec and returns where to connect.
        exec(ExecRequest) -> ExecResponse;
        /// Prepares a streaming attach and returns where to connect.
        attach(AttachRequest) -> AttachResponse;
        /// Prepares a port forward and returns where to connect.
        port_forward(PortForwardRequest) -> PortForwardResponse;
    }
);

calls!(
    /// Images.
    Images, ImageService, images, {
        /// The image of a reference or id, if it is here.
        image_status(ImageStatusRequest) -> ImageStatusResponse;
        /// Pulls an image and returns its id.
        pull_image(PullImageRequest) -> PullImageResponse;
        /// All images that a filter selects.
        list_images(ListImagesRequest) -> ListImagesResponse;
        /// Removes an image; the absent is removed.
        remove_image(RemoveImageRequest) -> RemoveImageResponse;
        /// What the image store takes on its disk.
        image_fs_info(ImageFsInfoRequest) -> ImageFsInfoResponse;
    }
);

/// The runtime itself.
#[tonic::async_trait]
pub trait Host: Send + Sync + 'static {
    /// Name and version.
    async fn version(&self, request: cri::VersionRequest) -> Result<cri::VersionResponse, Status>;
    /// Whether runtime and network are ready.
    async fn status(&self, request: cri::StatusRequest) -> Result<cri::StatusResponse, Status>;
    /// Tells about every container and sandbox transition from now on.
    async fn events(&self) -> Result<Events, Status>;
}

#[tonic::async_trait]
impl<T: RuntimeService + ImageService> Host for InProcess<T> {
    async fn version(&self, request: cri::VersionRequest) -> Result<cri::VersionResponse, Status> {
        RuntimeService::version(&self.0, Request::new(request)).await.map(tonic::Response::into_inner)
    }

    async fn status(&self, request: cri::StatusRequest) -> Result<cri::StatusResponse, Status> {
        RuntimeService::status(&self.0, Request::new(request)).await.map(tonic::Response::into_inner)
    }

    async fn events(&self) -> Result<Events, Status> {
        let response = self.0.get_container_events(Request::new(GetEventsRequest {})).await?;
        Ok(response.into_inner().boxed())
    }
}

#[tonic::async_trait]
impl Host for Remote {
    async fn version(&self, request: cri::VersionRequest) -> Result<cri::VersionResponse, Status> {
        self.runtime.clone().version(request).await.map(tonic::Response::into_inner)
    }

    async fn status(&self, request: cri::StatusRequest) -> Result<cri::StatusResponse, Status> {
        self.runtime.clone().status(request).await.map(tonic::Response::into_inner)
    }

    async fn events(&self) -> Result<Events, Status> {
        Ok(self.runtime.clone().get_container_events(GetEventsRequest {}).await?.into_inner().boxed())
    }
}

/// What a runtime tells of its images beside CRI, which tells nothing of them.
pub trait ImageNews {
    /// Changes whenever an image or a name of one comes or goes; none, when nobody tells.
    fn image_news(&self) -> Option<watch::Receiver<()>>;
}

impl ImageNews for InProcess<coracle_cri::Runtime> {
    fn image_news(&self) -> Option<watch::Receiver<()>> {
        Some(self.0.image_changes())
    }
}

impl ImageNews for Remote {
    fn image_news(&self) -> Option<watch::Receiver<()>> {
        None
    }
}

impl Streams for InProcess<coracle_cri::Runtime> {
    fn stream(&self, url: &str, mut request: http::Request<Incoming>) -> BoxFuture<'static, Response<Body>> {
        // The runtime knows a stream by the token at the end of the path, and nothing else of the URL.
        let path = url.parse::<Uri>().ok().and_then(|url| url.path_and_query().cloned());
        *request.uri_mut() = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
        let runtime = self.0.clone();
        Box::pin(async move { runtime.stream(request).await.map(BodyExt::boxed_unsync) })
    }
}

impl Streams for Remote {
    fn stream(&self, url: &str, request: http::Request<Incoming>) -> BoxFuture<'static, Response<Body>> {
        Proxy.stream(url, request)
    }
}
