//! Images from archives, for every node of a cluster.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context;
use coracle_proto::node::{ImportRequest, Progress};

use super::super::{control, image, progress};
use super::record::Cluster;

/// Imports the archives into every node, and prints the names of the images.
pub(super) async fn load(cluster: &Cluster, files: &[PathBuf]) -> anyhow::Result<()> {
    let _cleared = progress::ClearAtEnd;
    for file in files {
        let path = std::path::absolute(file)?;
        anyhow::ensure!(path.exists(), "cannot load {}: no such file or directory", path.display());
        let loading = Arc::new(Loading { path: path.clone(), nodes: Mutex::default() });
        progress::show(&format!("loading {}", path.display()));
        let mut imports = tokio::task::JoinSet::new();
        for node in cluster.nodes() {
            anyhow::ensure!(
                node.is_running(),
                "the node {} does not run; `coracle cluster create {}` starts it",
                node.name(),
                cluster.name
            );
            let (run_dir, name, path) = (node.run_dir(), node.name(), path.clone());
            let loading = loading.clone();
            imports.spawn(async move {
                let imported = import(&run_dir, &path, |at| loading.show(&run_dir, at)).await;
                imported.with_context(|| format!("cannot load {} into the node {name}", path.display()))
            });
        }
        let mut names = Vec::new();
        while let Some(imported) = imports.join_next().await {
            names = imported??;
        }
        progress::clear();
        super::super::print(&format!("{}\n", names.join("\n")))?;
    }
    Ok(())
}

/// The progress of an archive that several nodes import.
struct Loading {
    path: PathBuf,
    /// By the nodes' run directories.
    nodes: Mutex<HashMap<PathBuf, Progress>>,
}

// === impl Loading ===

impl Loading {
    /// Shows the sum of all nodes, after a report of one node.
    fn show(&self, node: &Path, at: &Progress) {
        let mut nodes = self.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.insert(node.to_owned(), *at);
        progress::show(&format!("loading {}: {}", self.path.display(), image::amounts(&sum(nodes.values()))));
    }
}

fn sum<'a>(nodes: impl Iterator<Item = &'a Progress>) -> Progress {
    nodes.fold(Progress::default(), |sum, at| Progress {
        bytes_total: sum.bytes_total.saturating_add(at.bytes_total),
        bytes_done: sum.bytes_done.saturating_add(at.bytes_done),
        layers_total: sum.layers_total.saturating_add(at.layers_total),
        layers_done: sum.layers_done.saturating_add(at.layers_done),
    })
}

/// Returns the names of the imported images.
async fn import(run_dir: &Path, path: &Path, show: impl Fn(&Progress)) -> anyhow::Result<Vec<String>> {
    let path = path.to_str().context("the path is not UTF-8")?.to_owned();
    let mut client = control::images(run_dir).await?;
    let images = control::import(&mut client, ImportRequest { path, name: String::new() }, show).await?;
    // Without a name no pod could use the image.
    anyhow::ensure!(
        images.iter().all(|image| !image.names.is_empty()),
        "an image of the archive has no name; create it with `docker save NAME` or `coracle image export NAME`"
    );
    Ok(images.into_iter().flat_map(|image| image.names).collect())
}
