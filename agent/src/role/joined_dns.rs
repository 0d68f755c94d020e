//! The address of cluster DNS in the cluster that a node has joined.
//!
//! The cluster decides the range of service addresses, and a node does not know this range. So the node reads the
//! address from the Service `kube-dns`. Coracle's control plane creates this Service without a selector: the node
//! serves DNS at its address. If the Service has a selector, pods serve DNS, for example CoreDNS, and the node does
//! not. Without this Service, a node without a configured address serves DNS at the address of its own service range.

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
/// Last line of the record if pods serve DNS.
const BY_PODS: &str = "served by pods";

/// Cluster DNS of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
struct JoinedDns {
    addresses: Vec<IpAddr>,
    /// Whether pods of the cluster serve DNS, not the nodes.
    is_served_by_pods: bool,
}

/// Sets the addresses of cluster DNS to the addresses of the Service, unless addresses are configured. The node stores
/// the addresses for its next starts, when the API server may be unreachable.
///
/// Running pods may use another address: of an earlier version of this program, of a start without the API server, or
/// of a Service that was changed. The node serves such an address until the next boot, which also ends these pods.
pub(super) async fn configure(node: &mut Node, client: &Client) {
    if !node.dns.is_address_derived() {
        return;
    }
    let record = node.dirs.state.join("join/cluster-dns");
    if let Some(dns) = fetched_or_stored(&record, client).await {
        node.dns.addresses = dns.addresses;
        if dns.is_served_by_pods {
            node.dns.leave_to_pods();
        }
    }
    node.dns.keep_serving(served_since_boot(&node.dirs.run));
}

/// The addresses at which the node has served DNS since the boot.
fn served_since_boot(run_dir: &Path) -> Vec<IpAddr> {
    let recorded = coracle_agent::read_text(&coracle_agent::dns_record(run_dir), RECORD_MAX);
    recorded.unwrap_or_default().lines().filter_map(|line| line.parse().ok()).collect()
}

/// Cluster DNS as the Service defines it, or as the record if the request fails. `None` if the Service does not exist
/// or has no cluster IP, or if there is no record after a failed request.
async fn fetched_or_stored(record: &Path, client: &Client) -> Option<JoinedDns> {
    let stored = coracle_agent::read_text(record, RECORD_MAX).ok().and_then(|text| parse(&text));
    let services: Api<Service> = Api::namespaced(client.clone(), NAMESPACE);
    let error = match tokio::time::timeout(TIMEOUT, services.get_opt(NAME)).await {
        Ok(Ok(service)) => {
            let dns = service.as_ref().and_then(of_service);
            if dns != stored {
                store(record, dns.as_ref());
            }
            return dns;
        }
        Ok(Err(error)) => chain(&error),
        Err(elapsed) => chain(&elapsed),
    };
    let used = if stored.is_some() { "the stored address" } else { "the default" };
    tracing::warn!(error, used, "cannot read the address of cluster DNS");
    stored
}

/// Writes the record. `None` removes it.
fn store(record: &Path, dns: Option<&JoinedDns>) {
    let stored = match dns {
        Some(dns) => coracle_agent::replace_private(record, text_of(dns).as_bytes()),
        None => std::fs::remove_file(record),
    };
    if let Err(error) = stored {
        tracing::warn!(error = chain(&error), "cannot store the address of cluster DNS");
    }
}

/// The text of a record.
fn text_of(dns: &JoinedDns) -> String {
    let mut text: String = dns.addresses.iter().map(|address| format!("{address}\n")).collect();
    if dns.is_served_by_pods {
        text.extend([BY_PODS, "\n"]);
    }
    text
}

/// Parses a record. Each line has an address; the last line may be [`BY_PODS`]. `None` if the text has another line, or
/// no address.
fn parse(text: &str) -> Option<JoinedDns> {
    let (addresses, is_served_by_pods) =
        match text.strip_suffix("\n").and_then(|text| text.strip_suffix(BY_PODS)) {
            Some(addresses) => (addresses, true),
            None => (text, false),
        };
    let addresses: Result<Vec<IpAddr>, _> = addresses.lines().map(str::parse).collect();
    let addresses = addresses.ok().filter(|addresses| !addresses.is_empty())?;
    Some(JoinedDns { addresses, is_served_by_pods })
}

