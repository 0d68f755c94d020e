//! Device plugins that register in the directory of drivers. Another part of the agent handles them.

use futures::future::BoxFuture;

use super::driver::Link;

/// A device plugin that has a socket in the registration directory.
pub(crate) struct WatchedPlugin {
    /// Name of the extended resource.
    pub(crate) resource: String,
    /// Supported versions of the plugin's API.
    pub(crate) versions: Vec<String>,
    /// The connection to the plugin's endpoint. Dropping it disconnects the plugin.
    pub(crate) link: Link,
}

/// Completes when the plugin has ended, or when another plugin has registered for its resource.
pub(crate) type PluginEnd = BoxFuture<'static, ()>;

/// Registers device plugins.
pub(crate) trait DevicePluginHandler: Send + Sync {
    /// Registers a plugin.
    ///
    /// # Errors
    /// A message for the plugin.
    fn register_watched(&self, plugin: WatchedPlugin) -> BoxFuture<'static, Result<PluginEnd, String>>;
}
