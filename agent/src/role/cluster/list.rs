//! The list of local clusters.

use serde::Serialize;

use super::super::output::{self, Format};
use super::record::{Cluster, Roots};

/// A row of the list.
#[derive(Serialize)]
struct Row {
    name: String,
    nodes: u8,
    running: usize,
    server: String,
    context: String,
}

/// Prints the list.
pub(super) fn run(roots: &Roots, format: Format) -> anyhow::Result<()> {
    let (clusters, unreadable) = roots.all()?;
    for name in unreadable {
        tracing::warn!(%name, "a cluster has no readable record; `coracle cluster delete` removes an incomplete one");
    }
    let rows: Vec<Row> = clusters.iter().map(row).collect();
    output::print(format, &rows, ["NAME", "NODES", "RUNNING", "SERVER", "CONTEXT"], |row| {
        let Row { name, nodes, running, server, context } = row;
        vec![vec![name.clone(), nodes.to_string(), running.to_string(), server.clone(), context.clone()]]
    })
}

fn row(cluster: &Cluster) -> Row {
    Row {
        name: cluster.name.to_string(),
        nodes: cluster.record.nodes,
        running: cluster.nodes().filter(super::node::Node::is_running).count(),
        server: super::kubeconfig::server(cluster),
        context: cluster.name.context(),
    }
}
