//! Verification of a server's certificate with a bundle of certificates, such as the `caBundle` of a webhook.
//!
//! As in Go, the bundle may contain the server's own certificate. That certificate may be marked as an authority, which
//! is the default of `openssl req -x509`. The WebPKI rules alone would refuse an authority as a server certificate.

use std::sync::{Arc, OnceLock};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use rustls::{
    CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::CryptoProvider,
    server::ParsedCertificate,
};
use rustls_pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject as _};

/// Accepts certificates of the bundle, and certificates that an authority of the bundle signed.
#[derive(Debug)]
pub(crate) struct BundleVerifier {
    certificates: Vec<CertificateDer<'static>>,
    web: Arc<WebPkiServerVerifier>,
}

// === impl BundleVerifier ===

impl BundleVerifier {
    /// Reads an optional `caBundle`. Without a bundle, the authorities of the machine are trusted, as upstream.
    ///
    /// # Errors
    /// As [`read`](Self::read), or the machine has no authorities.
    pub(crate) fn of(bundle: &str, provider: Arc<CryptoProvider>) -> Result<Self, String> {
        if bundle.is_empty() {
            return Self::of_roots(machine_roots(), provider);
        }
        Self::read(bundle, provider)
    }

    /// Trusts the authorities of the machine.
    fn of_roots(roots: Arc<RootCertStore>, provider: Arc<CryptoProvider>) -> Result<Self, String> {
        let web = WebPkiServerVerifier::builder_with_provider(roots, provider).build();
        let web = web.map_err(|error| {
            format!("caBundle is not set, and the authorities of the machine cannot be used: {error}")
        })?;
        Ok(Self { certificates: Vec::new(), web })
    }

    /// Reads a `caBundle`: PEM in base64.
    ///
    /// # Errors
    /// The bundle is not PEM in base64, or contains no certificate, or an invalid certificate.
    pub(crate) fn read(bundle: &str, provider: Arc<CryptoProvider>) -> Result<Self, String> {
        let pem =
            BASE64_STANDARD.decode(bundle).map_err(|error| format!("caBundle is not base64: {error}"))?;
        let certificates: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
        let certificates = certificates.map_err(|error| format!("caBundle is not PEM: {error}"))?;
        let mut roots = RootCertStore::empty();
        for certificate in &certificates {
            roots
                .add(certificate.clone())
                .map_err(|error| format!("caBundle has an invalid certificate: {error}"))?;
        }
        let web = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider)
            .build()
            .map_err(|error| format!("caBundle cannot be used: {error}"))?;
        Ok(Self { certificates, web })
    }
}

impl ServerCertVerifier for BundleVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.web.verify_server_cert(end_entity, intermediates, name, ocsp, now) {
            Err(_) if self.certificates.iter().any(|known| known.as_ref() == end_entity.as_ref()) => {
                verify_known(end_entity, name, now)
            }
            verdict => verdict,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.web.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.web.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.web.supported_verify_schemes()
    }
}

/// The authorities of the machine. They are read once, at the first use.
fn machine_roots() -> Arc<RootCertStore> {
    static ROOTS: OnceLock<Arc<RootCertStore>> = OnceLock::new();
    let read = || {
        let mut roots = RootCertStore::empty();
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        Arc::new(roots)
    };
    ROOTS.get_or_init(read).clone()
}

