//! Waiting for a cluster: its API server, and its nodes.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::Context;
use coracle_watch::{Config, Event};
use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Node;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client};

use super::kubeconfig;
use super::record::Cluster;

/// Interval of requests to an API server that does not answer yet.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// A client of the cluster's API server, as soon as it answers.
pub(super) async fn api(cluster: &Cluster) -> Client {
    loop {
        if let Ok(client) = try_api(cluster).await
            && client.apiserver_version().await.is_ok()
        {
            return client;
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}

async fn try_api(cluster: &Cluster) -> anyhow::Result<Client> {
    let file = Kubeconfig::from_yaml(&kubeconfig::of(cluster)?)?;
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default()).await?;
    Ok(Client::try_from(config)?)
}

/// Waits until all nodes are Ready, and pods can run on them.
pub(super) async fn nodes(cluster: &Cluster, client: &Client) -> anyhow::Result<()> {
    let mut missing: BTreeSet<String> = cluster.nodes().map(|node| node.name()).collect();
    let config = Config::default().backoff(RETRY_INTERVAL, RETRY_INTERVAL);
    let mut events = coracle_watch::watch(Api::<Node>::all(client.clone()), config);
    while !missing.is_empty() {
        match events.next().await.context("the watch of the nodes ended")? {
            Ok(Event::Apply(node) | Event::InitApply(node)) if is_ready(&node) => {
                missing.remove(&node.metadata.name.unwrap_or_default());
            }
            // The watch repeats a failed request.
            Ok(_) | Err(_) => {}
        }
    }
    Ok(())
}

/// Whether the node is Ready and has no not-ready taint.
fn is_ready(node: &Node) -> bool {
    let conditions = node.status.iter().flat_map(|status| status.conditions.iter().flatten());
    let is_ready =
        conditions.into_iter().any(|condition| condition.type_ == "Ready" && condition.status == "True");
    let mut taints = node.spec.iter().flat_map(|spec| spec.taints.iter().flatten());
    is_ready && !taints.any(|taint| taint.key.starts_with("node.kubernetes.io/not-ready"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::is_ready;

    #[test]
    fn a_node_with_a_not_ready_taint_is_not_ready() {
        let node = |status: &str, taints: &[&str]| {
            let taints: Vec<_> =
                taints.iter().map(|key| json!({"key": key, "effect": "NoSchedule"})).collect();
            let conditions = json!([{"type": "Ready", "status": status}]);
            let node =
                json!({"metadata": {}, "spec": {"taints": taints}, "status": {"conditions": conditions}});
            serde_json::from_value(node).map(|node| is_ready(&node)).expect("a node")
        };
        assert!(node("True", &[]) && node("True", &["mine"]));
        assert!(!node("False", &[]) && !node("True", &["node.kubernetes.io/not-ready"]));
    }
}
