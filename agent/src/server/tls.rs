//! TLS for the API: our certificate, and the CA that callers must come from.

use std::fmt::Display;
use std::path::Path;
use std::sync::Arc;

use rustls::RootCertStore;
use rustls::crypto::CryptoProvider;
use rustls::server::danger::ClientCertVerifier;
use rustls::server::{NoClientAuth, WebPkiClientVerifier};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use super::{Certificate, ServerConfig, ServerError};

/// A caller without a certificate is let in as nobody, so that `/healthz` can answer.
pub(super) fn config(config: &ServerConfig) -> Result<rustls::ServerConfig, ServerError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let clients: Arc<dyn ClientCertVerifier> = match &config.client_ca {
        Some(path) => clients_of(path, &provider)?,
        None => Arc::new(NoClientAuth),
    };
    let builder = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder =
        builder.map_err(|error| failed(Path::new("TLS"), error))?.with_client_cert_verifier(clients);
    let mut tls = match &config.certificate {
        Certificate::Files(certificate, key) => {
            let read = PrivateKeyDer::from_pem_file(key).map_err(|error| failed(key, error))?;
            let chain = certificates(certificate)?;
            builder.with_single_cert(chain, read).map_err(|error| failed(certificate, error))?
        }
        Certificate::Current(resolver) => builder.with_cert_resolver(resolver.clone()),
    };
    // Streams upgrade their connection, which HTTP/2 has no way for here.
    tls.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(tls)
}

/// Accepts certificates of the authorities in a file.
fn clients_of(
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
    if found.is_empty() { Err(failed(path, "no certificate in it")) } else { Ok(found) }
}

fn failed(path: &Path, reason: impl Display) -> ServerError {
    ServerError::Certificate { path: path.to_owned(), reason: reason.to_string() }
}
