//! `coracle image`: import, list and remove images, through the node that runs here or, when none
//! does, in its store.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use coracle_images::{Images, ImagesConfig};
use coracle_proto::node::images_client::ImagesClient;
use coracle_proto::node::{Image, ImportRequest, ListRequest, RemoveRequest};

use super::control;
use crate::lock::Lock;
use crate::settings::{ControlPlaneSettings, NodeSettings, Places, Settings};

/// Flags of `coracle image`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    places: Places,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Take images from an OCI archive, an OCI layout directory or a `docker save` archive
    Import {
        /// The archive or directory
        path: PathBuf,
        /// The name to give the image; needed when the archive names none
        #[arg(long)]
        name: Option<String>,
    },
    /// List the images that are here
    #[command(visible_alias = "ls")]
    List,
    /// Remove an image with all its names; one that is absent is removed already
    Rm {
        /// A name or id
        image: String,
    },
}

/// Does one verb on the store.
pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<()> {
    super::require_root()?;
    let settings =
        Settings::load(arguments.places, NodeSettings::default(), ControlPlaneSettings::default())?;
    let dirs = settings.dirs();
    let mut store = match Lock::holder(&dirs.run) {
        Some(_) => Store::Running(control::images(&dirs.run).await?),
        None => Store::Here(
            Images::open(ImagesConfig::new(&dirs.state)).await.context("cannot open the image store")?,
        ),
    };
    match arguments.verb {
        Verb::Import { path, name } => {
            let path = std::path::absolute(path)?;
            for image in store.import(&path, name.as_deref()).await? {
                super::print(&format!("{} {}\n", image.id, image.names.join(" ")))?;
            }
            Ok(())
        }
        Verb::List => super::print(&table(&store.list().await?)),
        Verb::Rm { image } => store.remove(&image).await,
    }
}

/// The store of a node that runs, or of one that does not.
enum Store {
    Running(ImagesClient<tonic::transport::Channel>),
    Here(Images),
}

// === impl Store ===

impl Store {
    async fn import(&mut self, path: &Path, name: Option<&str>) -> anyhow::Result<Vec<Image>> {
        let context = || format!("cannot import {}", path.display());
        match self {
            Self::Running(client) => {
                let path = path.to_str().context("the path is not UTF-8")?.to_owned();
                let request = ImportRequest { path, name: name.unwrap_or_default().to_owned() };
                Ok(client.import(request).await.map_err(said).with_context(context)?.into_inner().images)
            }
            Self::Here(images) => {
                let imported = images.import(path, name).await.with_context(context)?;
                Ok(imported.iter().map(control::shown).collect())
            }
        }
    }

    async fn list(&mut self) -> anyhow::Result<Vec<Image>> {
        match self {
            Self::Running(client) => Ok(client.list(ListRequest {}).await.map_err(said)?.into_inner().images),
            Self::Here(images) => Ok(images.list().iter().map(control::shown).collect()),
        }
    }

    async fn remove(&mut self, image: &str) -> anyhow::Result<()> {
        let context = || format!("cannot remove {image}");
        match self {
            Self::Running(client) => {
                let request = RemoveRequest { image: image.to_owned() };
                client.remove(request).await.map_err(said).with_context(context)?;
            }
            Self::Here(images) => images.remove(image).await.with_context(context)?,
        }
        Ok(())
    }
}

/// What the node said, without gRPC's decoration.
fn said(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message())
}

fn table(images: &[Image]) -> String {
    let mut rows: Vec<[String; 3]> = vec![["IMAGE".into(), "ID".into(), "SIZE".into()]];
    for image in images {
        let id: String = image.id.trim_start_matches("sha256:").chars().take(13).collect();
        for name in &image.names {
            rows.push([name.clone(), id.clone(), size(image.size)]);
        }
    }
    let width = |column: usize| rows.iter().map(|r| r[column].len()).max().unwrap_or(0);
    let (first, second) = (width(0), width(1));
    rows.iter().map(|[name, id, size]| format!("{name:first$}   {id:second$}   {size}\n")).collect()
}

fn size(bytes: u64) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{}.{} kB", bytes / 1_000, bytes % 1_000 / 100),
        _ => format!("{}.{} MB", bytes / 1_000_000, bytes % 1_000_000 / 100_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_aligns_its_columns_and_has_a_row_per_name() {
        let image = Image {
            id: "sha256:0123456789abcdef".into(),
            names: vec!["docker.io/library/nginx:latest".into(), "a:1".into()],
            size: 12_345_678,
            pinned: false,
        };
        let expect = "IMAGE                            ID              SIZE\n\
                      docker.io/library/nginx:latest   0123456789abc   12.3 MB\n\
                      a:1                              0123456789abc   12.3 MB\n";
        assert_eq!(table(&[image]), expect);
    }
}
