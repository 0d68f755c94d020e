//! Configuration of the kubelet API, and errors at its start.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::server::ResolvesServerCert;

use crate::api_handlers::ApiHandlers;
use crate::certificate_files::CertificateFiles;
use crate::tls_options::TlsOptions;

/// Configuration of the server of the kubelet API.
#[derive(Clone, Debug)]
pub struct ServerConfig {
    /// Address and port, usually port 10250.
    pub listen: SocketAddr,
    /// The serving certificate.
    pub certificate: Certificate,
    /// The CA of client certificates. None if no client certificate is accepted.
    pub client_ca: Option<PathBuf>,
    /// TLS versions and cipher suites.
    pub tls: TlsOptions,
    /// Enabled handlers.
    pub handlers: ApiHandlers,
}

/// The serving certificate of the kubelet API.
#[derive(Clone, Debug)]
pub enum Certificate {
    /// Files that are read at the start.
    Files(CertificateFiles),
    /// A resolver that returns the certificate for each handshake.
    Current(Arc<dyn ResolvesServerCert>),
}

/// Errors at the start of the kubelet API.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    /// The port is in use, or the address is not of this machine.
    #[error("cannot listen on {address} for the kubelet API; --kubelet-listen sets another address")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// Cause.
        #[source]
        source: std::io::Error,
    },
    /// A certificate or key file is unusable.
    #[error("cannot use {path} for the kubelet API: {reason}")]
    Certificate {
        /// The file.
        path: PathBuf,
        /// Cause.
        reason: String,
    },
}
