//! The registration socket: plugins register themselves, as at a kubelet.

use std::path::Path;

use coracle_error_chain::chain;
use coracle_events::{MESSAGE_MAX, printable};
use coracle_proto::device_plugin as api;
use coracle_proto::device_plugin::registration_server::{Registration, RegistrationServer};
use coracle_values::names::{is_extended_resource, qualified_name};
use futures::future::{BoxFuture, FutureExt, TryFutureExt};
use tokio::sync::{mpsc, oneshot};
use tonic::transport::Server;
use tonic::{Code, Request, Response, Status};

use super::plugin::{self, Plugin};
use super::table::RESOURCES_MAX;
use super::{DevicePlugins, sockets};
use crate::dra::{DevicePluginHandler, Link, PluginEnd, WatchedPlugin};

/// The supported version of the API.
const VERSION: &str = "v1beta1";
/// Maximum bytes of a registration.
const REQUEST_MAX: usize = 16 << 10;
/// Maximum calls at a time of one client.
const CALLS_MAX: usize = 8;

/// A registered plugin that has not listed its devices yet.
pub(super) struct Connected {
    pub(super) name: String,
    /// Number of the registration.
    pub(super) number: u64,
    pub(super) plugin: Plugin,
    pub(super) link: Link,
    /// Dropped when the plugin has ended.
    pub(super) ended: Option<oneshot::Sender<()>>,
}

/// The service at the socket.
struct Service(DevicePlugins);

/// Serves the registration socket until dropped. Without the socket no plugin can register; pods without devices are
/// not affected.
pub(super) async fn serve(plugins: DevicePlugins) {
    let dir = plugins.shared.config.sockets.clone();
    let listener = match sockets::remove_all(&dir).and_then(|()| sockets::listen(&dir)) {
        Ok(listener) => listener,
        Err(error) => {
            tracing::warn!(%error, dir = %dir.display(), "cannot listen for device plugins");
            return std::future::pending().await;
        }
    };
    let service = RegistrationServer::new(Service(plugins));
    let served = Server::builder()
        .concurrency_limit_per_connection(CALLS_MAX)
        .add_service(service.max_decoding_message_size(REQUEST_MAX))
        .serve_with_incoming(sockets::clients(listener))
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
        let registered = self.0.accept(&request).await;
        registered.inspect_err(|status| {
            let (resource, error) = (shown(&request.resource_name), status.message());
            tracing::warn!(resource, error, "cannot register a device plugin");
        })?;
        Ok(Response::new(api::Empty {}))
    }
}

impl DevicePluginHandler for DevicePlugins {
    fn register_watched(&self, plugin: WatchedPlugin) -> BoxFuture<'static, Result<PluginEnd, String>> {
        let this = self.clone();
        let registered = async move { this.accept_watched(plugin).await };
        registered.map_err(|status| status.message().to_owned()).boxed()
    }
}

impl DevicePlugins {
    /// Reserves a place in the queue of the task that follows plugins. The place is reserved before the plugin is added
    /// to the table. Otherwise, if the client disconnects during the wait, the table would keep a plugin that no task
    /// follows.
    async fn place(&self) -> Result<mpsc::Permit<'_, Connected>, Status> {
        let place = self.shared.connected.reserve().await;
        place.map_err(|_closed| Status::unavailable("the node is stopping"))
    }

    /// Checks a registration, connects to the plugin and adds it to the table.
    async fn accept(&self, request: &api::RegisterRequest) -> Result<(), Status> {
        if request.version != VERSION {
            let version = shown(&request.version);
            let supported = format!("Supported version is [{VERSION:?}]");
            let message =
                format!("requested API version {version:?} is not supported by kubelet. {supported}");
            return Err(Status::new(Code::Unknown, message));
        }
        self.check_name(&request.resource_name)?;
        let link = plugin::connect(&self.shared.config.sockets, Path::new(&request.endpoint)).await;
        // The error contains the endpoint, which is a text from the plugin and may not be printable.
        let link =
            link.map_err(|error| Status::new(Code::Unknown, printable(&chain(&error), MESSAGE_MAX)))?;
        self.open_plugin(&request.resource_name, link, None).await
    }

    /// Checks a plugin of the registration directory, and adds it to the table.
    async fn accept_watched(&self, watched: WatchedPlugin) -> Result<PluginEnd, Status> {
        let WatchedPlugin { resource, versions, link } = watched;
        if !versions.iter().any(|version| version == VERSION) {
            let versions = shown(&versions.join(" "));
            let message =
                format!("manager version, {VERSION}, is not among plugin supported versions [{versions}]");
            return Err(Status::new(Code::Unknown, message));
        }
        self.check_name(&resource)?;
        let (sender, ended) = oneshot::channel();
        self.open_plugin(&resource, link, Some(sender)).await?;
        Ok(ended.map(drop).boxed())
    }

    /// Checks the name of a resource, and that there is room for it.
    fn check_name(&self, name: &str) -> Result<(), Status> {
        if !is_valid(name) {
            let message = format!("the ResourceName {:?} is invalid", shown(name));
            return Err(Status::new(Code::Unknown, message));
        }
        let mut state = self.state();
        if !state.table.has(name) && !state.table.make_room() {
            let message = format!("this node supports at most {RESOURCES_MAX} resources of device plugins");
            return Err(Status::resource_exhausted(message));
        }
        Ok(())
    }

    /// Asks a connected plugin for its options, adds it to the table, and passes it to the task that follows plugins.
    /// `ended` is dropped when the plugin has ended.
    async fn open_plugin(
        &self,
        name: &str,
        link: Link,
        ended: Option<oneshot::Sender<()>>,
    ) -> Result<(), Status> {
        let plugin = Plugin::open(&link).await;
        let plugin = plugin.map_err(|error| Status::new(Code::Unknown, chain(&error)))?;
        // The place is reserved after the call: a plugin that does not answer must not delay the registration of other
        // plugins.
        let place = self.place().await?;
        // The name is checked again, because other plugins may have registered meanwhile.
        self.check_name(name)?;
        place.send(Connected { ended, ..self.add(name, plugin, link) });
        tracing::info!(resource = name, "device plugin registered");
        Ok(())
    }
}

/// Whether a plugin can have a resource of this name. As upstream, the name must also be valid in a quota.
fn is_valid(name: &str) -> bool {
    is_extended_resource(name) && qualified_name(&format!("requests.{name}")).is_empty()
}

/// A text from a plugin, shortened and made printable for messages.
fn shown(text: &str) -> String {
    printable(text, MESSAGE_MAX / 8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_extended_resources_that_a_quota_can_name_are_valid() {
        assert!(is_valid("example.com/resource"));
        for name in
            ["resource", "kubernetes.io/x", "x.kubernetes.io/y", "requests.x.io/a", "x.io/", "x.io/a b"]
        {
            assert!(!is_valid(name), "{name}");
        }
    }
}
