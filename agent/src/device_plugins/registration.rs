//! The registration socket: plugins register themselves, as at a kubelet.

use std::path::Path;

use coracle_cri::UnixClient;
use coracle_error_chain::chain;
use coracle_events::{MESSAGE_MAX, printable};
use coracle_proto::device_plugin as api;
use coracle_proto::device_plugin::registration_server::{Registration, RegistrationServer};
use coracle_values::names::qualified_name;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

use super::plugin::{self, Plugin};
use super::{DevicePlugins, sockets};
use crate::dra::Link;
use crate::node::is_extended;

/// The supported version of the API.
const VERSION: &str = "v1beta1";
/// Maximum bytes of a registration.
const REQUEST_MAX: usize = 16 << 10;
/// Maximum resources of plugins. Each has a connection and a task.
const RESOURCES_MAX: usize = 256;
/// Maximum calls at a time of one client.
const CALLS_MAX: usize = 8;

/// A registered plugin, whose devices are not known yet.
pub(super) struct Connected {
    pub(super) name: String,
    /// Whether the node did not have the resource before.
    pub(super) is_new: bool,
    /// Number of the registration.
    pub(super) number: u64,
    pub(super) plugin: Plugin,
    pub(super) link: Link,
}

/// The service at the socket.
struct Service {
    plugins: DevicePlugins,
    connected: mpsc::Sender<Connected>,
}

/// Serves the registration socket until dropped. Without it no plugin can register; pods without devices are not
/// affected.
pub(super) async fn serve(plugins: DevicePlugins, connected: mpsc::Sender<Connected>) {
    let dir = plugins.shared.config.sockets.clone();
    let listener = match sockets::remove_all(&dir).and_then(|()| sockets::listen(&dir)) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(%error, dir = %dir.display(), "cannot listen for device plugins");
            return std::future::pending().await;
        }
    };
    let service = RegistrationServer::new(Service { plugins, connected });
    let incoming = UnixListenerStream::new(listener).map(|stream| stream.map(UnixClient::new));
    let served = Server::builder()
        .concurrency_limit_per_connection(CALLS_MAX)
        .add_service(service.max_decoding_message_size(REQUEST_MAX))
        .serve_with_incoming(incoming)
        .await;
    if let Err(error) = served {
        tracing::warn!(error = chain(&error), "cannot serve the registration of device plugins");
    }
    std::future::pending().await
}

#[tonic::async_trait]
impl Registration for Service {
    async fn register(&self, request: Request<api::RegisterRequest>) -> Result<Response<api::Empty>, Status> {
        let request = request.into_inner();
        // Reserved before: a client that disconnects must not leave a plugin that is not followed.
        let place = self.connected.reserve().await;
        let place = place.map_err(|_closed| Status::unavailable("the node is stopping"))?;
        let registered = self.plugins.register(&request).await;
        let connected = registered.inspect_err(|status| {
            let (resource, error) = (printable(&request.resource_name, MESSAGE_MAX / 8), status.message());
            tracing::warn!(resource, error, "cannot register a device plugin");
        })?;
        place.send(connected);
        Ok(Response::new(api::Empty {}))
    }
}

impl DevicePlugins {
    /// Checks a registration, connects to the plugin and adds it to the table.
    async fn register(&self, request: &api::RegisterRequest) -> Result<Connected, Status> {
        check(request)?;
        let name = &request.resource_name;
        let is_full = {
            let state = self.state();
            !state.table.has(name) && state.table.len() >= RESOURCES_MAX
        };
        if is_full {
            let message = format!("this node supports at most {RESOURCES_MAX} resources of device plugins");
            return Err(Status::resource_exhausted(message));
        }
        let dir = &self.shared.config.sockets;
        let connected = plugin::connect(dir, Path::new(&request.endpoint)).await;
        let (plugin, link) = connected.map_err(|error| Status::new(Code::Unknown, chain(&error)))?;
        tracing::info!(resource = name, "device plugin registered");
        Ok(self.add(name, plugin, link))
    }
}

/// Checks version and name of a registration. The messages are upstream's (`cm/devicemanager/plugin/v1beta1`).
fn check(request: &api::RegisterRequest) -> Result<(), Status> {
    let shown = |text: &str| printable(text, MESSAGE_MAX / 8);
    if request.version != VERSION {
        let version = shown(&request.version);
        return Err(Status::new(
            Code::Unknown,
            format!(
                "requested API version {version:?} is not supported by kubelet. Supported version is [{VERSION:?}]"
            ),
        ));
    }
    let name = &request.resource_name;
    // As upstream: the name must also be valid in a quota.
    if !is_extended(name) || !qualified_name(&format!("requests.{name}")).is_empty() {
        return Err(Status::new(Code::Unknown, format!("the ResourceName {:?} is invalid", shown(name))));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_and_name_of_a_registration_are_checked() {
        let checked = |version: &str, name: &str| {
            let request = api::RegisterRequest {
                version: version.to_owned(),
                resource_name: name.to_owned(),
                ..api::RegisterRequest::default()
            };
            check(&request).map_err(|status| status.message().to_owned())
        };
        assert_eq!(checked("v1beta1", "example.com/resource"), Ok(()));
        let version =
            "requested API version \"v1\" is not supported by kubelet. Supported version is [\"v1beta1\"]";
        assert_eq!(checked("v1", "example.com/resource"), Err(version.to_owned()));
        for name in
            ["resource", "kubernetes.io/x", "x.kubernetes.io/y", "requests.x.io/a", "x.io/", "x.io/a b"]
        {
            let expected = Err(format!("the ResourceName {name:?} is invalid"));
            assert_eq!(checked("v1beta1", name), expected, "{name}");
        }
    }
}
