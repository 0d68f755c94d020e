//! Creates a cluster, or completes and starts an existing cluster.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use clap::Args;
use futures::stream::{FuturesUnordered, StreamExt as _};
use kube::Client;
use tokio::signal::unix::{SignalKind, signal};

use super::node::{Role, Started};
use super::record::{self, Cluster, Name, Roots, Settings};
use super::{delete, image, kubeconfig, ready};
use crate::role::{progress, token};

/// Maximum wait until a cluster is ready.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Validity of the token with which nodes join. The token is deleted when the nodes have joined.
const TOKEN_TTL: Duration = Duration::from_secs(600);

/// Flags of `coracle cluster create`.
#[derive(Args)]
pub(super) struct Arguments {
    /// Name of the cluster; its context for kubectl is coracle-NAME
    #[arg(default_value = record::DEFAULT)]
    name: Name,
    /// Number of nodes [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=64))]
    nodes: Option<u8>,
    /// Nodes, pods and Services have IPv6 addresses only
    #[arg(long)]
    ipv6: bool,
    /// Load images from OCI or `docker save` archives into every node
    #[arg(long = "image", value_name = "FILE", num_args = 1..)]
    images: Vec<PathBuf>,
    /// Directory of registry mirrors: a subdirectory per host with a hosts.toml
    #[arg(long, value_name = "DIR")]
    registry_config_dir: Option<PathBuf>,
    /// Kubeconfig to which the cluster is added [default: that of kubectl]
    #[arg(long, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
    /// Keep a cluster that does not become ready, so that you can examine it
    #[arg(long)]
    retain: bool,
}

/// Runs the command.
pub(super) async fn run(roots: &Roots, arguments: Arguments) -> anyhow::Result<()> {
    let name = &arguments.name;
    let target = kubeconfig::target(arguments.kubeconfig.as_deref())?;
    for image in &arguments.images {
        anyhow::ensure!(image.exists(), "cannot load {}: no such file or directory", image.display());
    }
    let lock = roots.lock_cluster(name)?;
    let found = roots.find(name)?;
    let is_new = found.is_none();
    let mut cluster = match found {
        Some(cluster) => cluster,
        None => roots.record(name, &settings(&arguments)?)?,
    };
    check(&cluster, &arguments)?;
    // Record the file before the change, so that `delete` removes the cluster from it.
    if cluster.record.kubeconfigs.insert(target.clone()) {
        cluster.save()?;
    }
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let made = tokio::select! {
        made = make(&cluster, &arguments.images) => made,
        _ = interrupt.recv() => Err(anyhow::anyhow!("interrupted")),
        _ = terminate.recv() => Err(anyhow::anyhow!("terminated")),
        () = tokio::time::sleep(TIMEOUT) => {
            Err(anyhow::anyhow!("not ready after {} s; use --retain to examine it", TIMEOUT.as_secs()))
        }
    };
    progress::clear();
    let made = made.with_context(|| format!("cannot create the cluster {name}"));
    if made.is_err() && is_new && !arguments.retain {
        delete::run_locked(roots, name).await.context("cannot remove the incomplete cluster")?;
        drop(lock);
        roots.remove_if_empty()?;
    }
    made?;
    kubeconfig::add(&target, &cluster).with_context(|| {
        format!("the cluster runs; `coracle cluster kubeconfig {name}` prints its kubeconfig")
    })?;
    super::super::print(&format!(
        "the cluster {name} is ready: {}; its context is in {}\nkubectl --context {} get nodes\n",
        kubeconfig::server(&cluster),
        target.display(),
        name.context()
    ))
}

fn settings(arguments: &Arguments) -> anyhow::Result<Settings> {
    let registry_config_dir =
        arguments.registry_config_dir.as_deref().map(std::path::absolute).transpose()?;
    Ok(Settings { nodes: arguments.nodes.unwrap_or(1), ipv6: arguments.ipv6, registry_config_dir })
}

/// Refuses settings that differ from the settings of the existing cluster.
fn check(cluster: &Cluster, arguments: &Arguments) -> anyhow::Result<()> {
    let Cluster { name, record, .. } = cluster;
    let same = arguments.nodes.is_none_or(|nodes| nodes == record.nodes) && (!arguments.ipv6 || record.ipv6);
    anyhow::ensure!(
        same,
        "the cluster {name} exists with {} nodes and {}; `coracle cluster delete {name}` removes it",
        record.nodes,
        if record.ipv6 { "IPv6" } else { "IPv4" }
    );
    Ok(())
}

