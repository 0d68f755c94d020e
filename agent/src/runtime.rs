//! The container runtime as pod sync and the kubelet API use it: five small traits in CRI types.
//!
//! Two types implement the traits. [`InProcess`] is the cri crate in this process (no gRPC, no serialization).
//! [`Remote`] is a CRI client for another runtime (`--container-runtime-endpoint`: containerd, CRI-O). A third type,
//! `Measured`, counts the calls of one of them.

mod deadline;
mod error;
mod measured;
pub(crate) mod relist;
mod remote;
mod streams;

use std::sync::Arc;

use coracle_proto::cri::image_service_server::ImageService;
use coracle_proto::cri::runtime_service_server::RuntimeService;
use coracle_proto::cri::{self, ContainerEventResponse, GetEventsRequest};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use http::uri::PathAndQuery;
use http::{Response, Uri};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::sync::watch;
use tonic::{Request, Response as Answer, Status};

use deadline::RemoteCall;

pub use error::RuntimeError;
pub(crate) use measured::Measured;
pub use remote::{ConnectError, Remote};
pub use streams::{Body, Proxy, Streams};

/// A stream of container events; an error item ends it.
pub type Events = BoxStream<'static, Result<ContainerEventResponse, RuntimeError>>;

/// All five traits; implemented for every type that implements them.
pub trait Runtime: Sandboxes + Containers + Execs + Images + Host {}

impl<T: Sandboxes + Containers + Execs + Images + Host> Runtime for T {}

/// The runtime in this process.
#[derive(Clone, Debug)]
pub struct InProcess<T>(pub T);

/// The message of a response, or the runtime's error.
fn answer<T>(result: Result<Answer<T>, Status>) -> Result<T, RuntimeError> {
    result.map(Answer::into_inner).map_err(RuntimeError::from)
}

