//! TLS configuration from certificates. Only ring is used, so that a static build needs no second C toolchain.

use std::{path::PathBuf, sync::Arc};

use rustls::{
    ClientConfig, RootCertStore, ServerConfig, SupportedProtocolVersion,
    crypto::{CryptoProvider, ring},
    server::{ResolvesServerCert, WebPkiClientVerifier},
};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};

use crate::pki::Pair;

/// A certificate cannot be used for TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The text is not PEM.
    #[error("cannot read a certificate or key: it is not in PEM form")]
    Pem(#[source] rustls_pki_types::pem::Error),
    /// rustls refuses a certificate, a key or the versions of TLS.
    #[error("cannot use a certificate with its key")]
    Rustls(#[source] rustls::Error),
    /// A file cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: std::io::Error,
    },
    /// The files of a certificate and its key cannot be used.
    #[error("cannot use the serving certificate {path}")]
    Files {
        /// The file of the certificate.
        path: PathBuf,
        /// The cause.
        #[source]
        source: Box<TlsError>,
    },
    /// A version or cipher suite is unknown.
    #[error("cannot use the TLS settings: {0}")]
    Options(String),
    /// The CA cannot be used to verify client certificates.
    #[error("cannot verify client certificates with the CA")]
    Verifier(#[source] rustls::server::VerifierBuilderError),
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn roots(authority: &str) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
        roots.add(certificate.map_err(TlsError::Pem)?).map_err(TlsError::Rustls)?;
    }
    Ok(roots)
}

pub(crate) type Chain = (Vec<CertificateDer<'static>>, PrivateKeyDer<'static>);

/// Parses a certificate chain and its key, both in PEM form.
pub(crate) fn chain(certificate: &str, key: &str) -> Result<Chain, TlsError> {
    let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(certificate.as_bytes()).collect();
    let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).map_err(TlsError::Pem)?;
    Ok((certificates.map_err(TlsError::Pem)?, key))
}

/// The API server's configuration: client certificates are optional and must be signed by the CA.
pub(crate) fn server(
    certificates: Arc<dyn ResolvesServerCert>,
    authority: &str,
    cryptography: CryptoProvider,
    versions: &[&'static SupportedProtocolVersion],
) -> Result<Arc<ServerConfig>, TlsError> {
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(authority)?), provider())
        .allow_unauthenticated()
        .build()
        .map_err(TlsError::Verifier)?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(cryptography))
        .with_protocol_versions(versions)
        .map_err(TlsError::Rustls)?
        .with_client_cert_verifier(verifier)
        .with_cert_resolver(certificates);
    // WebSocket upgrades need HTTP/1.1.
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// A client's configuration, for servers with certificates of the CA.
pub(crate) fn client(pair: &Pair, authority: &str) -> Result<Arc<ClientConfig>, TlsError> {
    let (certificates, key) = chain(&pair.certificate, &pair.key)?;
    let mut config = ClientConfig::builder_with_provider(provider())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Rustls)?
        .with_root_certificates(roots(authority)?)
        .with_client_auth_cert(certificates, key)
        .map_err(TlsError::Rustls)?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