/// Creates the missing parts of the cluster, and waits until it is ready.
async fn make(cluster: &Cluster, images: &[PathBuf]) -> anyhow::Result<()> {
    progress::show("making the network");
    make_private(&cluster.run).with_context(|| format!("cannot create {}", cluster.run.display()))?;
    let network = cluster.network();
    network.ensure().await?;
    for number in cluster.numbers() {
        network.connect(&cluster.host(number)).await?;
    }
    if network.is_blocked().unwrap_or(false) {
        tracing::warn!(
            bridge = network.bridge,
            "a firewall of this machine drops forwarded packets: nodes may not reach registries or each other; with \
             Docker, `iptables -I DOCKER-USER -i coracle-c+ -j ACCEPT` and the same with -o allow them"
        );
    }
    let mut processes = Processes::default();
    progress::show("starting the control plane");
    processes.start(cluster, 1, &Role::ControlPlane)?;
    let client = processes.unless_ended(cluster, ready::api(cluster)).await?;
    join(cluster, &client, &mut processes).await?;
    image::load(cluster, images).await
}

/// Creates a directory that only root may enter, and its missing parents. Existing directories are not changed, because
/// other programs may use the directory of all clusters.
fn make_private(run: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
    std::fs::DirBuilder::new().mode(0o700).recursive(true).create(run)?;
    std::fs::set_permissions(run, std::fs::Permissions::from_mode(0o700))
}

/// Starts the other nodes, and waits until all are Ready.
async fn join(cluster: &Cluster, client: &Client, processes: &mut Processes) -> anyhow::Result<()> {
    let file = cluster.state.join("join-token");
    let workers: Vec<u8> =
        cluster.numbers().skip(1).filter(|node| !cluster.node(*node).is_running()).collect();
    let mut made = None;
    if !workers.is_empty() {
        progress::show("joining the other nodes");
        let token::Join { server, token, hash } =
            processes.unless_ended(cluster, token::make(client, TOKEN_TTL, token::UseLimit::Many)).await??;
        coracle_agent::replace_private(&file, format!("{}.{}\n", token.id, token.secret).as_bytes())?;
        let path = file.display().to_string();
        let flags =
            ["--join", &server, "--token-file", &path, "--ca-hash", &hash.to_string()].map(str::to_owned);
        for node in workers {
            processes.start(cluster, node, &Role::Worker(&flags))?;
        }
        made = Some(token);
    }
    progress::show("waiting until the nodes are Ready");
    processes.unless_ended(cluster, ready::nodes(cluster, client)).await??;
    if let Some(token) = made {
        // A failed deletion is harmless: the token expires soon.
        let _ = token::remove(client, &token.id).await;
        let _ = std::fs::remove_file(&file);
    }
    Ok(())
}

/// The processes that this command started.
#[derive(Default)]
struct Processes(Vec<(u8, Started)>);

impl Processes {
    /// Starts a node, unless it runs.
    fn start(&mut self, cluster: &Cluster, number: u8, role: &Role<'_>) -> anyhow::Result<()> {
        let node = cluster.node(number);
        if !node.is_running() {
            self.0.push((number, node.start(role)?));
        }
        Ok(())
    }

    /// Waits for `work`. If a process ends first, the error has the last line of its log.
    async fn unless_ended<T>(
        &mut self,
        cluster: &Cluster,
        work: impl Future<Output = T>,
    ) -> anyhow::Result<T> {
        let mut ends: FuturesUnordered<_> = self
            .0
            .iter_mut()
            .map(|(number, started)| async move {
                let _status = (&mut started.ended).await;
                *number
            })
            .collect();
        tokio::select! {
            done = work => Ok(done),
            Some(number) = ends.next() => {
                let node = cluster.node(number);
                anyhow::bail!("the node {} stopped; the last line of its log: {}", node.name(), node.last_line())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::make_private;

    #[test]
    fn the_parent_of_a_cluster_directory_keeps_its_mode() {
        let dir = tempfile::tempdir().expect("directory");
        let mode =
            |path: &std::path::Path| fs::metadata(path).expect("directory").permissions().mode() & 0o777;
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).expect("chmod");
        let run = dir.path().join("all/local");
        make_private(&run).expect("made");
        fs::set_permissions(&run, Permissions::from_mode(0o755)).expect("chmod");
        make_private(&run).expect("made again");
        assert_eq!((mode(dir.path()), mode(&dir.path().join("all")), mode(&run)), (0o755, 0o700, 0o700));
    }
}