/// Declares a trait of unary calls with its implementations.
macro_rules! calls {
    ($(#[$doc:meta])* $name:ident, $service:ident, $client:ident,
     { $($(#[$call_doc:meta])* $call:ident($request:ident) -> $response:ident;)* }) => {
        $(#[$doc])*
        #[tonic::async_trait]
        pub trait $name: Send + Sync + 'static {
            $($(#[$call_doc])*
            async fn $call(&self, request: cri::$request) -> Result<cri::$response, RuntimeError>;)*
        }

        #[tonic::async_trait]
        impl<T: RuntimeService + ImageService> $name for InProcess<T> {
            $(async fn $call(&self, request: cri::$request) -> Result<cri::$response, RuntimeError> {
                answer($service::$call(&self.0, Request::new(request)).await)
            })*
        }

        #[tonic::async_trait]
        impl $name for Remote {
            $(async fn $call(&self, request: cri::$request) -> Result<cri::$response, RuntimeError> {
                deadline::make_log_directory(&request).await?;
                let limit = request.limit();
                let mut client = self.$client.clone();
                deadline::within(limit, stringify!($call), client.$call(request)).await
            })*
        }

        #[tonic::async_trait]
        impl $name for Measured {
            $(async fn $call(&self, request: cri::$request) -> Result<cri::$response, RuntimeError> {
                self.measure(stringify!($call), $name::$call(&*self.inner, request)).await
            })*
        }
    };
}

calls!(
    /// Pod sandboxes.
    Sandboxes, RuntimeService, runtime, {
        /// Creates and starts a sandbox with its network.
        run_pod_sandbox(RunPodSandboxRequest) -> RunPodSandboxResponse;
        /// Stops the processes of a sandbox and releases its network. Succeeds if the sandbox does not exist.
        stop_pod_sandbox(StopPodSandboxRequest) -> StopPodSandboxResponse;
        /// Removes a sandbox and its containers. Succeeds if the sandbox does not exist.
        remove_pod_sandbox(RemovePodSandboxRequest) -> RemovePodSandboxResponse;
        /// State, addresses and namespaces of one sandbox.
        pod_sandbox_status(PodSandboxStatusRequest) -> PodSandboxStatusResponse;
        /// The sandboxes that a filter selects.
        list_pod_sandbox(ListPodSandboxRequest) -> ListPodSandboxResponse;
        /// Usage of all sandboxes that a filter selects, with their containers.
        list_pod_sandbox_stats(ListPodSandboxStatsRequest) -> ListPodSandboxStatsResponse;
    }
);

calls!(
    /// Containers.
    Containers, RuntimeService, runtime, {
        /// Creates a container without starting it.
        create_container(CreateContainerRequest) -> CreateContainerResponse;
        /// Starts a created container.
        start_container(StartContainerRequest) -> StartContainerResponse;
        /// Sends the stop signal and, after the timeout, SIGKILL. Succeeds if the container does not exist.
        stop_container(StopContainerRequest) -> StopContainerResponse;
        /// Removes a container with its root filesystem. Succeeds if the container does not exist.
        remove_container(RemoveContainerRequest) -> RemoveContainerResponse;
        /// State, times and exit code of one container.
        container_status(ContainerStatusRequest) -> ContainerStatusResponse;
        /// The containers that a filter selects.
        list_containers(ListContainersRequest) -> ListContainersResponse;
        /// Changes the limits of a created or running container. Limits that are 0 or empty stay unchanged.
        update_container_resources(UpdateContainerResourcesRequest) -> UpdateContainerResourcesResponse;
        /// Reopens the log file after its rotation.
        reopen_container_log(ReopenContainerLogRequest) -> ReopenContainerLogResponse;
        /// CPU, memory and disk usage of one container.
        container_stats(ContainerStatsRequest) -> ContainerStatsResponse;
        /// Usage of all containers that a filter selects.
        list_container_stats(ListContainerStatsRequest) -> ListContainerStatsResponse;
        /// Writes a checkpoint of a running container to a file of the node.
        checkpoint_container(CheckpointContainerRequest) -> CheckpointContainerResponse;
        /// Names, help texts and labels of the runtime's metrics.
        list_metric_descriptors(ListMetricDescriptorsRequest) -> ListMetricDescriptorsResponse;
        /// Metrics of all pods and their containers.
        list_pod_sandbox_metrics(ListPodSandboxMetricsRequest) -> ListPodSandboxMetricsResponse;
    }
);

calls!(
    /// Additional processes in a container, and streams into a pod.
    Execs, RuntimeService, runtime, {
        /// Runs a command to its end and returns its output.
        exec_sync(ExecSyncRequest) -> ExecSyncResponse;
        /// Prepares a streaming exec and returns its URL.
        exec(ExecRequest) -> ExecResponse;
        /// Prepares a streaming attach and returns its URL.
        attach(AttachRequest) -> AttachResponse;
        /// Prepares a port forward and returns its URL.
        port_forward(PortForwardRequest) -> PortForwardResponse;
    }
);

calls!(
    /// Images.
    Images, ImageService, images, {
        /// The image of a reference or id, if it is in the store.
        image_status(ImageStatusRequest) -> ImageStatusResponse;
        /// Pulls an image and returns its id.
        pull_image(PullImageRequest) -> PullImageResponse;
        /// All images that a filter selects.
        list_images(ListImagesRequest) -> ListImagesResponse;
        /// Removes an image. Succeeds if the image does not exist.
        remove_image(RemoveImageRequest) -> RemoveImageResponse;
        /// Disk usage of the image store.
        image_fs_info(ImageFsInfoRequest) -> ImageFsInfoResponse;
    }
);

/// The runtime itself.
#[tonic::async_trait]
pub trait Host: Send + Sync + 'static {
    /// Name and version.
    async fn version(&self, request: cri::VersionRequest) -> Result<cri::VersionResponse, RuntimeError>;
    /// Cgroup driver and other settings of the runtime.
    async fn runtime_config(
        &self,
        request: cri::RuntimeConfigRequest,
    ) -> Result<cri::RuntimeConfigResponse, RuntimeError>;
    /// Gives the runtime the address ranges of the node's pods.
    async fn update_runtime_config(
        &self,
        request: cri::UpdateRuntimeConfigRequest,
    ) -> Result<cri::UpdateRuntimeConfigResponse, RuntimeError>;
    /// Whether runtime and network are ready.
    async fn status(&self, request: cri::StatusRequest) -> Result<cri::StatusResponse, RuntimeError>;
    /// Every state change of a container or sandbox from now on.
    async fn events(&self) -> Result<Events, RuntimeError>;
}

#[tonic::async_trait]
impl<T: RuntimeService + ImageService> Host for InProcess<T> {
    async fn version(&self, request: cri::VersionRequest) -> Result<cri::VersionResponse, RuntimeError> {
        answer(RuntimeService::version(&self.0, Request::new(request)).await)
    }

    async fn status(&self, request: cri::StatusRequest) -> Result<cri::StatusResponse, RuntimeError> {
        answer(RuntimeService::status(&self.0, Request::new(request)).await)
    }

    async fn runtime_config(
        &self,
        request: cri::RuntimeConfigRequest,
    ) -> Result<cri::RuntimeConfigResponse, RuntimeError> {
        answer(RuntimeService::runtime_config(&self.0, Request::new(request)).await)
    }

    async fn update_runtime_config(
        &self,
        request: cri::UpdateRuntimeConfigRequest,
    ) -> Result<cri::UpdateRuntimeConfigResponse, RuntimeError> {
        answer(RuntimeService::update_runtime_config(&self.0, Request::new(request)).await)
    }

    async fn events(&self) -> Result<Events, RuntimeError> {
        let response = self.0.get_container_events(Request::new(GetEventsRequest {})).await?;
        Ok(response.into_inner().map_err(RuntimeError::from).boxed())
    }
}

/// The container runtime of a node: its calls, streams and notifications.
pub struct NodeRuntime {
    pub(crate) calls: Arc<dyn Runtime>,
    pub(crate) streams: Arc<dyn Streams>,
    pub(crate) image_changes: Option<watch::Receiver<()>>,
}

impl NodeRuntime {
    /// The runtime in this process.
    #[must_use]
    pub fn in_process(runtime: coracle_cri::Runtime) -> Self {
        Self::of(Arc::new(InProcess(runtime)))
    }

    /// A runtime in another process.
    #[must_use]
    pub fn remote(runtime: Arc<Remote>) -> Self {
        Self::of(runtime)
    }

    fn of<R: Runtime + Streams + ImageChanges>(runtime: Arc<R>) -> Self {
        let image_changes = runtime.image_changes();
        Self { calls: Arc::<R>::clone(&runtime), streams: runtime, image_changes }
    }
}

/// Notifications about images, which the CRI does not have.
pub trait ImageChanges {
    /// Changes whenever an image or an image name is added or removed. None if the runtime sends no notifications.
    fn image_changes(&self) -> Option<watch::Receiver<()>>;
}

impl ImageChanges for InProcess<coracle_cri::Runtime> {
    fn image_changes(&self) -> Option<watch::Receiver<()>> {
        Some(self.0.image_changes())
    }
}

impl Streams for InProcess<coracle_cri::Runtime> {
    fn stream(&self, url: &str, mut request: http::Request<Incoming>) -> BoxFuture<'static, Response<Body>> {
        // The runtime identifies a stream by the token at the end of the path; the rest of the URL is ignored.
        let path = url.parse::<Uri>().ok().and_then(|url| url.path_and_query().cloned());
        *request.uri_mut() = Uri::from(path.unwrap_or_else(|| PathAndQuery::from_static("/")));
        let runtime = self.0.clone();
        Box::pin(async move { runtime.stream(request).await.map(BodyExt::boxed_unsync) })
    }
}
