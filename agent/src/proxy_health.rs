//! Health of the service proxy at the ports of kube-proxy: `/healthz`, `/livez`, `/proxyMode` and `/metrics`. Load
//! balancers check the first two if a Service has no `healthCheckNodePort`. Source:
//! `pkg/proxy/healthcheck/proxy_health.go`.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use coracle_connections::{Connections, Share};
use http::StatusCode;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use serde_json::json;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::health_server::{self, Reply};
use crate::proxy_metrics::ProxyMetrics;

/// Maximum time until a change of services is in the table, as kube-proxy's default.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Taint of a node that the cluster autoscaler is going to delete.
const DELETION_TAINT: &str = "ToBeDeletedByClusterAutoscaler";

/// Whether the proxy's table is current, and the metrics of its changes. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub(crate) struct ProxyState {
    times: Arc<Mutex<Times>>,
    metrics: ProxyMetrics,
}

#[derive(Debug, Default)]
struct Times {
    /// Time since which a change waits. None if no change waits.
    pending: Option<Instant>,
    /// Start of the current transaction.
    started: Option<Instant>,
    /// Time of the last commit of a change.
    updated: Option<Timestamp>,
}

// === impl ProxyState ===

impl ProxyState {
    fn times(&self) -> MutexGuard<'_, Times> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The metrics of the proxy.
    pub(crate) fn metrics(&self) -> ProxyMetrics {
        self.metrics.clone()
    }

    /// Records that a change waits.
    pub(crate) fn begin_change(&self) {
        let now = Instant::now();
        let mut times = self.times();
        times.pending.get_or_insert(now);
        times.started = Some(now);
        self.metrics.queued(Timestamp::now());
    }

    /// Records that all changes are in the table. `triggers` has the times of the changes that EndpointSlices show.
    pub(crate) fn end_change(&self, triggers: &[Timestamp]) {
        let now = Timestamp::now();
        let current = Times { pending: None, started: None, updated: Some(now) };
        let started = std::mem::replace(&mut *self.times(), current).started;
        if let Some(started) = started {
            self.metrics.synced(started.elapsed(), now);
        }
        self.metrics.programmed(triggers, now);
    }

    /// Records that a change could not be committed.
    pub(crate) fn fail_change(&self) {
        self.metrics.failed();
    }

    /// Whether no change has waited for longer than [`TIMEOUT`]. A proxy that starts is healthy.
    pub(crate) fn is_healthy(&self) -> bool {
        self.times().pending.is_none_or(|since| since.elapsed() < TIMEOUT)
    }
}

/// Serves the health checks at `healthz`, and the mode and the metrics at `status`, until dropped. None disables the
/// server.
pub(crate) async fn serve(
    healthz: Option<SocketAddr>,
    status: Option<SocketAddr>,
    state: ProxyState,
    node: watch::Receiver<Option<Arc<Node>>>,
) {
    let metrics = state.metrics();
    let health = move |path: &str, _client: IpAddr| health(path, &state, node.borrow().as_deref());
    let mode = move |path: &str, _client: IpAddr| mode(path, &metrics);
    let connections = |share: Share| Connections::new(share.limits());
    let healthz = async {
        if let Some(address) = healthz {
            let connections = connections(Share::ProxyHealth);
            health_server::serve(vec![address], Arc::default(), connections, health).await;
        }
    };
    let status = async {
        if let Some(address) = status {
            let connections = connections(Share::ProxyStatus);
            health_server::serve(vec![address], Arc::default(), connections, mode).await;
        }
    };
    tokio::join!(healthz, status);
}

