//! The certificate, the TLS options and the handlers of the kubelet API.

use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::ValueEnum;
use coracle_agent::{ApiHandlers, CertificateFiles, TlsOptions};

use super::value::choices;
use super::{NodeSettings, absolute};

/// Checked settings of the kubelet API: its certificate, the CA of its clients, TLS and handlers.
#[derive(Clone, Debug)]
pub(crate) struct Serving {
    /// Certificate and key that the administrator provides.
    pub(crate) files: Option<CertificateFiles>,
    /// Whether to request a certificate from the cluster.
    pub(crate) bootstrap: bool,
    /// Directory of certificates that the node makes or requests.
    pub(crate) cert_dir: PathBuf,
    pub(crate) client_ca: Option<PathBuf>,
    pub(crate) tls: TlsOptions,
    /// Enabled handlers of the kubelet API.
    pub(crate) handlers: ApiHandlers,
    /// Whether the client certificate must be renewed before it expires.
    pub(crate) rotates: bool,
}

/// Minimum version of TLS, by upstream's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum TlsVersion {
    #[value(name = "VersionTLS12")]
    Tls12,
    #[value(name = "VersionTLS13")]
    Tls13,
}

choices!(TlsVersion);

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
        let tls = TlsOptions {
            requires_tls13: node.kubelet_tls_min_version == TlsVersion::Tls13,
            cipher_suites: node.kubelet_tls_cipher_suites.clone(),
        };
        tls.check().map_err(anyhow::Error::msg).context("kubelet-tls-cipher-suites")?;
        let cert_dir = node.cert_dir.clone().unwrap_or_else(|| state.join("agent/pki"));
        Ok(Self {
            files,
            bootstrap,
            cert_dir: absolute(&cert_dir)?,
            client_ca: node.client_ca_file.clone(),
            tls,
            handlers: ApiHandlers {
                debugging: node.enable_debugging_handlers,
                system_log: node.enable_system_log_handler,
            },
            rotates: node.rotate_certificates,
        })
    }
}
