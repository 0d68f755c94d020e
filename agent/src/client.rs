//! A client of an API server elsewhere, which notices when the way there is gone.

use std::time::Duration;

use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::ConfigExt;
use tower::{BoxError, ServiceBuilder};

/// How long what was sent may stay unanswered by the other end's kernel.
const UNANSWERED: Duration = Duration::from_secs(15);
/// How long a connection is silent before its other end is asked whether it is still there, by the kernel.
const SILENT: Duration = Duration::from_secs(10);
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// The usual client, but that its connections end when the other end is silent: a machine that lost its power says
/// no word, and one whose own address changed hears none. A watch would wait for ever.
///
/// # Errors
/// When certificates or credentials of the configuration cannot be used.
pub fn client(config: kube::Config) -> Result<kube::Client, kube::Error> {
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(config.connect_timeout);
    tcp.set_keepalive(Some(SILENT));
    tcp.set_keepalive_interval(Some(ASK_AGAIN));
    tcp.set_keepalive_retries(Some(2));
    tcp.set_tcp_user_timeout(Some(UNANSWERED));
    let https = config.rustls_https_connector_with_connector(tcp)?;
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .map_err(BoxError::from)
        .service(Client::builder(TokioExecutor::new()).build(https));
    Ok(kube::Client::new(service, config.default_namespace))
}
