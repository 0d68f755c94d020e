//! A verifier for TLS clients that accept every certificate: probes of pods, requests to pods and nodes on behalf of
//! users, and registries with `skip_verify`. Such a connection is encrypted, but the client does not check the identity
//! of the server.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{DigitallySignedStruct, Error, SignatureScheme};

/// Accepts every certificate of a server. The handshake still proves that the server has the private key of the
/// certificate.
#[derive(Debug)]
pub struct AnyCertificate(Arc<CryptoProvider>);

// === impl AnyCertificate ===

impl AnyCertificate {
    /// A verifier that checks signatures of handshakes by the algorithms of `provider`.
    #[must_use]
    pub fn new(provider: Arc<CryptoProvider>) -> Self {
        Self(provider)
    }
}

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_certificate_of_any_content_is_accepted() {
        let verifier = AnyCertificate::new(Arc::new(rustls::crypto::ring::default_provider()));
        let name = ServerName::try_from("example.com").unwrap();
        let certificate = CertificateDer::from(vec![0]);
        let now = UnixTime::since_unix_epoch(Duration::from_secs(1));
        assert!(verifier.verify_server_cert(&certificate, &[], &name, &[], now).is_ok());
        assert!(!verifier.supported_verify_schemes().is_empty());
    }
}
