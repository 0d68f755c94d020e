//! Where plugins are found and how long they may take.

use std::path::PathBuf;
use std::time::Duration;

/// What a plugin has for its registration, its first synchronization included, upstream's default.
pub const REGISTRATION_TIME: Duration = Duration::from_secs(5);
/// What a plugin has for one request, upstream's default.
pub const REQUEST_TIME: Duration = Duration::from_secs(2);

/// How NRI works.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Where plugins connect, `/var/run/nri/nri.sock`; none = no plugin may.
    pub socket: Option<PathBuf>,
    /// Programs that are started with the runtime, `/opt/nri/plugins`; none = no plugin is.
    pub plugins: Option<PathBuf>,
    /// Their configurations, `/etc/nri/conf.d`.
    pub configs: PathBuf,
    /// Time for registration and synchronization.
    pub registration_time: Duration,
    /// Time for any other request.
    pub request_time: Duration,
    /// What plugins are told of the runtime.
    pub runtime_name: String,
    /// Its version.
    pub runtime_version: String,
}

// === impl Settings ===

impl Default for Settings {
    fn default() -> Self {
        Self {
            socket: None,
            plugins: None,
            configs: PathBuf::from("/etc/nri/conf.d"),
            registration_time: REGISTRATION_TIME,
            request_time: REQUEST_TIME,
            runtime_name: "coracle".to_owned(),
            runtime_version: format!("v{}", env!("CARGO_PKG_VERSION")),
        }
    }
}
