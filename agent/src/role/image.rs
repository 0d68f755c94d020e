//! `coracle image`: pulls, imports, exports, lists and removes images. A running node does the work. Without a running
//! node, this process opens the node's store.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Args, Subcommand};
use coracle_images::{Auth, Images, ProgressFn};
use coracle_proto::node::images_client::ImagesClient;
use coracle_proto::node::{
    ExportRequest, Image, ImportRequest, ListRequest, Progress, PullRequest, RemoveRequest,
};
use serde::Serialize;

use super::control::status_message;
use super::output::{self, Format};
use super::{control, progress};
use crate::lock::Lock;
use crate::settings::{AllFlags, Flags, LogSettings, PathSettings, Settings};

/// Columns of the table of images.
const HEADER: [&str; 3] = ["IMAGE", "ID", "SIZE"];

/// Flags of `coracle image`.
#[derive(Args)]
pub(crate) struct Arguments {
    #[command(flatten)]
    paths: Flags<PathSettings>,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Pull an image from its registry or from the configured mirrors
    Pull {
        /// Name as in a pod: `nginx`, `registry.example/team/app:1.2`, `name@sha256:…`
        image: String,
        /// User and password of the registry [default: CORACLE_REGISTRY_CREDS of the environment]
        #[arg(long, value_name = "USER:PASSWORD")]
        creds: Option<String>,
    },
    /// Import images from an OCI archive, an OCI layout directory or a `docker save` archive
    Import {
        /// The archive or directory
        path: PathBuf,
        /// Name of the image; required if the archive has none
        #[arg(long)]
        name: Option<String>,
    },
    /// Export an image to a file: an OCI archive for `import`, docker, podman and skopeo
    Export {
        /// A name or id
        image: String,
        /// The file; an existing one is replaced
        path: PathBuf,
    },
    /// List the images of the node
    #[command(visible_alias = "ls")]
    List {
        /// Format of the list
        #[arg(long, short, value_enum, default_value_t)]
        output: Format,
    },
    /// Remove an image with all its names; an absent image is not an error
    #[command(visible_alias = "remove")]
    Rm {
        /// A name or id
        image: String,
    },
}

/// Runs one command.
pub(crate) async fn run(arguments: Arguments, log: Flags<LogSettings>) -> anyhow::Result<()> {
    super::require_root()?;
    let settings =
        Settings::load_for_command(AllFlags { log, paths: arguments.paths, ..AllFlags::default() })?;
    let dirs = settings.dirs();
    let mut store = match Lock::holder(&dirs.run) {
        Some(_) => Store::Running(control::images(&dirs.run).await?),
        None => {
            let config = settings.node().images.store.config(&dirs.state);
            Store::Here(Images::open(config).await.context("cannot open the image store")?)
        }
    };
    match arguments.verb {
        Verb::Pull { image, creds } => {
            let creds = creds.or_else(|| std::env::var("CORACLE_REGISTRY_CREDS").ok());
            let image = store.pull(&image, creds.as_deref()).await?;
            super::print(&format!("{} {}\n", image.id, image.names.join(" ")))
        }
        Verb::Export { image, path } => store.export(&image, &std::path::absolute(path)?).await,
        Verb::Import { path, name } => {
            let path = std::path::absolute(path)?;
            for image in store.import(&path, name.as_deref()).await? {
                super::print(&format!("{} {}\n", image.id, image.names.join(" ")))?;
            }
            Ok(())
        }
        Verb::List { output } => list(output, &store.list().await?),
        Verb::Rm { image } => store.remove(&image).await,
    }
}

/// The store of a running node, or the directory of a stopped node.
enum Store {
    Running(ImagesClient<tonic::transport::Channel>),
    Here(Images),
}

// === impl Store ===

impl Store {
    async fn import(&mut self, path: &Path, name: Option<&str>) -> anyhow::Result<Vec<Image>> {
        let context = || format!("cannot import {}", path.display());
        let _cleared = progress::ClearAtEnd;
        let doing = format!("importing {}", path.display());
        progress::show(&format!("{doing}{}", file_size(path)));
        match self {
            Self::Running(client) => {
                let path = path.to_str().context("the path is not UTF-8")?.to_owned();
                let request = ImportRequest { path, name: name.unwrap_or_default().to_owned() };
                let show = |at: &Progress| show_of(&doing, at);
                control::import(client, request, show).await.with_context(context)
            }
            Self::Here(images) => {
                let report: ProgressFn =
                    std::sync::Arc::new(move |at| show_of(&doing, &control::progress(at)));
                let imported = images.import_with(path, name, Some(report)).await.with_context(context)?;
                Ok(imported.iter().map(control::shown).collect())
            }
        }
    }

