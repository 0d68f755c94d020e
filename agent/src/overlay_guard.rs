//! The table of Services on a node whose Services another program proxies.
//!
//! The table keeps pods from the overlay's port. On other nodes the service proxy does this. An earlier run with the
//! service proxy may have left a table with outdated rules: that table is replaced. The table is not changed until the
//! Node object with the networks of pods is known. So it protects the port after a restart without API server. Without
//! an overlay there is no table.

use std::sync::Arc;

use coracle_error_chain::chain;
use coracle_nft::{Monitor, TableError};
use coracle_service_proxy::{NodeView, Proxy};
use k8s_openapi::api::core::v1::Node;
use tokio::sync::watch;

use crate::repair::RepairBackoff;
use crate::service_proxy::update_node;

/// Keeps the table until dropped. Without an overlay it tries once to remove the table, and returns.
pub(crate) async fn run(
    table: String,
    overlay_port: Option<u16>,
    mut node: watch::Receiver<Option<Arc<Node>>>,
) {
    let mut view = NodeView { overlay_port, ..NodeView::default() };
    if overlay_port.is_none() {
        // A node without an overlay may have a kernel without nftables.
        if let Err(error) = write(&table, &view).await {
            tracing::warn!(error = chain(&error), table, "cannot remove the table of services");
        }
        return;
    }
    if node.wait_for(Option::is_some).await.is_err() {
        return;
    }
    update_node(&mut view, node.borrow_and_update().as_deref());
    let mut backoff = RepairBackoff::default();
    loop {
        let (mut monitor, author) = match write(&table, &view).await {
            Ok(written) => written,
            Err(error) => {
                tracing::warn!(
                    error = chain(&error),
                    table,
                    "cannot protect the overlay's port from pods, retrying"
                );
                backoff.after_failure().await;
                continue;
            }
        };
        // Both arms are cancel-safe. The receiver keeps a change of the node. If the first arm ends, a notification may
        // be lost. But then the table is replaced, which also repairs a foreign change.
        tokio::select! {
            now = changed(&view, &mut node) => view = now,
            _foreign = monitor.foreign_change(&table, author) => {
                tracing::info!(table, "the table of services was changed by another process, repairing it");
                backoff.before_repair().await;
            }
        }
    }
}

/// Replaces the table. Returns the notifications of changes, and the author of the replacement. The notifications begin
/// before the replacement, so that no later change is missed.
async fn write(table: &str, view: &NodeView) -> Result<(Monitor, u32), TableError> {
    let monitor = Monitor::open().map_err(TableError::Socket)?;
    let (table, view) = (table.to_owned(), view.clone());
    let written = coracle_threads::spawn_blocking(move || Proxy::replace_by_guard(&table, &view)).await;
    let author = written.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))?;
    Ok((monitor, author))
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
    use std::pin::pin;

    use serde_json::json;

    use super::*;

    #[test]
    fn the_former_table_stays_until_the_networks_of_pods_are_known() {
        const TABLE: &str = "test-services";
        let is_former = || Proxy::open(TABLE, NodeView::default()).unwrap().is_intact().unwrap();
        coracle_testing::in_new_namespace(move || {
            let mut former = Proxy::open(TABLE, NodeView::default()).unwrap();
            former.replace(NodeView::default(), Vec::new()).unwrap();
            // The runtime's threads are in the network namespace of this thread. Functions that block run one after the
            // other.
            let mut runtime = tokio::runtime::Builder::new_current_thread();
            let runtime = runtime.enable_all().max_blocking_threads(1).build().unwrap();
            runtime.block_on(async {
                let (sender, receiver) = watch::channel(None);
                let mut guard = pin!(run(TABLE.to_owned(), Some(8472), receiver));
                tokio::select! {
                    biased;
                    () = &mut guard => panic!("it runs until dropped"),
                    found = tokio::task::spawn_blocking(is_former) => assert!(found.unwrap()),
                }
                let node = json!({"spec": {"podCIDRs": ["10.42.0.0/24"]}});
                sender.send(Some(Arc::new(serde_json::from_value(node).unwrap()))).unwrap();
                tokio::select! {
                    biased;
                    () = &mut guard => panic!("it runs until dropped"),
                    () = coracle_testing::until("the table is replaced", 10, || !is_former()) => {}
                }
            });
        });
    }

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
