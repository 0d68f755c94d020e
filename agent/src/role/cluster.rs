//! `coracle cluster`: local clusters, for development and tests. Each node runs in its own network namespace.
//!
//! ```text
//! this machine ── bridge coracle-c<number> ─┬─ eth0 of node 1: `coracle up`
//!                                           ├─ eth0 of node 2: `coracle agent`, joined with a token
//!                                           └─ …
//! ```
//!
//! `create` writes the record of a cluster first, and `delete` removes it last. So after an interrupted command,
//! `create` completes the cluster and `delete` removes all of it.

mod create;
mod delete;
mod image;
mod kubeconfig;
mod list;
mod node;
mod ready;
mod record;

use std::path::PathBuf;

use clap::{Args, Subcommand};

use self::record::{Name, Roots};
use super::output::Format;

/// Flags of `coracle cluster`.
#[derive(Args)]
pub(crate) struct Arguments {
    /// Directory of the local clusters: their records and their nodes' state
    #[arg(long, value_name = "DIR", global = true, default_value = "/var/lib/coracle-clusters")]
    state_dir: PathBuf,
    /// Directory of files that a reboot invalidates: namespaces, sockets and records of the nodes
    #[arg(long, value_name = "DIR", global = true, default_value = "/run/coracle-clusters")]
    run_dir: PathBuf,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Subcommand)]
enum Verb {
    /// Create a cluster, wait until its nodes are Ready, and add it to the kubeconfig. An existing cluster is started
    Create(create::Arguments),
    /// List the clusters
    #[command(visible_alias = "ls")]
    List {
        /// Format of the list
        #[arg(long, short, value_enum, default_value_t)]
        output: Format,
    },
    /// Load images from OCI or `docker save` archives into every node
    LoadImage {
        /// Name of the cluster
        #[arg(default_value = record::DEFAULT)]
        name: Name,
        /// An archive or OCI layout directory
        #[arg(long = "image", value_name = "FILE", num_args = 1.., required = true)]
        images: Vec<PathBuf>,
    },
    /// Print the kubeconfig of a cluster
    Kubeconfig {
        /// Name of the cluster
        #[arg(default_value = record::DEFAULT)]
        name: Name,
    },
    /// Stop a cluster and remove all its files and interfaces. An absent cluster is not an error
    Delete {
        /// Name of the cluster
        #[arg(default_value = record::DEFAULT)]
        name: Name,
        /// Delete all clusters
        #[arg(long, conflicts_with = "name")]
        all: bool,
    },
}

/// Runs one command.
pub(crate) async fn run(arguments: Arguments) -> anyhow::Result<()> {
    super::require_root()?;
    let Arguments { state_dir, run_dir, verb } = arguments;
    let is_text = state_dir.to_str().is_some() && run_dir.to_str().is_some();
    anyhow::ensure!(is_text, "--state-dir and --run-dir must be valid UTF-8");
    let roots = Roots { state: std::path::absolute(state_dir)?, run: std::path::absolute(run_dir)? };
    match verb {
        Verb::Create(arguments) => create::run(&roots, arguments).await,
        Verb::List { output } => list::run(&roots, output),
        Verb::LoadImage { name, images } => image::load(&roots.existing(&name)?, &images).await,
        Verb::Kubeconfig { name } => super::print(&kubeconfig::of(&roots.existing(&name)?)?),
        Verb::Delete { all: true, .. } => delete::all(&roots).await,
        Verb::Delete { name, .. } => delete::run(&roots, &name).await,
    }
}
