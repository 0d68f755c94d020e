//! `coracle agent`: the node alone, for a control plane elsewhere.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use coracle_agent::Identity;
use coracle_agent::join::{
    self, CaHash, Endpoint, JoinError, JoinRequest, JoinStep, Membership, RequestedServing, Token,
};
use kube::Client;
use kube::config::{KubeConfigOptions, Kubeconfig};

use super::{joined_dns, progress};
use crate::lock::Lock;
use crate::settings::{Credentials, Node, Serving, Settings};

/// Maximum sizes in bytes of the files that flags name.
const KUBECONFIG_MAX: u64 = 1 << 20;
const TOKEN_MAX: u64 = 4 << 10;

/// Connection of the agent to its control plane.
#[derive(Args)]
pub(crate) struct ControlPlaneConnection {
    /// Kubeconfig of a node whose certificates are made elsewhere
    #[arg(long, value_name = "FILE", conflicts_with = "join")]
    kubeconfig: Option<PathBuf>,
    /// Join the cluster of this API server
    #[arg(long, value_name = "URL", requires = "secret", requires = "ca_hash")]
    join: Option<Endpoint>,
    /// Token to join with, id.secret
    #[arg(long, value_name = "TOKEN", requires = "join", group = "secret")]
    token: Option<Token>,
    /// File with the token, for machines on which others can see the command line
    #[arg(long, value_name = "FILE", requires = "join", group = "secret")]
    token_file: Option<PathBuf>,
    /// Hash of the public key of the cluster's CA, sha256:…
    #[arg(long, value_name = "HASH", requires = "join")]
    ca_hash: Option<CaHash>,
}

/// The machine has no files of an earlier join, and no flags to join. A restart cannot help.
#[derive(Debug, thiserror::Error)]
#[error(
    "this machine has not joined a cluster: `coracle token create` where the control plane runs prints the command"
)]
pub(crate) struct NotJoined;

/// Runs until SIGINT or SIGTERM.
pub(crate) async fn run(settings: Settings, connection: ControlPlaneConnection) -> anyhow::Result<()> {
    super::require_root()?;
    super::raise_open_files();
    let mut node = settings.node();
    if connection.kubeconfig.is_some() {
        check_rotation(&node.serving)?;
        node.disable_cluster_services();
    }
    let endpoint = settings.container_runtime_endpoint().map(str::to_owned);
    if endpoint.is_some() {
        settings.check_remote_runtime()?;
    }
    super::repair(&node)?;
    Lock::acquire(&node.dirs.run)?.hold();
    if endpoint.is_some() {
        check_own_pods(&node.dirs.run).await?;
    }
    if let Some(kubeconfig) = connection.kubeconfig {
        super::prepare(&node)?;
        let client = node_client(&kubeconfig).await?;
        let identity = serving(&node, &client)?;
        let credentials = Credentials { identity, client_ca: node.serving.client_ca.clone() };
        return run_node(node, endpoint, credentials, client).await;
    }
    let membership = membership(&node, connection).await?;
    super::prepare(&node)?;
    let client = membership.client();
    joined_dns::configure(&mut node, &client).await;
    let credentials = Credentials {
        client_ca: Some(membership.client_ca()),
        identity: Identity::Joined(Arc::new(membership)),
    };
    run_node(node, endpoint, credentials, client).await
}

/// Refuses `rotate-certificates` with a kubeconfig. Otherwise the node would lose its access when the certificate
/// expires.
fn check_rotation(serving: &Serving) -> anyhow::Result<()> {
    anyhow::ensure!(
        !serving.rotates,
        "rotate-certificates (rotateCertificates) cannot be set with --kubeconfig, whose client certificate the agent \
         does not renew: use --join, or renew the certificate by another program and unset rotate-certificates"
    );
    Ok(())
}

/// Refuses another container runtime while pods of the built-in one run. Otherwise each of these pods would run twice,
/// with the same volumes.
async fn check_own_pods(run_dir: &Path) -> anyhow::Result<()> {
    let state = run_dir.to_owned();
    let has_pods = coracle_threads::spawn_blocking(move || coracle_cri::Runtime::has_pods(&state)).await?;
    anyhow::ensure!(
        !has_pods,
        "container-runtime-endpoint (containerRuntimeEndpoint) cannot be set while pods of the built-in container \
         runtime run: end them with `coracle down`, or unset it"
    );
    Ok(())
}

/// Runs the node on the built-in container runtime, or on the container runtime at this endpoint.
async fn run_node(
    node: Node,
    endpoint: Option<String>,
    credentials: Credentials,
    client: Client,
) -> anyhow::Result<()> {
    let signals = super::signals::of_node(&node, std::time::Duration::ZERO)?;
    match endpoint {
        None => super::node::run(node, credentials, client, signals).await,
        Some(endpoint) => super::remote_runtime::run(node, &endpoint, credentials, client, signals).await,
    }
}

/// The certificate of the kubelet API: files that were made elsewhere, a certificate requested from the cluster
/// (`--server-tls-bootstrap`), or a self-signed one.
fn serving(node: &Node, client: &Client) -> anyhow::Result<Identity> {
    let Serving { files, bootstrap, cert_dir, .. } = &node.serving;
    if let Some(files) = files {
        return Ok(Identity::Files(files.clone()));
    }
    if *bootstrap {
        let requested = RequestedServing::open(client.clone(), &node.name, cert_dir)?;
        return Ok(Identity::Requested(Arc::new(requested)));
    }
    let addresses = if node.ips.is_empty() { coracle_agent::node::own_addresses() } else { node.ips.clone() };
    Ok(Identity::Files(join::self_signed(cert_dir, &node.name, &addresses)?))
}