/// The cluster IPs of a service, and whether it selects pods. `None` if it has no cluster IP.
fn of_service(service: &Service) -> Option<JoinedDns> {
    let spec = service.spec.as_ref()?;
    let addresses = spec.cluster_ips.iter().flatten().filter_map(|address| address.parse().ok());
    let addresses: Vec<IpAddr> = addresses.collect();
    let is_served_by_pods = spec.selector.as_ref().is_some_and(|selector| !selector.is_empty());
    (!addresses.is_empty()).then_some(JoinedDns { addresses, is_served_by_pods })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::settings::{Dirs, Settings};

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
            assert_eq!(fetched_or_stored(&record, &unknown).await, None);
            assert!(!record.exists());
        }
        let dns = |addresses: &[&str], is_served_by_pods: bool| {
            let addresses = addresses.iter().map(|address| address.parse().unwrap()).collect();
            Some(JoinedDns { addresses, is_served_by_pods })
        };
        let known = dns(&["fd43::a", "10.96.0.10"], false);
        let fetched = fetched_or_stored(&record, &answering(200, &service(&["fd43::a", "10.96.0.10"]))).await;
        assert_eq!(fetched, known);
        let stored = fetched_or_stored(&record, &refused(403)).await;
        assert_eq!(stored, known, "after a restart");
        std::fs::write(&record, "fd43::a\ntorn").unwrap();
        let mut with_pods = service(&["10.96.0.10"]);
        with_pods["spec"]["selector"] = json!({"k8s-app": "kube-dns"});
        let fetched = fetched_or_stored(&record, &answering(200, &with_pods)).await;
        assert_eq!(fetched, dns(&["10.96.0.10"], true), "a damaged record is replaced");
        assert_eq!(fetched_or_stored(&record, &refused(403)).await, fetched, "after a restart");
    }

    #[tokio::test]
    async fn a_change_of_the_service_replaces_the_stored_address() {
        let dir = tempfile::tempdir().unwrap();
        let record = dir.path().join("join/cluster-dns");
        let dns = |address: &str, is_served_by_pods: bool| {
            Some(JoinedDns { addresses: vec![address.parse().unwrap()], is_served_by_pods })
        };
        let mut with_pods = service(&["10.96.0.10"]);
        with_pods["spec"]["selector"] = json!({"k8s-app": "kube-dns"});
        for (service, expected) in [
            (service(&["10.43.0.10"]), dns("10.43.0.10", false)),
            (service(&["10.96.0.10"]), dns("10.96.0.10", false)),
            (with_pods, dns("10.96.0.10", true)),
        ] {
            assert_eq!(fetched_or_stored(&record, &answering(200, &service)).await, expected);
            assert_eq!(fetched_or_stored(&record, &answering(500, &json!({}))).await, expected, "stored");
        }
        let removed = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound",
            "code": 404});
        assert_eq!(fetched_or_stored(&record, &answering(404, &removed)).await, None);
        assert!(!record.exists());
    }

    #[tokio::test]
    async fn running_pods_keep_the_address_of_an_earlier_version() {
        let address = |text: &str| text.parse::<IpAddr>().unwrap();
        let [former, current] = ["10.43.0.10", "10.96.0.10"].map(address);
        let mut with_pods = service(&["10.96.0.10"]);
        with_pods["spec"]["selector"] = json!({"k8s-app": "kube-dns"});
        let cases = [
            (service(&["10.96.0.10"]), former, vec![current, former]),
            (with_pods.clone(), former, vec![former]),
            (with_pods, current, Vec::new()),
        ];
        for (object, recorded, served) in cases {
            let dir = tempfile::tempdir().unwrap();
            let record = coracle_agent::dns_record(dir.path());
            coracle_agent::replace_private(&record, format!("{recorded}\n").as_bytes()).unwrap();
            let mut node = Settings::of_kubelet_file("maxPods: 7\n").node();
            node.dirs = Dirs { state: dir.path().to_owned(), run: dir.path().to_owned() };
            configure(&mut node, &answering(200, &object)).await;
            assert_eq!(node.dns.addresses, [current]);
            assert_eq!(node.dns.served_here(), served, "{recorded}");
        }
    }
}
