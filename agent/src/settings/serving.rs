//! How the kubelet API of an agent with a kubeconfig proves itself.

use std::path::{Path, PathBuf};

use super::{NodeSettings, absolute};

/// How the kubelet API of an agent with a kubeconfig proves itself, and whose certificates it accepts.
#[derive(Clone, Debug)]
pub(crate) struct Serving {
    /// Certificate and key.
    pub(crate) files: Option<(PathBuf, PathBuf)>,
    /// Request one from the cluster.
    pub(crate) bootstrap: bool,
    /// Where the node keeps its own.
    pub(crate) cert_dir: PathBuf,
    pub(crate) client_ca: Option<PathBuf>,
}

// === impl Serving ===

impl Serving {
    /// Decides, for a node with this state directory.
    pub(super) fn decide(node: &NodeSettings, state: &Path) -> anyhow::Result<Self> {
        let files = match (node.tls_cert_file.clone(), node.tls_private_key_file.clone()) {
            (Some(certificate), Some(key)) => Some((certificate, key)),
            (None, None) => None,
            _ => anyhow::bail!("tls-cert-file and tls-private-key-file go together: set both or none"),
        };
        let bootstrap = node.server_tls_bootstrap.unwrap_or(false);
        if bootstrap && files.is_some() {
            anyhow::bail!(
                "server-tls-bootstrap requests a certificate: it cannot be set together with tls-cert-file"
            );
        }
        let cert_dir = node.cert_dir.clone().unwrap_or_else(|| state.join("agent/pki"));
        Ok(Self { files, bootstrap, cert_dir: absolute(cert_dir)?, client_ca: node.client_ca_file.clone() })
    }
}
