//! TLS settings for a registry: the system's authorities, read when needed, and the files of `hosts.toml`.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use coracle_any_certificate::AnyCertificate;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore};

use super::client_certificate::ClientCertificates;
use super::hosts::TlsFiles;

/// Paths of the authority bundle in distributions.
const BUNDLES: &[&str] = &[
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
];

/// Errors of setting up TLS.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TlsError {
    #[error("cannot read certificates or keys from {}", path.display())]
    Pem {
        path: PathBuf,
        #[source]
        source: pem::Error,
    },
    #[error("{} contains no certificate that is usable as an authority", path.display())]
    Authority { path: PathBuf },
    #[error("cannot use the client certificate {}", path.display())]
    Client {
        path: PathBuf,
        #[source]
        source: rustls::Error,
    },
    #[error("cannot set up TLS")]
    Setup(#[source] rustls::Error),
}

/// The TLS client configuration for one host. Without TLS no file is read.
pub(crate) fn config(files: &TlsFiles, secure: bool) -> Result<ClientConfig, TlsError> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Setup)?;
    let builder = if files.skip_verify {
        builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate::new(provider.clone())))
    } else {
        let roots = if secure { roots(&files.ca)? } else { RootCertStore::empty() };
        builder.with_root_certificates(roots)
    };
    if !secure || files.client.is_empty() {
        return Ok(builder.with_no_client_auth());
    }
    let own = files.client.iter().map(|(file, key)| certified(file, key.as_ref().unwrap_or(file), &provider));
    let own = own.collect::<Result<Vec<_>, _>>()?;
    Ok(builder.with_client_cert_resolver(Arc::new(ClientCertificates::new(own))))
}

/// A client certificate with its key.
fn certified(
    certificate: &Path,
    key_file: &Path,
    provider: &CryptoProvider,
) -> Result<CertifiedKey, TlsError> {
    let key = PrivateKeyDer::from_pem_file(key_file)
        .map_err(|source| TlsError::Pem { path: key_file.to_owned(), source })?;
    let error = |source| TlsError::Client { path: certificate.to_owned(), source };
    let chain = certificates(certificate)?;
    if chain.is_empty() {
        return Err(error(rustls::Error::NoCertificatesPresented));
    }
    CertifiedKey::from_der(chain, key, provider).map_err(error)
}

/// The system's authorities and additional authorities. Unusable certificates in the bundle are ignored. A configured
/// file must contain a usable certificate.
fn roots(more: &[PathBuf]) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    let chosen = std::env::var_os("SSL_CERT_FILE").map(PathBuf::from);
    let bundle = chosen.into_iter().chain(BUNDLES.iter().map(PathBuf::from)).find(|path| path.exists());
    if let Some(bundle) = bundle {
        store.add_parsable_certificates(certificates(&bundle)?);
    }
    for path in more {
        let (added, _) = store.add_parsable_certificates(certificates(path)?);
        if added == 0 {
            return Err(TlsError::Authority { path: path.clone() });
        }
    }
    Ok(store)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let error = |source| TlsError::Pem { path: path.to_owned(), source };
    CertificateDer::pem_file_iter(path).map_err(error)?.collect::<Result<_, _>>().map_err(error)
}