/// Verifies a certificate that is itself in the bundle: its name, validity and purpose.
fn verify_known(
    end_entity: &CertificateDer<'_>,
    name: &ServerName<'_>,
    now: UnixTime,
) -> Result<ServerCertVerified, Error> {
    verify_server_name(&ParsedCertificate::try_from(end_entity)?, name)?;
    let (_, certificate) = x509_parser::parse_x509_certificate(end_entity)
        .map_err(|_error| Error::InvalidCertificate(CertificateError::BadEncoding))?;
    let (now, dates) = (i64::try_from(now.as_secs()).unwrap_or(i64::MAX), certificate.validity());
    if now < dates.not_before.timestamp() {
        return Err(Error::InvalidCertificate(CertificateError::NotValidYet));
    }
    if now > dates.not_after.timestamp() {
        return Err(Error::InvalidCertificate(CertificateError::Expired));
    }
    match certificate.extended_key_usage() {
        Ok(Some(usage)) if !usage.value.any && !usage.value.server_auth => {
            Err(Error::InvalidCertificate(CertificateError::InvalidPurpose))
        }
        Ok(_) => Ok(ServerCertVerified::assertion()),
        Err(_) => Err(Error::InvalidCertificate(CertificateError::BadEncoding)),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rcgen::{BasicConstraints, CertificateParams, ExtendedKeyUsagePurpose, IsCa, KeyPair};

    use super::*;

    const NOW: u64 = 1_800_000_000;

    /// A self-signed authority for `hook.far.svc`.
    fn authority(change: impl FnOnce(&mut CertificateParams)) -> rcgen::Certificate {
        let mut params = CertificateParams::new(vec!["hook.far.svc".to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        change(&mut params);
        params.self_signed(&KeyPair::generate().unwrap()).unwrap()
    }

    fn verdict(bundle: &rcgen::Certificate, shown: &rcgen::Certificate, name: &str) -> Result<(), Error> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let verifier = BundleVerifier::read(&BASE64_STANDARD.encode(bundle.pem()), provider).unwrap();
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(NOW));
        verifier.verify_server_cert(shown.der(), &[], &name, &[], now).map(drop)
    }

    #[test]
    fn an_authority_is_the_certificate_of_a_server_if_the_bundle_has_it() {
        let own = authority(|_| ());
        assert_eq!(verdict(&own, &own, "hook.far.svc"), Ok(()));
        assert!(verdict(&own, &own, "other.far.svc").is_err());
        assert!(verdict(&own, &authority(|_| ()), "hook.far.svc").is_err());
    }

    #[test]
    fn dates_and_purposes_of_such_a_certificate_are_checked() {
        let old = authority(|params| params.not_after = rcgen::date_time_ymd(2020, 1, 1));
        let invalid = |error| Err(Error::InvalidCertificate(error));
        assert_eq!(verdict(&old, &old, "hook.far.svc"), invalid(CertificateError::Expired));
        let early = authority(|params| params.not_before = rcgen::date_time_ymd(2100, 1, 1));
        assert_eq!(verdict(&early, &early, "hook.far.svc"), invalid(CertificateError::NotValidYet));
        let usages = |usage| authority(|params| params.extended_key_usages = vec![usage]);
        let client = usages(ExtendedKeyUsagePurpose::ClientAuth);
        assert_eq!(verdict(&client, &client, "hook.far.svc"), invalid(CertificateError::InvalidPurpose));
        let server = usages(ExtendedKeyUsagePurpose::ServerAuth);
        assert_eq!(verdict(&server, &server, "hook.far.svc"), Ok(()));
    }

    #[test]
    fn without_a_bundle_the_authorities_of_the_machine_are_trusted() {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let params = CertificateParams::new(vec!["hook.example".to_owned()]).unwrap();
        let certificate = params.self_signed(&KeyPair::generate().unwrap()).unwrap();
        let mut roots = RootCertStore::empty();
        roots.add(certificate.der().clone()).unwrap();
        let verifier = BundleVerifier::of_roots(Arc::new(roots), provider.clone()).unwrap();
        let name = ServerName::try_from("hook.example").unwrap();
        let now = UnixTime::since_unix_epoch(Duration::from_secs(NOW));
        let verdict =
            |shown: &rcgen::Certificate| verifier.verify_server_cert(shown.der(), &[], &name, &[], now);
        assert!(verdict(&certificate).is_ok());
        assert!(verdict(&authority(|_| ())).is_err());
        let none = BundleVerifier::of_roots(Arc::new(RootCertStore::empty()), provider.clone());
        assert!(none.unwrap_err().starts_with("caBundle is not set"));
        // The result depends on the machine, but it is not the error of an invalid bundle.
        let own = BundleVerifier::of("", provider).err().unwrap_or_default();
        assert!(own.is_empty() || own.starts_with("caBundle is not set"), "{own}");
    }

    #[test]
    fn a_bundle_without_a_certificate_is_refused() {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        assert!(BundleVerifier::read("", provider.clone()).is_err());
        assert!(BundleVerifier::read("%", provider).is_err());
    }
}