fn health(path: &str, state: &ProxyState, node: Option<&Node>) -> Reply {
    let is_current = state.is_healthy();
    let is_eligible = node.is_some_and(is_eligible);
    let is_healthy = match path {
        "/healthz" => is_current && is_eligible,
        "/livez" => is_current,
        _ => return absent(),
    };
    let now = Timestamp::now();
    let committed = state.times().updated.unwrap_or(now);
    // As in kube-proxy, a healthy proxy reports the current time, even if nothing has changed.
    let updated = if is_healthy { now } else { committed };
    let family = json!({"lastUpdated": committed.to_string(), "healthy": is_current});
    let mut body = json!({"lastUpdated": updated.to_string(), "currentTime": now.to_string(), "healthy": is_current,
        "status": {"IPv4": family, "IPv6": family}});
    if path == "/healthz" {
        body["nodeEligible"] = is_eligible.into();
    }
    let status = if is_healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    health_server::json(status, &body)
}

/// Whether load balancers may send new connections to the node.
fn is_eligible(node: &Node) -> bool {
    let taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    node.metadata.deletion_timestamp.is_none() && !taints.into_iter().any(|taint| taint.key == DELETION_TAINT)
}

fn mode(path: &str, metrics: &ProxyMetrics) -> Reply {
    match path {
        "/proxyMode" => health_server::text(StatusCode::OK, "nftables"),
        "/metrics" => health_server::text(StatusCode::OK, &metrics.text()),
        _ => absent(),
    }
}

fn absent() -> Reply {
    health_server::text(StatusCode::NOT_FOUND, "404 page not found\n")
}

#[cfg(test)]
mod tests {
    use coracle_testing::{in_new_namespace_async, ip};

    use super::*;

    fn node(taint: &str) -> Node {
        let taints = json!([{"key": taint, "effect": "NoSchedule"}]);
        serde_json::from_value(json!({"metadata": {}, "spec": {"taints": taints}})).unwrap()
    }

    #[test]
    fn silent_connections_to_the_proxys_health_are_limited() {
        in_new_namespace_async(async || {
            ip("link set lo up");
            let ports = [10256, 10249];
            let [healthz, status] = ports.map(|port| Some(SocketAddr::from(([127, 0, 0, 1], port))));
            let node = watch::channel(None).1;
            let server = tokio::spawn(serve(healthz, status, ProxyState::default(), node));
            for port in ports {
                health_server::assert_limited(port).await;
            }
            server.abort();
        });
    }

    #[tokio::test(start_paused = true)]
    async fn a_change_that_waits_too_long_makes_the_proxy_unhealthy() {
        let (state, node) = (ProxyState::default(), node("a"));
        let status = |path: &str| health(path, &state, Some(&node)).status().as_u16();
        assert_eq!([status("/healthz"), status("/livez"), status("/other")], [200, 200, 404]);
        state.begin_change();
        tokio::time::advance(TIMEOUT / 2).await;
        state.begin_change();
        assert_eq!(status("/healthz"), 200);
        tokio::time::advance(TIMEOUT / 2).await;
        assert_eq!(
            [status("/healthz"), status("/livez")],
            [503, 503],
            "the wait counts from the first change"
        );
        state.end_change(&[Timestamp::now()]);
        assert_eq!([status("/healthz"), status("/livez")], [200, 200]);
        let text = state.metrics().text();
        for line in [
            "kubeproxy_sync_proxy_rules_duration_seconds_sum{ip_family=\"IPv4\"} 30",
            "kubeproxy_sync_proxy_rules_duration_seconds_count{ip_family=\"IPv4\"} 1",
            "kubeproxy_network_programming_duration_seconds_count{ip_family=\"IPv4\"} 1",
        ] {
            assert!(text.lines().any(|other| other == line), "no {line} in\n{text}");
        }
    }

    #[test]
    fn a_node_that_is_deleted_gets_no_new_connections() {
        let state = ProxyState::default();
        let mut deleted = node("a");
        deleted.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
        for node in [None, Some(&node(DELETION_TAINT)), Some(&deleted)] {
            let status = |path: &str| health(path, &state, node).status().as_u16();
            assert_eq!([status("/healthz"), status("/livez")], [503, 200]);
        }
        let status = |path: &str| mode(path, &ProxyMetrics::default()).status().as_u16();
        assert_eq!([status("/proxyMode"), status("/metrics"), status("/")], [200, 200, 404]);
    }
}
