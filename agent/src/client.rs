//! API clients that detect a lost connection.

pub(crate) mod measured;

use std::time::Duration;

use http::{HeaderValue, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ConfigExt};
use measured::Measured;
use tokio::sync::watch;
use tower::util::MapRequest;
use tower::{BoxError, ServiceBuilder};

use crate::version::KUBELET_VERSION;

/// Maximum time without an acknowledgement of sent data (TCP_USER_TIMEOUT).
const UNANSWERED: Duration = Duration::from_secs(15);
/// Idle time after which the kernel sends keepalive probes.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);

/// Prefix of the paths of leases. A component renews its lease even without work.
const LEASES: &str = "/apis/coordination.k8s.io/";

/// The client of controllers and scheduler. Its connections fail when the server is unreachable. `requests` gets a
/// change with each request, except requests for leases.
///
/// # Errors
/// When certificates or credentials of the configuration are unusable.
pub fn component_client(
    config: kube::Config,
    requests: watch::Sender<()>,
) -> Result<kube::Client, kube::Error> {
    client(config, move |request| {
        if !request.uri().path().starts_with(LEASES) {
            requests.send_replace(());
        }
    })
}

/// A client whose connections fail when the server is unreachable. After a power failure, or after a change of this
/// machine's address, no packet closes the connections, and a watch would wait forever. `on_request` is called with
/// each request before it is sent.
fn client(
    config: kube::Config,
    on_request: impl Fn(&http::Request<Body>) + Send + 'static,
) -> Result<kube::Client, kube::Error> {
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
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(Client::builder(TokioExecutor::new()).build(https));
    let on_request = move |request: http::Request<Body>| {
        on_request(&request);
        request
    };
    let service = MapRequest::new(Measured::new(service, &config.cluster_url), on_request);
    Ok(kube::Client::new(service, config.default_namespace))
}

/// The client of a node. Its connections fail when the server is unreachable. Its user agent is a kubelet's. The API
/// server uses the user agent as the name of the field manager, and as the name of the client in its audit log.
///
/// # Errors
/// When certificates or credentials of the configuration are unusable.
pub fn node_client(mut config: kube::Config) -> Result<kube::Client, kube::Error> {
    if let Ok(agent) = HeaderValue::from_str(&format!("kubelet/{KUBELET_VERSION}")) {
        config.headers.push((header::USER_AGENT, agent));
    }
    client(config, |_request| {})
}

/// A client whose requests are never answered.
#[cfg(test)]
pub(crate) fn silent() -> kube::Client {
    let service = tower::service_fn(|_: http::Request<kube::client::Body>| {
        std::future::pending::<Result<http::Response<kube::client::Body>, std::convert::Infallible>>()
    });
    kube::Client::new(service, "default")
}

/// A client of an API server that answers the first request for each list with `items` of the path, and is unreachable
/// afterwards. Watches end at once, because the resource version has expired, and no further list is answered.
#[cfg(test)]
pub(crate) fn unreachable_after_lists(
    items: impl Fn(&str) -> serde_json::Value + Send + 'static,
) -> kube::Client {
    use serde_json::json;
    let mut listed = std::collections::HashSet::new();
    let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
        let uri = request.uri();
        let answer = if uri.query().is_some_and(|query| query.contains("watch=")) {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired",
                "message": "expired", "code": 410});
            Some((410, status))
        } else {
            let list = || json!({"metadata": {"resourceVersion": "7"}, "items": items(uri.path())});
            listed.insert(uri.to_string()).then(|| (200, list()))
        };
        let response = answer.ok_or_else(|| std::io::Error::other("the API server is unreachable"));
        let response = response.and_then(|(code, body): (u16, serde_json::Value)| {
            let body = kube::client::Body::from(body.to_string().into_bytes());
            http::Response::builder().status(code).body(body).map_err(std::io::Error::other)
        });
        std::future::ready(response)
    });
    kube::Client::new(service, "default")
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn requests_of_components_are_changes_unless_they_are_for_leases() {
        // A request counts before it is sent.
        let closed = coracle_testing::ClosedPort::reserve();
        let mut config = kube::Config::new(format!("http://{}", closed.address()).parse().unwrap());
        config.root_cert = Some(Vec::new());
        let (requests, mut changes) = watch::channel(());
        let client = component_client(config, requests).unwrap();
        for (path, is_change) in [
            ("/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/kube-scheduler", false),
            ("/api/v1/pods", true),
            ("/api/v1/pods?watch=1", true),
        ] {
            let request = http::Request::get(path).body(Vec::new()).unwrap();
            assert!(client.request_text(request).await.is_err());
            assert_eq!(changes.has_changed().unwrap(), is_change, "{path}");
            changes.mark_unchanged();
        }
    }

    #[tokio::test]
    async fn a_node_has_the_user_agent_of_a_kubelet() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let mut config = kube::Config::new(url.parse().unwrap());
        config.root_cert = Some(Vec::new());
        let client = node_client(config).unwrap();
        let server = async {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                assert_ne!(stream.read_buf(&mut request).await.unwrap(), 0);
            }
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}").await.unwrap();
            String::from_utf8(request).unwrap()
        };
        let request = http::Request::get("/version").body(Vec::new()).unwrap();
        let (answer, request) = tokio::join!(client.request_text(request), server);
        assert_eq!(answer.unwrap(), "{}");
        let line = format!("user-agent: kubelet/{KUBELET_VERSION}\r\n");
        assert!(request.contains(&line), "{request}");
    }
}