async fn membership(node: &Node, connection: ControlPlaneConnection) -> anyhow::Result<Membership> {
    let (state, name) = (&node.dirs.state, node.name.as_str());
    if let (Some(endpoint), Some(hash)) = (&connection.join, &connection.ca_hash) {
        // A machine that has joined needs no token: the file may have been removed, and the token may have expired.
        match join::resume(state, name) {
            Ok(Some(membership)) => return Ok(membership.require_cluster(hash)?),
            Ok(None) => {}
            // The machine joins the same cluster again, with a new certificate.
            Err(over @ JoinError::Expired { .. }) => {
                join::may_rejoin(state, hash)?;
                tracing::warn!(reason = %over, "joining the cluster again");
            }
            Err(error) => return Err(error.into()),
        }
        let token = token(connection.token, connection.token_file.as_deref())?;
        return join_cluster(state, &JoinRequest { node: name, endpoint, token: &token, hash }).await;
    }
    Ok(join::resume(state, name)?.ok_or(NotJoined)?)
}

/// Joins a cluster, and shows the current step of the join.
async fn join_cluster(state: &Path, request: &JoinRequest<'_>) -> anyhow::Result<Membership> {
    let (node, server) = (request.node, request.endpoint);
    tracing::info!(node, %server, "joining the cluster");
    let show = |step| progress::show(&progress_line(step, request));
    let joined = {
        // The next line of the log starts on an empty line.
        let _cleared = progress::ClearAtEnd;
        join::join(state, request, show).await?
    };
    tracing::info!(node, %server, "joined the cluster");
    Ok(joined)
}

fn progress_line(step: JoinStep, request: &JoinRequest<'_>) -> String {
    match step {
        JoinStep::Authority => format!("waiting for the API server at {}", request.endpoint),
        JoinStep::Certificate => format!("waiting for the certificate of node {}", request.node),
    }
}

fn token(given: Option<Token>, file: Option<&Path>) -> anyhow::Result<Token> {
    match (given, file) {
        (Some(token), _) => Ok(token),
        (None, Some(path)) => {
            let context = || format!("cannot read the token from {}", path.display());
            let text = coracle_agent::read_text(path, TOKEN_MAX).with_context(context)?;
            text.trim().parse().with_context(context)
        }
        (None, None) => anyhow::bail!("--join needs --token or --token-file"),
    }
}

/// A client for controllers and scheduler. It uses the API server and the credentials of a kubeconfig. `requests` gets a
/// change with each request, except requests for leases.
#[cfg(feature = "controlplane")]
pub(crate) async fn component_client(
    kubeconfig: &Path,
    requests: tokio::sync::watch::Sender<()>,
) -> anyhow::Result<Client> {
    let config = api_config(kubeconfig).await?;
    coracle_agent::component_client(config, requests).context("cannot create an API client")
}

async fn node_client(kubeconfig: &Path) -> anyhow::Result<Client> {
    coracle_agent::node_client(api_config(kubeconfig).await?).context("cannot create an API client")
}

async fn api_config(kubeconfig: &Path) -> anyhow::Result<kube::Config> {
    let context = || format!("cannot read the kubeconfig {}", kubeconfig.display());
    let text = coracle_agent::read_text(kubeconfig, KUBECONFIG_MAX).with_context(context)?;
    let file = Kubeconfig::from_yaml(&text).with_context(context)?;
    kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .with_context(|| format!("{} has no usable cluster and user", kubeconfig.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "abcdef.0123456789abcdef";
    const CONFIG: &str = "{apiVersion: v1, kind: Config, current-context: c, \
        contexts: [{name: c, context: {cluster: c, user: u}}], \
        clusters: [{name: c, cluster: {server: 'http://192.0.2.1:8080'}}], users: [{name: u, user: {}}]}";

    #[test]
    fn a_kubeconfig_whose_certificate_must_be_renewed_is_refused() {
        let of = |rotates: bool| Serving {
            files: None,
            bootstrap: false,
            cert_dir: PathBuf::new(),
            client_ca: None,
            tls: coracle_agent::TlsOptions::default(),
            handlers: coracle_agent::ApiHandlers::default(),
            rotates,
        };
        assert!(check_rotation(&of(false)).is_ok());
        let error = check_rotation(&of(true)).unwrap_err().to_string();
        assert!(error.contains("--kubeconfig") && error.contains("use --join"), "{error}");
    }

    #[test]
    fn the_progress_of_a_join_names_what_the_machine_waits_for() {
        let endpoint: Endpoint = "https://192.0.2.1:6443".parse().unwrap();
        let (token, hash) = (TOKEN.parse().unwrap(), format!("sha256:{}", "0".repeat(64)).parse().unwrap());
        let request = JoinRequest { node: "n1", endpoint: &endpoint, token: &token, hash: &hash };
        let line = |step| progress_line(step, &request);
        assert_eq!(line(JoinStep::Authority), "waiting for the API server at https://192.0.2.1:6443");
        assert_eq!(line(JoinStep::Certificate), "waiting for the certificate of node n1");
    }

    #[tokio::test]
    async fn files_of_flags_that_are_too_large_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        let write =
            |text: &str, spaces: usize| std::fs::write(&path, text.to_owned() + &" ".repeat(spaces)).unwrap();
        write(TOKEN, 10);
        assert!(token(None, Some(path.as_path())).is_ok());
        write(TOKEN, 1 << 12);
        let error = format!("{:#}", token(None, Some(path.as_path())).err().unwrap());
        assert!(error.contains("larger than"), "{error}");
        write(CONFIG, 10);
        assert!(api_config(&path).await.is_ok());
        write(CONFIG, 1 << 20);
        let error = format!("{:#}", api_config(&path).await.err().unwrap());
        assert!(error.contains("larger than"), "{error}");
    }
}
