//! `coracle agent`: the node alone, for a control plane elsewhere.

use std::path::PathBuf;

use anyhow::Context;
use kube::config::{KubeConfigOptions, Kubeconfig};

use crate::lock::Lock;
use crate::settings::Settings;

/// Runs until SIGINT or SIGTERM.
pub(crate) async fn run(settings: Settings, kubeconfig: PathBuf) -> anyhow::Result<()> {
    super::require_root()?;
    let node = settings.node()?;
    let credentials = node.credentials.clone().context(
        "an agent on its own needs --tls-cert-file, --tls-private-key-file and --client-ca-file; \
         `coracle controlplane --issue-node NAME` writes them",
    )?;
    let _lock = Lock::take(&node.dirs.run)?;
    let file = Kubeconfig::read_from(&kubeconfig)
        .with_context(|| format!("cannot read the kubeconfig {}", kubeconfig.display()))?;
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .with_context(|| format!("{} names no usable cluster and user", kubeconfig.display()))?;
    let client = kube::Client::try_from(config).context("cannot make an API client")?;
    super::node::run(node, credentials, client, super::until_signalled()?).await
}
