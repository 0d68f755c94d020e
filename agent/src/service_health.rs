//! Health checks of load balancers: a server for each service with a `healthCheckNodePort`, which reports whether this
//! node has endpoints of the service. Source: `pkg/proxy/healthcheck/service_health.go`.
//!
//! Without such a service there is no socket, and only changes of services wake the task. All servers share one limit
//! of connections.

mod slots;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use coracle_connections::{Connections, Share};
use coracle_services::{EndpointSlice, ServiceState, cluster_ips};
use coracle_values::object::Key;
use futures::FutureExt as _;
use http::{HeaderValue, StatusCode};
use ipnetwork::IpNetwork;
use k8s_openapi::api::core::v1::Service;
use serde_json::json;
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::health_server::{self, Reply, everywhere};
use crate::proxy_health::ProxyState;
use crate::service_cache::{ServiceCache, has_other_proxy};
use slots::Slots;

/// The health checks of this node.
pub(crate) struct ServiceHealth {
    node_name: String,
    services: ServiceCache,
    proxy: ProxyState,
    /// Ranges of the node's addresses that have node ports.
    ranges: Arc<[IpNetwork]>,
    connections: Connections,
    servers: BTreeMap<Key, Server>,
    slots: Slots,
}

/// The server of one service.
struct Server {
    port: u16,
    health: watch::Sender<Health>,
    /// Dropping the set ends the server and its connections.
    _tasks: JoinSet<()>,
}

/// The content of a health check's response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Health {
    namespace: String,
    name: String,
    local_endpoints: LocalEndpoints,
}

/// The number of ready endpoints on this node in each family that the service has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LocalEndpoints {
    ipv4: Option<usize>,
    ipv6: Option<usize>,
}

// === impl ServiceHealth ===

impl ServiceHealth {
    pub(crate) fn new(
        node_name: &str,
        services: ServiceCache,
        proxy: ProxyState,
        ranges: Arc<[IpNetwork]>,
    ) -> Self {
        let connections = Connections::new(Share::ServiceHealthConnections.limits());
        Self {
            node_name: node_name.to_owned(),
            services,
            proxy,
            ranges,
            connections,
            servers: BTreeMap::new(),
            slots: Slots::new(Share::ServiceHealthServers.count()),
        }
    }

    /// Runs until dropped.
    pub(crate) async fn run(mut self) {
        let changes = self.services.subscribe();
        let mut progress = self.services.changes();
        if progress.wait_for(|progress| progress.listed && progress.slices_listed).await.is_err() {
            return;
        }
        changes.take();
        for key in self.services.keys() {
            self.update(key);
        }
        loop {
            for key in changes.next().await {
                self.update(key);
            }
        }
    }

    /// Starts, changes or ends the server of a service. After an end, the server of a waiting service is started.
    fn update(&mut self, key: Key) {
        let none_waited = self.slots.first_waiting().is_none();
        self.update_one(key);
        while let Some(next) = self.slots.take_next() {
            self.update_one(next);
        }
        if none_waited && let Some(first) = self.slots.first_waiting() {
            let (service, namespace, maximum) = (&first.name, &first.namespace, self.slots.maximum());
            tracing::warn!(service, namespace, maximum, "too many health checks of services");
        }
    }

    fn update_one(&mut self, key: Key) {
        let state = self.services.state(&key).filter(|state| !has_other_proxy(&state.service));
        let wanted = state.as_ref().and_then(|ServiceState { service, slices }| {
            Some((health_port(service)?, LocalEndpoints::of(service, slices, &self.node_name)))
        });
        let Some((port, local_endpoints)) = wanted else {
            self.servers.remove(&key);
            self.slots.release(&key);
            return;
        };
        let health = Health { namespace: key.namespace.clone(), name: key.name.clone(), local_endpoints };
        if let Some(server) = self.servers.get(&key).filter(|server| server.port == port) {
            server.health.send_if_modified(|known| std::mem::replace(known, health.clone()) != health);
            return;
        }
        // The former server of this service ends before the next one listens.
        self.servers.remove(&key);
        if !self.slots.take(&key) {
            return;
        }
        let (health, receiver) = watch::channel(health);
        let mut tasks = JoinSet::new();
        let (proxy, connections) = (self.proxy.clone(), self.connections.clone());
        tasks.spawn(serve(port, receiver, proxy, self.ranges.clone(), connections).boxed());
        self.servers.insert(key, Server { port, health, _tasks: tasks });
    }
}

