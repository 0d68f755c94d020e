//! Settings of NRI: paths and timeouts.

use std::path::PathBuf;
use std::time::Duration;

/// Default timeout of a registration with its first synchronization, as in upstream.
pub const REGISTRATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Default timeout of a request, as in upstream.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(2);

/// Settings of NRI.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The socket at which plugins connect, such as `/var/run/nri/nri.sock`. `None` means that external plugins are
    /// disabled.
    pub socket: Option<PathBuf>,
    /// Directory of pre-installed plugins, such as `/opt/nri/plugins`. `None` if no plugins are started.
    pub plugins: Option<PathBuf>,
    /// Directory of their configurations; default `/etc/nri/conf.d`.
    pub configs: PathBuf,
    /// Timeout of a registration and synchronization.
    pub registration_timeout: Duration,
    /// Timeout of any other request.
    pub request_timeout: Duration,
    /// Name of the runtime, as sent to plugins.
    pub runtime_name: String,
    /// Version of the runtime, as sent to plugins.
    pub runtime_version: String,
}

// === impl Settings ===

impl Default for Settings {
    fn default() -> Self {
        Self {
            socket: None,
            plugins: None,
            configs: PathBuf::from("/etc/nri/conf.d"),
            registration_timeout: REGISTRATION_TIMEOUT,
            request_timeout: REQUEST_TIMEOUT,
            runtime_name: "coracle".to_owned(),
            runtime_version: format!("v{}", env!("CARGO_PKG_VERSION")),
        }
    }
}
