//! API clients that detect a lost connection.

pub(crate) mod measured;

use std::time::Duration;

use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::ConfigExt;
use measured::Measured;
use tower::{BoxError, ServiceBuilder};

/// Maximum time without an acknowledgement of sent data (TCP_USER_TIMEOUT).
const UNANSWERED: Duration = Duration::from_secs(15);
/// Idle time after which the kernel sends keepalive probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// A standard client whose connections fail when the server is unreachable. After a power failure, or after a change of
/// this machine's address, no packet closes them, and a watch would wait forever.
///
/// # Errors
/// When certificates or credentials of the configuration are unusable.
pub fn client(config: kube::Config) -> Result<kube::Client, kube::Error> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(config.connect_timeout);
    tcp.set_keepalive(Some(KEEPALIVE_IDLE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(2));
    tcp.set_tcp_user_timeout(Some(UNANSWERED));
    let https = config.rustls_https_connector_with_connector(tcp)?;
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .map_err(BoxError::from)
        .service(Client::builder(TokioExecutor::new()).build(https));
    let service = Measured::new(service, &config.cluster_url);
    Ok(kube::Client::new(service, config.default_namespace))
}
