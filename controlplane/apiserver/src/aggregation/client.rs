//! The TLS client of aggregated servers.

use std::sync::Arc;

use coracle_any_certificate::AnyCertificate;
use rustls::{client::danger::ServerCertVerifier, crypto::CryptoProvider};
use rustls_pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};
use serde_json::Value;

use crate::bundle_verifier::BundleVerifier;

/// The client identity of this server for aggregated servers, in PEM.
#[derive(Clone, Default)]
pub struct FrontProxy {
    /// Client certificate. Its common name is `front-proxy-client`.
    pub certificate: String,
    /// Private key of the certificate.
    pub key: String,
    /// The authority that signed the certificate. The authority must sign no other certificates.
    pub authority: String,
    /// The authority for client certificates of the cluster.
    pub client_authority: String,
}

/// The TLS configuration of an API service.
pub(super) fn tls(proxy: &FrontProxy, spec: &Value) -> Result<Arc<rustls::ClientConfig>, String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider.clone())
        .with_safe_default_protocol_versions()
        .map_err(|error| error.to_string())?;
    let builder = builder.dangerous().with_custom_certificate_verifier(verifier(spec, provider)?);
    if proxy.certificate.is_empty() {
        return Ok(Arc::new(builder.with_no_client_auth()));
    }
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(proxy.certificate.as_bytes()).collect();
    let chain = chain.map_err(|error| format!("the front proxy's certificate is not PEM: {error}"))?;
    let key = PrivateKeyDer::from_pem_slice(proxy.key.as_bytes())
        .map_err(|error| format!("the front proxy's key is not PEM: {error}"))?;
    let config = builder.with_client_auth_cert(chain, key).map_err(|error| error.to_string())?;
    Ok(Arc::new(config))
}

fn verifier(spec: &Value, provider: Arc<CryptoProvider>) -> Result<Arc<dyn ServerCertVerifier>, String> {
    if spec["insecureSkipTLSVerify"] == true {
        return Ok(Arc::new(AnyCertificate::new(provider)));
    }
    let bundle = spec["caBundle"].as_str().unwrap_or_default();
    Ok(Arc::new(BundleVerifier::of(bundle, provider)?))
}
