//! Metrics and health checks of controllers and scheduler for another API server, at a loopback port without
//! authentication. Within a control plane the API server serves them.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use coracle_connections::{Connections, Share};
use http::StatusCode;

use crate::health_server::{self, Reply};

/// Returns all metrics in the text format of Prometheus.
pub type MetricsText = Arc<dyn Fn() -> String + Send + Sync>;

/// Serves the metrics and the health checks until dropped. The checks pass whenever the process answers.
pub async fn serve(port: u16, metrics: MetricsText) {
    let connections = Connections::new(Share::ComponentHealth.limits());
    let address = SocketAddr::new(Ipv4Addr::LOCALHOST.into(), port);
    let reply = move |path: &str, _client: IpAddr| reply(path, &metrics);
    health_server::serve(vec![address], Arc::default(), connections, reply).await;
}

fn reply(path: &str, metrics: &MetricsText) -> Reply {
    match path {
        "/metrics" => health_server::text(StatusCode::OK, &metrics()),
        "/healthz" | "/livez" | "/readyz" => health_server::text(StatusCode::OK, "ok"),
        _ => health_server::text(StatusCode::NOT_FOUND, "404 page not found\n"),
    }
}

#[cfg(test)]
mod tests {
    use coracle_testing::{in_new_namespace_async, ip};
    use http_body_util::BodyExt as _;

    use super::*;

    #[test]
    fn silent_connections_to_a_component_are_limited() {
        in_new_namespace_async(async || {
            ip("link set lo up");
            let server = tokio::spawn(serve(10257, Arc::new(String::new)));
            health_server::assert_limited(10257).await;
            server.abort();
        });
    }

    #[tokio::test]
    async fn metrics_and_health_checks_are_served() {
        let metrics: MetricsText = Arc::new(|| "a 1\n".to_owned());
        for (path, status, body) in [
            ("/metrics", 200, "a 1\n"),
            ("/healthz", 200, "ok"),
            ("/livez", 200, "ok"),
            ("/readyz", 200, "ok"),
            ("/", 404, "404 page not found\n"),
        ] {
            let answer = reply(path, &metrics);
            assert_eq!(answer.status().as_u16(), status, "{path}");
            let bytes = answer.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(bytes, body, "{path}");
        }
    }
}
