//! The address of cluster DNS in the cluster that a node has joined.
//!
//! The cluster decides the range of service addresses, and a node does not know this range. Our control plane reserves
//! the address of cluster DNS by the Service `kube-dns`. Without this Service, a node without a configured address
//! serves DNS at the address of its own default range.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use coracle_error_chain::chain;
use k8s_openapi::api::core::v1::Service;
use kube::{Api, Client};

use crate::settings::Node;

/// Namespace and name of the Service of cluster DNS.
const NAMESPACE: &str = "kube-system";
const NAME: &str = "kube-dns";
/// Timeout of the request for the Service.
const TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum size of the record in bytes.
const RECORD_MAX: u64 = 4 << 10;

/// Sets the addresses of cluster DNS to those of the Service, unless they are configured. The node stores them for its
/// next starts, because running pods keep the address, and because the API server may be unreachable then.
pub(super) async fn learn(node: &mut Node, client: &Client) {
    if !node.derives_dns() {
        return;
    }
    let record = node.dirs.state.join("join/cluster-dns");
    if let Some(addresses) = stored_or_asked(&record, client).await {
        node.cluster_dns = addresses;
    }
}

/// The addresses in the record, else those of the Service. `None` if neither exists.
async fn stored_or_asked(record: &Path, client: &Client) -> Option<Vec<IpAddr>> {
    let stored = coracle_agent::read_text(record, RECORD_MAX).ok();
    if let Some(addresses) = stored.and_then(|text| parse(&text)) {
        return Some(addresses);
    }
    let services: Api<Service> = Api::namespaced(client.clone(), NAMESPACE);
    let error = match tokio::time::timeout(TIMEOUT, services.get_opt(NAME)).await {
        Ok(Ok(service)) => {
            let addresses = cluster_ips(&service?)?;
            store(record, &addresses);
            return Some(addresses);
        }
        Ok(Err(error)) => chain(&error),
        Err(elapsed) => chain(&elapsed),
    };
    tracing::warn!(error, "cannot read the address of cluster DNS, using the default");
    None
}

fn store(record: &Path, addresses: &[IpAddr]) {
    let text: String = addresses.iter().map(|address| format!("{address}\n")).collect();
    if let Err(error) = coracle_agent::replace_private(record, text.as_bytes()) {
        tracing::warn!(error = chain(&error), "cannot store the address of cluster DNS");
    }
}

/// The addresses in the text of a record, one a line. `None` if there is none, or if a line is no address.
fn parse(text: &str) -> Option<Vec<IpAddr>> {
    let addresses: Result<Vec<IpAddr>, _> = text.lines().map(str::parse).collect();
    addresses.ok().filter(|addresses| !addresses.is_empty())
}

/// The cluster IPs of a service. `None` if it has none.
fn cluster_ips(service: &Service) -> Option<Vec<IpAddr>> {
    let all = service.spec.as_ref()?.cluster_ips.as_ref()?;
    let addresses: Vec<IpAddr> = all.iter().filter_map(|address| address.parse().ok()).collect();
    Some(addresses).filter(|addresses| !addresses.is_empty())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A client of an API server that gives this response to each request.
    fn answering(code: u16, body: &Value) -> Client {
        let body = body.to_string();
        let service = tower::service_fn(move |request: http::Request<kube::client::Body>| {
            assert_eq!(request.uri().path(), "/api/v1/namespaces/kube-system/services/kube-dns");
            let body = kube::client::Body::from(body.clone().into_bytes());
            std::future::ready(http::Response::builder().status(code).body(body))
        });
        Client::new(service, "default")
    }

    fn service(cluster_ips: &[&str]) -> Value {
        json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "kube-dns"},
            "spec": {"clusterIPs": cluster_ips}})
    }

    #[tokio::test]
    async fn the_address_of_the_cluster_is_used_and_stored() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("join/cluster-dns");
        let refused = |code: u16| {
            let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code});
            answering(code, &status)
        };
        for unknown in [refused(404), refused(403), answering(200, &service(&["None"]))] {
            assert_eq!(stored_or_asked(&record, &unknown).await, None);
            assert!(!record.exists());
        }
        let known: Vec<IpAddr> = vec!["fd43::a".parse().unwrap(), "10.96.0.10".parse().unwrap()];
        let asked = stored_or_asked(&record, &answering(200, &service(&["fd43::a", "10.96.0.10"]))).await;
        assert_eq!(asked.as_ref(), Some(&known));
        let stored = stored_or_asked(&record, &refused(403)).await;
        assert_eq!(stored.as_ref(), Some(&known), "after a restart");
        std::fs::write(&record, "fd43::a\ntorn").unwrap();
        let asked = stored_or_asked(&record, &answering(200, &service(&["10.96.0.10"]))).await;
        assert_eq!(asked, Some(known[1..].to_vec()), "a damaged record is replaced");
    }
}
