//! Images from archives, for every node of a cluster.

use std::path::{Path, PathBuf};

use anyhow::Context;
use coracle_proto::node::ImportRequest;

use super::super::{control, progress};
use super::record::Cluster;

/// Imports the archives into every node, and prints the names of the images.
pub(super) async fn load(cluster: &Cluster, files: &[PathBuf]) -> anyhow::Result<()> {
    let _cleared = progress::ClearAtEnd;
    for file in files {
        let path = std::path::absolute(file)?;
        anyhow::ensure!(path.exists(), "cannot load {}: no such file or directory", path.display());
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
            imports.spawn(async move {
                let imported = import(&run_dir, &path).await;
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

/// Returns the names of the imported images.
async fn import(run_dir: &Path, path: &Path) -> anyhow::Result<Vec<String>> {
    let path = path.to_str().context("the path is not UTF-8")?.to_owned();
    let mut client = control::images(run_dir).await?;
    let reply = client.import(ImportRequest { path, name: String::new() }).await;
    let images = reply.map_err(|status| anyhow::anyhow!("{}", status.message()))?.into_inner().images;
    // Without a name no pod could use the image.
    anyhow::ensure!(
        images.iter().all(|image| !image.names.is_empty()),
        "an image of the archive has no name; create it with `docker save NAME` or `coracle image export NAME`"
    );
    Ok(images.into_iter().flat_map(|image| image.names).collect())
}