/// The port at which load balancers check the service on a node.
fn health_port(service: &Service) -> Option<u16> {
    let spec = service.spec.as_ref()?;
    let has_check = spec.type_.as_deref() == Some("LoadBalancer")
        && spec.external_traffic_policy.as_deref() == Some("Local");
    u16::try_from(spec.health_check_node_port.filter(|_| has_check)?).ok().filter(|port| *port != 0)
}

// === impl LocalEndpoints ===

impl LocalEndpoints {
    fn of(service: &Service, slices: &[Arc<EndpointSlice>], node: &str) -> Self {
        let count = |is_ipv4: bool| {
            let has_family = cluster_ips(service).any(|address| address.is_ipv4() == is_ipv4);
            has_family.then(|| ready_on(slices, node, is_ipv4))
        };
        Self { ipv4: count(true), ipv6: count(false) }
    }

    /// The number for a client: the number of its address family, as in kube-proxy. If the service does not have this
    /// family, the number of the other family.
    fn for_client(self, client: IpAddr) -> usize {
        let is_ipv4 = client.to_canonical().is_ipv4();
        let (own, other) = if is_ipv4 { (self.ipv4, self.ipv6) } else { (self.ipv6, self.ipv4) };
        own.or(other).unwrap_or(0)
    }
}

/// The number of ready endpoints of a family on a node.
fn ready_on(slices: &[Arc<EndpointSlice>], node: &str, is_ipv4: bool) -> usize {
    let endpoints = slices.iter().flat_map(|slice| &slice.endpoints);
    let here = endpoints.filter(|endpoint| endpoint.node_name.as_deref() == Some(node));
    // An endpoint may be in two slices while it moves between them.
    let ready: BTreeSet<IpAddr> = here
        .filter(|endpoint| endpoint.conditions.is_ready())
        .filter_map(|endpoint| endpoint.address)
        .filter(|address| address.is_ipv4() == is_ipv4)
        .collect();
    ready.len()
}

/// Serves the port at the node's addresses in `ranges` until dropped.
async fn serve(
    port: u16,
    health: watch::Receiver<Health>,
    proxy: ProxyState,
    ranges: Arc<[IpNetwork]>,
    connections: Connections,
) {
    let reply = move |_path: &str, client: IpAddr| answer(&health.borrow(), client, proxy.is_healthy());
    health_server::serve(everywhere(port), ranges, connections, reply).await;
}

/// The response to a request for any path, as upstream's.
fn answer(health: &Health, client: IpAddr, is_proxy_healthy: bool) -> Reply {
    let local_endpoints = health.local_endpoints.for_client(client);
    let body = json!({
        "service": {"namespace": health.namespace, "name": health.name},
        "localEndpoints": local_endpoints,
        "serviceProxyHealthy": is_proxy_healthy,
    });
    let is_healthy = local_endpoints > 0 && is_proxy_healthy;
    let status = if is_healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut reply = health_server::json(status, &body);
    let weight = HeaderValue::from(local_endpoints);
    reply.headers_mut().insert("x-load-balancing-endpoint-weight", weight);
    reply
}

#[cfg(test)]
mod tests {
    use coracle_testing::{in_new_namespace_async, ip};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpStream;

    use super::*;

    fn service(spec: serde_json::Value) -> Service {
        serde_json::from_value(json!({"metadata": {}, "spec": spec})).unwrap()
    }

    #[test]
    fn only_local_load_balancers_have_health_checks() {
        let of = |kind: &str, policy: &str, port: i32| {
            let spec = json!({"type": kind, "externalTrafficPolicy": policy, "healthCheckNodePort": port});
            health_port(&service(spec))
        };
        assert_eq!(of("LoadBalancer", "Local", 30500), Some(30500));
        assert_eq!(of("LoadBalancer", "Local", 0), None);
        assert_eq!(of("LoadBalancer", "Cluster", 30500), None);
        assert_eq!(of("NodePort", "Local", 30500), None);
    }

