//! The certificate of the kubelet API, for an agent with a kubeconfig.

use std::path::{Path, PathBuf};

use coracle_agent::CertificateFiles;

use super::{NodeSettings, absolute};

/// The certificate of the kubelet API, and the CA of its clients.
#[derive(Clone, Debug)]
pub(crate) struct Serving {
    /// Certificate and key that the administrator provides.
    pub(crate) files: Option<CertificateFiles>,
    /// Whether to request a certificate from the cluster.
    pub(crate) bootstrap: bool,
    /// Directory of certificates that the node makes or requests.
    pub(crate) cert_dir: PathBuf,
    pub(crate) client_ca: Option<PathBuf>,
}

// === impl Serving ===

impl Serving {
    /// Checks the settings of a node with this state directory.
    pub(super) fn decide(node: &NodeSettings, state: &Path) -> anyhow::Result<Self> {
        let files = match (node.tls_cert_file.clone(), node.tls_private_key_file.clone()) {
            (Some(certificate), Some(key)) => Some(CertificateFiles { certificate, key }),
            (None, None) => None,
            _ => anyhow::bail!("only one of tls-cert-file and tls-private-key-file is set: set both or none"),
        };
        let bootstrap = node.server_tls_bootstrap;
        if bootstrap && files.is_some() {
            anyhow::bail!(
                "server-tls-bootstrap and tls-cert-file are both set: the first requests a certificate, the second names \
                 one; use only one of them"
            );
        }
        let cert_dir = node.cert_dir.clone().unwrap_or_else(|| state.join("agent/pki"));
        Ok(Self { files, bootstrap, cert_dir: absolute(&cert_dir)?, client_ca: node.client_ca_file.clone() })
    }
}
