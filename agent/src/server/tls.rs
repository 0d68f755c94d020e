//! TLS configuration of the kubelet API: the serving certificate and the CA of clients.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoClientAuth, WebPkiClientVerifier};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::config::{Certificate, ServerConfig, ServerError};
use crate::certificate_files::CertificateFiles;

/// The TLS configuration. A client without a certificate is accepted: it may have a token.
pub(super) fn config(config: &ServerConfig) -> Result<rustls::ServerConfig, ServerError> {
    let provider = config.tls.provider().map_err(|error| failed(Path::new("TLS"), error))?;
    let provider = Arc::new(provider);
    let clients: Arc<dyn ClientCertVerifier> = match &config.client_ca {
        Some(path) => client_verifier(path, &provider)?,
        None => Arc::new(NoClientAuth),
    };
    let builder = rustls::ServerConfig::builder_with_provider(provider);
    let builder = builder.with_protocol_versions(config.tls.versions());
    let builder =
        builder.map_err(|error| failed(Path::new("TLS"), error))?.with_client_cert_verifier(clients);
    let mut tls = match &config.certificate {
        Certificate::Files(CertificateFiles { certificate, key }) => {
            let read = PrivateKeyDer::from_pem_file(key).map_err(|error| failed(key, error))?;
            let chain = certificates(certificate)?;
            builder.with_single_cert(chain, read).map_err(|error| failed(certificate, error))?
        }
        Certificate::Current(resolver) => builder.with_cert_resolver(resolver.clone()),
    };
    // Streams upgrade their connection, which this server supports in HTTP/1.1 only.
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(tls)
}

/// A verifier of client certificates that the CAs in a file have signed.
fn client_verifier(
    path: &Path,
    provider: &Arc<CryptoProvider>,
) -> Result<Arc<dyn ClientCertVerifier>, ServerError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path)? {
        roots.add(certificate).map_err(|error| failed(path, error))?;
    }
    WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone())
        .allow_unauthenticated()
        .build()
        .map_err(|error| failed(path, error))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ServerError> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let found = read.map_err(|error| failed(path, error))?;
    if found.is_empty() { Err(failed(path, "the file has no certificate")) } else { Ok(found) }
}

fn failed(path: &Path, reason: impl Display) -> ServerError {
    ServerError::Certificate { path: path.to_owned(), reason: reason.to_string() }
}
