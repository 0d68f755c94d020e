//! Requests to the kubelet of a node: its address, and one HTTPS request.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use coracle_connections::PermitStream;
use coracle_kinds::kind::by_resource;
use http::{HeaderValue, Request, Response, header};
use hyper::body::Incoming;
use rustls_pki_types::ServerName;
use serde_json::Value;
use tokio_rustls::TlsConnector;

use crate::{
    call::Call,
    error::{ApiError, Result},
    reply::Body,
    resolver,
    target::{dial, exchange},
};

const DEFAULT_PORT: u16 = 10250;

/// The address of a node's kubelet.
pub(super) struct Address {
    pub(super) host: String,
    pub(super) port: u16,
}

impl std::fmt::Display for Address {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// Maximum time to connect to a kubelet, as upstream.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);

/// Sends a request to the kubelet of a node. The connection can be upgraded.
pub(crate) async fn send(call: &Call, node: &str, mut request: Request<Body>) -> Result<Response<Incoming>> {
    let address = address(call, node)?;
    let permit = call.state.in_flight.stream(&call.user, node)?;
    let target = address.to_string();
    let failed = |what: &str, error: &dyn std::fmt::Display| dial_error(what, &target, error);
    let name = ServerName::try_from(address.host.clone()).map_err(|error| failed("bad name", &error))?;
    let connector = TlsConnector::from(Arc::clone(&call.state.kubelet.0));
    let connecting = async {
        let found = resolver::resolve(&address.host, address.port).await;
        let found = found.map_err(|error| failed("cannot resolve", &error))?;
        let stream = dial(found.as_slice()).await;
        let stream = stream.map_err(|error| failed("cannot connect to", &error))?;
        connector.connect(name, stream).await.map_err(|error| failed("no TLS with", &error))
    };
    let stream = in_time(&target, connecting).await?;
    let host = HeaderValue::from_str(&target).map_err(|error| failed("bad name", &error))?;
    request.headers_mut().insert(header::HOST, host);
    exchange(PermitStream::new(stream, permit), request, &target, call.state.request_timeout).await
}

fn dial_error(what: &str, target: &str, error: &dyn std::fmt::Display) -> ApiError {
    ApiError::internal(format!("error dialing backend: {what} {target}: {error}"))
}

/// Connects within [`CONNECT_TIMEOUT`].
async fn in_time<T>(target: &str, connecting: impl Future<Output = Result<T>>) -> Result<T> {
    let connected = tokio::time::timeout(CONNECT_TIMEOUT, connecting).await;
    connected.unwrap_or_else(|elapsed| Err(dial_error("cannot connect to", target, &elapsed)))
}

/// The address of a node's kubelet.
pub(super) fn address(call: &Call, node: &str) -> Result<Address> {
    let kind = by_resource("", "v1", "nodes").ok_or_else(ApiError::no_resource)?;
    let object = call.state.cache.get(kind, "", node).ok_or_else(|| ApiError::not_found(kind, node))?.value();
    let host = preferred_address(&object["status"]);
    let host = host.ok_or_else(|| ApiError::internal(format!("node {node} has no address")))?;
    let port = object["status"]["daemonEndpoints"]["kubeletEndpoint"]["Port"].as_u64();
    let port =
        port.and_then(|port| u16::try_from(port).ok()).filter(|port| *port > 0).unwrap_or(DEFAULT_PORT);
    Ok(Address { host: host.to_owned(), port })
}

/// The address by which the server connects to the kubelet. The kubelet can report any text as one of its addresses. A
/// host name is used only if its type is `Hostname`.
fn preferred_address(status: &Value) -> Option<&str> {
    ["InternalIP", "ExternalIP", "Hostname"].into_iter().find_map(|wanted| {
        let addresses = status["addresses"].as_array()?.iter();
        let mut of_type = addresses
            .filter(|address| address["type"] == wanted)
            .filter_map(|address| address["address"].as_str());
        of_type.find(|address| wanted == "Hostname" || address.parse::<IpAddr>().is_ok())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reply::full;

    #[tokio::test(start_paused = true)]
    async fn a_kubelet_that_does_not_answer_ends_the_request() {
        let (ours, theirs) = tokio::io::duplex(1 << 10);
        let request = Request::get("/containerLogs/ns/pod/c").body(full("")).unwrap();
        let limit = Duration::from_secs(60);
        let exchange = tokio::time::timeout(2 * limit, exchange(ours, request, "n1:10250", limit));
        let error = exchange.await.expect("an end").expect_err("no answer");
        assert_eq!(error.status()["code"], 504, "{}", error.status());
        drop(theirs);
    }

    /// CVE-2018-1002105: after a refused upgrade the client could send requests of its own to the kubelet.
    #[tokio::test]
    async fn cve_2018_1002105_a_refused_upgrade_ends_the_connection() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

        let (ours, mut theirs) = tokio::io::duplex(1 << 10);
        let kubelet = tokio::spawn(async move {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                head.push(theirs.read_u8().await.unwrap());
            }
            theirs.write_all(b"HTTP/1.1 403 Forbidden\r\ncontent-length: 2\r\n\r\nno").await.unwrap();
            let mut more = Vec::new();
            theirs.read_to_end(&mut more).await.unwrap();
            more
        });
        let request =
            Request::get("/exec/ns/pod/c").header("connection", "upgrade").header("upgrade", "SPDY/3.1");
        let request = request.body(full("")).unwrap();
        let mut answer = exchange(ours, request, "n1:10250", Duration::from_secs(60)).await.unwrap();
        assert_eq!(answer.status(), 403);
        assert!(hyper::upgrade::on(&mut answer).await.is_err(), "nothing to be connected");
        drop(answer);
        assert_eq!(kubelet.await.unwrap(), b"", "the kubelet got more");
    }

    #[test]
    fn a_name_is_not_the_ip_address_of_a_node() {
        let address = |kind: &str, address: &str| serde_json::json!({"type": kind, "address": address});
        let preferred = |addresses: &[Value]| {
            preferred_address(&serde_json::json!({"addresses": addresses})).map(str::to_owned)
        };
        let [name, ip, external] =
            [("InternalIP", "slow.example"), ("InternalIP", "192.0.2.1"), ("ExternalIP", "::1")]
                .map(|(kind, text)| address(kind, text));
        let host = address("Hostname", "node-1");
        let chosen = preferred(&[host.clone(), name.clone(), ip, external.clone()]);
        assert_eq!(chosen.as_deref(), Some("192.0.2.1"));
        assert_eq!(preferred(&[name.clone(), external]).as_deref(), Some("::1"));
        assert_eq!(preferred(&[name.clone(), host]).as_deref(), Some("node-1"));
        assert_eq!(preferred(&[name]), None);
    }

    #[test]
    fn an_address_is_printed_as_in_a_url() {
        let printed = |host: &str| Address { host: host.to_owned(), port: 10250 }.to_string();
        assert_eq!(printed("192.0.2.1"), "192.0.2.1:10250");
        assert_eq!(printed("2001:db8::1"), "[2001:db8::1]:10250");
        assert_eq!(printed("node-1"), "node-1:10250");
    }

    #[tokio::test(start_paused = true)]
    async fn a_kubelet_that_does_not_accept_the_connection_ends_the_request() {
        let connecting = in_time("n1:10250", std::future::pending::<Result<()>>());
        let connected = tokio::time::timeout(2 * CONNECT_TIMEOUT, connecting).await;
        let error = connected.expect("an end").expect_err("no connection").to_string();
        assert!(error.contains("cannot connect to n1:10250"), "{error}");
    }
}
