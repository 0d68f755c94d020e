//! Removing clusters, including incomplete ones.

use super::kubeconfig;
use super::record::{Cluster, Name, Roots};
use crate::role::progress;

/// Removes the cluster, and everything that was made for it.
pub(super) async fn run(roots: &Roots, name: &Name) -> anyhow::Result<()> {
    if !roots.has_directory(name) {
        // A `create` that was killed early left the directory of all clusters, which is empty.
        roots.remove_if_empty()?;
        return super::super::print(&format!("there is no cluster {name}\n"));
    }
    let lock = roots.lock_cluster(name)?;
    run_locked(roots, name).await?;
    drop(lock);
    roots.remove_if_empty()
}

/// Removes the cluster. The caller holds its lock.
pub(super) async fn run_locked(roots: &Roots, name: &Name) -> anyhow::Result<()> {
    match roots.find(name)? {
        Some(cluster) => remove(&cluster).await,
        // `create` made the directory but no record, so nothing else exists.
        None => roots.remove_unrecorded(name),
    }
}

/// Removes all clusters. A failure does not stop the removal of other clusters.
pub(super) async fn all(roots: &Roots) -> anyhow::Result<()> {
    let (clusters, unreadable) = roots.all()?;
    let mut failures = Vec::new();
    for name in clusters.into_iter().map(|cluster| cluster.name).chain(unreadable) {
        if let Err(error) = run(roots, &name).await {
            failures.push(format!("{error:#}"));
        }
    }
    anyhow::ensure!(failures.is_empty(), "{}", failures.join("; "));
    Ok(())
}

async fn remove(cluster: &Cluster) -> anyhow::Result<()> {
    progress::show("stopping the nodes");
    let mut failures = Vec::new();
    for path in &cluster.record.kubeconfigs {
        if let Err(error) = kubeconfig::remove(path, cluster) {
            failures.push(format!("{error:#}"));
        }
    }
    let mut removals = tokio::task::JoinSet::new();
    for number in cluster.numbers() {
        let cluster = cluster.clone();
        removals.spawn_blocking(move || cluster.node(number).remove());
    }
    let mut nodes = Ok(());
    while let Some(removed) = removals.join_next().await {
        nodes = nodes.and(removed?);
    }
    progress::clear();
    // Keep the cluster's records if a node remains: its removal needs the records of its pods.
    nodes?;
    let hosts: Vec<_> = cluster.numbers().map(|number| cluster.host(number)).collect();
    cluster.network().remove(&hosts).await?;
    cluster.remove()?;
    // A damaged kubeconfig does not prevent the removal of the cluster.
    anyhow::ensure!(failures.is_empty(), "the cluster is removed, but {}", failures.join("; "));
    Ok(())
}
