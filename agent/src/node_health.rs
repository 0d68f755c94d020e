//! Health check of the node on a loopback port without authentication, as the kubelet's `healthzPort`. The checks are
//! the same as of `/healthz` in the kubelet API: they succeed whenever the node answers.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use coracle_connections::{Connections, Share};
use http::StatusCode;

use crate::health_server::{self, Reply};

/// Serves the health check until dropped.
pub(crate) async fn serve(address: SocketAddr) {
    let connections = Connections::new(Share::NodeHealth.limits());
    health_server::serve(vec![address], Arc::default(), connections, reply).await;
}

fn reply(path: &str, _client: IpAddr) -> Reply {
    match path {
        "/healthz" | "/healthz/log" | "/healthz/ping" | "/healthz/syncloop" => {
            health_server::text(StatusCode::OK, "ok")
        }
        _ => health_server::text(StatusCode::NOT_FOUND, "404 page not found\n"),
    }
}

#[cfg(test)]
mod tests {
    use coracle_testing::{in_new_namespace_async, ip};

    use super::*;

    #[test]
    fn silent_connections_to_the_nodes_health_are_limited() {
        in_new_namespace_async(async || {
            ip("link set lo up");
            let server = tokio::spawn(serve(SocketAddr::from(([127, 0, 0, 1], 10248))));
            health_server::assert_limited(10248).await;
            server.abort();
        });
    }

    #[test]
    fn only_the_paths_of_health_checks_are_served() {
        let status = |path: &str| reply(path, [127, 0, 0, 1].into()).status();
        assert_eq!((status("/healthz"), status("/healthz/ping")), (StatusCode::OK, StatusCode::OK));
        for path in ["/", "/metrics", "/healthz/", "/pods"] {
            assert_eq!(status(path), StatusCode::NOT_FOUND, "{path}");
        }
    }
}