    #[test]
    fn ready_endpoints_of_this_node_count_once() {
        let slice: EndpointSlice =
            serde_json::from_value(json!({"metadata": {}, "addressType": "IPv4", "endpoints": [
            {"addresses": ["10.0.0.1"], "nodeName": "here"}, {"addresses": ["10.0.0.2"], "nodeName": "there"},
            {"addresses": ["10.0.0.3"], "nodeName": "here", "conditions": {"ready": false}}]}))
            .unwrap();
        let slice = Arc::new(slice);
        assert_eq!(ready_on(&[slice.clone(), slice.clone()], "here", true), 1);
        assert_eq!(ready_on(std::slice::from_ref(&slice), "here", false), 0);
        assert_eq!(ready_on(&[slice], "nowhere", true), 0);
    }

    #[test]
    fn a_client_gets_the_number_of_its_family() {
        let slice = |kind: &str, address: &str| -> Arc<EndpointSlice> {
            let endpoints = json!([{"addresses": [address], "nodeName": "here"}]);
            let slice = json!({"metadata": {}, "addressType": kind, "endpoints": endpoints});
            Arc::new(serde_json::from_value(slice).unwrap())
        };
        let slices = [slice("IPv4", "10.0.0.1"), slice("IPv6", "fd00::1")];
        let of = |addresses: &[&str], client: &str| {
            let service = service(json!({"clusterIPs": addresses}));
            LocalEndpoints::of(&service, &slices, "here").for_client(client.parse().unwrap())
        };
        let both = ["10.43.0.1", "fd43::1"];
        for client in ["192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1"] {
            assert_eq!(of(&both, client), 1, "{client}");
        }
        assert_eq!(of(&["fd43::1"], "192.0.2.1"), 1, "the service has no other family");
        let dual = LocalEndpoints { ipv4: Some(0), ipv6: Some(2) };
        assert_eq!(
            ["::ffff:192.0.2.1", "2001:db8::1"].map(|ip| dual.for_client(ip.parse().unwrap())),
            [0, 2]
        );
    }

    #[test]
    fn a_node_with_an_outdated_table_is_not_healthy() {
        let local_endpoints = LocalEndpoints { ipv4: Some(1), ipv6: None };
        let health = Health { local_endpoints, ..Health::default() };
        let status = |is_proxy_healthy| answer(&health, [192, 0, 2, 1].into(), is_proxy_healthy).status();
        assert_eq!((status(true), status(false)), (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE));
    }

    #[test]
    fn the_server_answers_with_the_newest_state() {
        const PORT: u16 = 30_000;
        in_new_namespace_async(async || {
            ip("link set lo up");
            let known = Health {
                namespace: "n".to_owned(),
                name: "s".to_owned(),
                local_endpoints: LocalEndpoints { ipv4: Some(0), ipv6: None },
            };
            let (health, receiver) = watch::channel(known);
            let server = tokio::spawn(serve(
                PORT,
                receiver,
                ProxyState::default(),
                Arc::default(),
                Connections::new(Share::ServiceHealthConnections.limits()),
            ));
            let ask = async || {
                let connect = async || TcpStream::connect(("127.0.0.1", PORT)).await.ok();
                let mut stream = coracle_testing::eventually_async("the server listens", 10, connect).await;
                stream
                    .write_all(b"GET /healthz HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")
                    .await
                    .unwrap();
                let mut text = String::new();
                stream.read_to_string(&mut text).await.unwrap();
                text
            };
            let none = ask().await;
            assert!(none.starts_with("HTTP/1.1 503") && none.contains(r#""localEndpoints":0"#), "{none}");
            health.send_modify(|health| health.local_endpoints.ipv4 = Some(2));
            let two = ask().await;
            assert!(two.starts_with("HTTP/1.1 200") && two.contains("weight: 2"), "{two}");
            assert!(two.contains(r#""service":{"name":"s","namespace":"n"}"#), "{two}");
            health_server::assert_limited(PORT).await;
            server.abort();
        });
    }
}
