//! Device plugins in the registration directory: plugins of another kind than drivers, which another part of the agent
//! handles.

use futures::future::BoxFuture;

use super::driver::Link;

/// A device plugin that has a socket in the registration directory.
pub(crate) struct WatchedPlugin {
    /// Name of the extended resource.
    pub(crate) resource: String,
    /// Supported versions of the plugin's API.
    pub(crate) versions: Vec<String>,
    /// The connection to its endpoint. The plugin is disconnected when it is dropped.
    pub(crate) link: Link,
}

/// Ends when the plugin has ended, or another one has registered for its resource.
pub(crate) type PluginEnd = BoxFuture<'static, ()>;

/// Registers device plugins.
pub(crate) trait DevicePluginHandler: Send + Sync {
    /// Registers a plugin.
    ///
    /// # Errors
    /// A message for the plugin.
    fn register_watched(&self, plugin: WatchedPlugin) -> BoxFuture<'static, Result<PluginEnd, String>>;
}
