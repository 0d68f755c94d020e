//! The table of Services on a node whose Services another program proxies.
//!
//! It keeps pods from the overlay's port, as the service proxy does otherwise. It replaces the table of an earlier run with
//! the service proxy, whose rules would be outdated. Without an overlay there is no table.

use std::sync::Arc;

use coracle_error_chain::chain;
use coracle_nft::Monitor;
use coracle_service_proxy::{Error, NodeView, Proxy};
use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;

use crate::repair::RepairPause;
use crate::service_proxy::update_node;

/// The netlink port of no process: the table is written by a socket that exists only for that time.
const NO_AUTHOR: u32 = 0;

/// Keeps the table until dropped. Without an overlay it returns when the table is removed.
pub(crate) async fn run(
    table: String,
    overlay_port: Option<u16>,
    mut node: watch::Receiver<Option<Arc<Node>>>,
) {
    let mut view = NodeView { overlay_port, ..NodeView::default() };
    update_node(&mut view, node.borrow_and_update().as_deref());
    let mut pause = RepairPause::default();
    loop {
        let mut monitor = match write(&table, &view).await {
            Ok(monitor) => monitor,
            Err(error) => {
                tracing::warn!(
                    error = chain(&error),
                    table,
                    "cannot protect the overlay's port from pods, retrying"
                );
                pause.after_failure().await;
                continue;
            }
        };
        if overlay_port.is_none() {
            return;
        }
        // Both arms are cancel-safe: a change of the node stays marked, and a lost notification only follows a change
        // that the next replacement repairs.
        tokio::select! {
            now = changed(&view, &mut node) => view = now,
            _foreign = monitor.foreign_change(&table, NO_AUTHOR) => {
                tracing::info!(table, "the table of services was changed by another process, repairing it");
                pause.before_repair().await;
            }
        }
    }
}

/// Replaces the table. Returns the notifications of later changes.
async fn write(table: &str, view: &NodeView) -> Result<Monitor, Error> {
    let (table, view) = (table.to_owned(), view.clone());
    let written = tokio::task::spawn_blocking(move || Proxy::replace_by_guard(&table, &view)).await;
    written.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
    // After the replacement, whose own notifications are not foreign.
    Monitor::open().map_err(Error::Socket)
}

/// Waits until the properties of the node differ from `view`. Returns them.
async fn changed(view: &NodeView, node: &mut watch::Receiver<Option<Arc<Node>>>) -> NodeView {
    loop {
        if node.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
        let mut now = view.clone();
        update_node(&mut now, node.borrow_and_update().as_deref());
        if now != *view {
            return now;
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[tokio::test]
    async fn only_a_change_of_its_networks_or_addresses_concerns_the_table() {
        let node = |range: &str, label: &str| -> Option<Arc<Node>> {
            let node = json!({"metadata": {"labels": {"a": label}}, "spec": {"podCIDRs": [range]}});
            Some(Arc::new(serde_json::from_value(node).unwrap()))
        };
        let (sender, mut receiver) = watch::channel(node("10.42.0.0/24", "x"));
        let mut view = NodeView::default();
        update_node(&mut view, receiver.borrow_and_update().as_deref());
        sender.send(node("10.42.0.0/24", "y")).unwrap();
        tokio::select! {
            biased;
            _view = changed(&view, &mut receiver) => panic!("only a label changed"),
            () = std::future::ready(()) => {}
        }
        sender.send(node("10.42.1.0/24", "y")).unwrap();
        let expected: ipnetwork::IpNetwork = "10.42.1.0/24".parse().unwrap();
        assert_eq!(changed(&view, &mut receiver).await.pod_networks, [expected]);
    }
}
