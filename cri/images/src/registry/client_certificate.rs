//! Selects the client certificate that a registry's authorities accept.

use std::sync::Arc;

use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::sign::CertifiedKey;
use x509_parser::parse_x509_certificate;

/// All client certificates of a host, in the order of its settings.
#[derive(Debug)]
pub(super) struct ClientCertificates(Vec<Arc<CertifiedKey>>);

// === impl ClientCertificates ===

impl ClientCertificates {
    pub(super) fn new(certificates: impl IntoIterator<Item = CertifiedKey>) -> ClientCertificates {
        ClientCertificates(certificates.into_iter().map(Arc::new).collect())
    }
}

impl ResolvesClientCert for ClientCertificates {
    /// The first certificate that was issued by an authority in the server's list (RFC 8446, 4.2.4). If there is no
    /// such certificate, the first certificate with a supported signature: some servers list too few authorities, and
    /// without a certificate the server would refuse the client anyway.
    fn resolve(
        &self,
        root_hint_subjects: &[&[u8]],
        sigschemes: &[SignatureScheme],
    ) -> Option<Arc<CertifiedKey>> {
        let mut checkable = self.0.iter().filter(|one| one.key.choose_scheme(sigschemes).is_some());
        let issued_by_authority = checkable.clone().find(|one| is_issued_by(one, root_hint_subjects));
        issued_by_authority.or_else(|| checkable.next()).cloned()
    }

    fn has_certs(&self) -> bool {
        !self.0.is_empty()
    }
}

/// Whether one of these authorities issued a certificate of the chain.
fn is_issued_by(certificate: &CertifiedKey, authorities: &[&[u8]]) -> bool {
    certificate.cert.iter().any(|link| {
        let parsed = parse_x509_certificate(link);
        parsed.is_ok_and(|(_, link)| authorities.contains(&link.tbs_certificate.issuer.as_raw()))
    })
}
