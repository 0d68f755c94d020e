//! The address of a cluster's API server.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use kube::Config;

use super::error::JoinError;

/// Timeout of a connection attempt to the API server.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The URL of the API server: `https://HOST:PORT`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Endpoint(http::Uri);

impl FromStr for Endpoint {
    type Err = JoinError;

    fn from_str(text: &str) -> Result<Self, JoinError> {
        let wrong = || JoinError::Setting(format!("{text} is not of the form https://HOST:PORT"));
        let uri: http::Uri = text.trim_end_matches('/').parse().map_err(|_malformed| wrong())?;
        let plain = uri.path_and_query().is_none_or(|path| matches!(path.as_str(), "" | "/"));
        let right =
            uri.scheme_str() == Some("https") && uri.host().is_some_and(|host| !host.is_empty()) && plain;
        if right { Ok(Self(uri)) } else { Err(wrong()) }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.to_string().trim_end_matches('/'))
    }
}

impl Endpoint {
    /// A client configuration without credentials and without trusted authorities.
    pub(super) fn config(&self) -> Config {
        let mut config = Config::new(self.0.clone());
        config.connect_timeout = Some(CONNECT_TIMEOUT);
        // The list is empty, because without a list the client loads the machine's authorities, and an appliance
        // possibly has no authorities.
        config.root_cert = Some(Vec::new());
        config
    }

    pub(super) fn unreachable(&self, error: &dyn std::error::Error) -> JoinError {
        JoinError::Unreachable { server: self.to_string(), reason: coracle_error_chain::chain(error) }
    }
}