    async fn pull(&mut self, image: &str, creds: Option<&str>) -> anyhow::Result<Image> {
        let _cleared = progress::ClearAtEnd;
        let (username, password) = match creds {
            Some(creds) => creds.split_once(':').context("--creds is not USER:PASSWORD")?,
            None => ("", ""),
        };
        let (username, password) = (username.to_owned(), password.to_owned());
        let pulled = match self {
            Self::Running(client) => {
                let request = PullRequest { image: image.to_owned(), username, password };
                let failed = |status| pull_error(status, image);
                let mut replies = client.pull(request).await.map_err(failed)?.into_inner();
                loop {
                    let reply = replies.message().await.map_err(failed)?;
                    let reply = reply.with_context(|| format!("cannot pull {image}: the node stopped"))?;
                    if let Some(image) = reply.image {
                        break image;
                    }
                    show(&reply.progress.unwrap_or_default());
                }
            }
            Self::Here(images) => {
                let auth = (!username.is_empty()).then_some(Auth::Basic { username, password });
                let report: ProgressFn = std::sync::Arc::new(|progress| show(&control::progress(progress)));
                // The error of `pull` gets no context, because it already names the operation and the image.
                control::shown(&images.pull(image, auth.map(Into::into), Some(report)).await?)
            }
        };
        Ok(pulled)
    }

    async fn export(&mut self, image: &str, path: &Path) -> anyhow::Result<()> {
        let context = || format!("cannot export {image}");
        let _cleared = progress::ClearAtEnd;
        let doing = format!("exporting {image} to {}", path.display());
        progress::show(&doing);
        match self {
            Self::Running(client) => {
                let path = path.to_str().context("the path is not UTF-8")?.to_owned();
                let request = ExportRequest { image: image.to_owned(), path };
                let show = |at: &Progress| show_of(&doing, at);
                control::export(client, request, show).await.with_context(context)
            }
            Self::Here(images) => {
                let report: ProgressFn =
                    std::sync::Arc::new(move |at| show_of(&doing, &control::progress(at)));
                images.export_with(image, path, Some(report)).await.with_context(context)
            }
        }
    }

    async fn list(&mut self) -> anyhow::Result<Vec<Image>> {
        match self {
            Self::Running(client) => {
                Ok(client.list(ListRequest {}).await.map_err(status_message)?.into_inner().images)
            }
            Self::Here(images) => Ok(images.list().iter().map(control::shown).collect()),
        }
    }

    async fn remove(&mut self, image: &str) -> anyhow::Result<()> {
        let context = || format!("cannot remove {image}");
        match self {
            Self::Running(client) => {
                let request = RemoveRequest { image: image.to_owned() };
                client.remove(request).await.map_err(status_message).with_context(context)?;
            }
            Self::Here(images) => {
                images.remove(image).await.with_context(context)?;
                // The end of this process would interrupt pending deletions.
                images.wait_until_deleted().await;
            }
        }
        Ok(())
    }
}

/// Converts the error of a pull by the node. Errors of the pull already name the operation. Errors of the connection do
/// not name it, so this function adds the operation.
fn pull_error(status: tonic::Status, image: &str) -> anyhow::Error {
    let is_of_node = status.code() == tonic::Code::FailedPrecondition;
    let error = status_message(status);
    if is_of_node { error } else { error.context(format!("cannot pull {image}")) }
}

/// The size of an archive as text to append to its path. Empty for a directory.
fn file_size(path: &Path) -> String {
    let is_file = |data: &std::fs::Metadata| data.is_file();
    std::fs::metadata(path)
        .ok()
        .filter(is_file)
        .map_or_else(String::new, |data| format!(", {}", size(data.len())))
}

/// Shows the progress of a pull. Without a total it clears the line.
fn show(at: &Progress) {
    progress::show(&match at.bytes_total {
        0 => String::new(),
        _ => amounts(at),
    });
}

/// Shows the progress of another operation.
fn show_of(doing: &str, at: &Progress) {
    progress::show(&format!("{doing}: {}", amounts(at)));
}

/// The amounts as text: `1.0 MB of 2.5 MB, 1 of 3 layers`.
pub(super) fn amounts(at: &Progress) -> String {
    let (done, total) = (size(at.bytes_done), size(at.bytes_total));
    format!("{done} of {total}, {} of {} layers", at.layers_done, at.layers_total)
}

/// An image in the JSON and YAML output.
#[derive(Serialize)]
struct Row<'a> {
    id: &'a str,
    names: &'a [String],
    size: u64,
    pinned: bool,
}

fn list(format: Format, images: &[Image]) -> anyhow::Result<()> {
    let rows: Vec<Row<'_>> = images.iter().map(row).collect();
    output::print(format, &rows, HEADER, lines)
}

fn row(image: &Image) -> Row<'_> {
    Row { id: &image.id, names: &image.names, size: image.size, pinned: image.pinned }
}

/// A line of the table for each name.
fn lines(row: &Row<'_>) -> Vec<Vec<String>> {
    let id: String = row.id.split(':').next_back().unwrap_or_default().chars().take(13).collect();
    row.names.iter().map(|name| vec![name.clone(), id.clone(), size(row.size)]).collect()
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
    fn the_table_has_a_line_per_name() {
        let image = Image {
            id: "sha256:0123456789abcdef".into(),
            names: vec!["docker.io/library/nginx:latest".into(), "a:1".into()],
            size: 12_345_678,
            pinned: false,
        };
        let line = |name: &str| [name, "0123456789abc", "12.3 MB"].map(str::to_owned).to_vec();
        assert_eq!(lines(&row(&image)), [line("docker.io/library/nginx:latest"), line("a:1")]);
    }
}
