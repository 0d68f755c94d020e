//! The signer: makes certificates with the cluster's CA.

use std::sync::Arc;
use std::time::Duration;

use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SanType, SerialNumber, SubjectPublicKeyInfo, date_time_ymd,
};
use ring::rand::{SecureRandom, SystemRandom};

use crate::certificate::RequestedCertificate;

/// Time between the start of a certificate's validity and its signing, because clocks differ.
const BACKDATE: Duration = Duration::from_secs(300);

/// A certificate could not be made.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// The CA's certificate or key is invalid.
    #[error("cannot use the authority's certificate and key")]
    Authority(#[source] rcgen::Error),
    /// The request has an unsupported key or unsupported names.
    #[error("cannot sign the certificate request")]
    Request(#[source] rcgen::Error),
    /// The kernel returned no random numbers.
    #[error("cannot generate a serial number")]
    Random,
}

/// A signer with the cluster's CA.
#[derive(Clone)]
pub struct Signer {
    authority: Arc<Issuer<'static, KeyPair>>,
    longest: Duration,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key must not be printed.
        f.debug_struct("Signer").field("longest", &self.longest).finish_non_exhaustive()
    }
}

impl Signer {
    /// Makes a signer from the CA's certificate and key in PEM. No certificate is valid for longer than `longest`.
    ///
    /// # Errors
    /// [`SignError::Authority`].
    pub fn new(certificate: &str, key: &str, longest: Duration) -> Result<Self, SignError> {
        let key = KeyPair::from_pem(key).map_err(SignError::Authority)?;
        let authority = Issuer::from_ca_cert_pem(certificate, key).map_err(SignError::Authority)?;
        Ok(Self { authority: Arc::new(authority), longest })
    }

    /// Signs a certificate and returns it in PEM. The certificate has the checked subject, names and key, and these
    /// usages. No other field is copied from the request. The certificate is valid for at most `seconds`. `now` is in
    /// seconds since 1970.
    ///
    /// # Errors
    /// [`SignError::Request`].
    pub(crate) fn sign(
        &self,
        requested: &RequestedCertificate,
        usages: &[String],
        seconds: Option<i64>,
        now: u64,
    ) -> Result<String, SignError> {
        let key = SubjectPublicKeyInfo::from_der(&requested.key).map_err(SignError::Request)?;
        let seconds = seconds.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs);
        let lasts = seconds.map_or(self.longest, |seconds| seconds.min(self.longest));
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        for organization in &requested.organizations {
            params.distinguished_name.push(DnType::OrganizationName, organization.as_str());
        }
        params.distinguished_name.push(DnType::CommonName, requested.common_name.as_str());
        params.subject_alt_names = alternative_names(requested).map_err(SignError::Request)?;
        params.is_ca = IsCa::ExplicitNoCa;
        params.use_authority_key_identifier_extension = true;
        params.serial_number = Some(serial()?);
        params.not_before =
            date_time_ymd(1970, 1, 1) + Duration::from_secs(now).saturating_sub(BACKDATE.min(lasts / 2));
        params.not_after = date_time_ymd(1970, 1, 1) + Duration::from_secs(now) + lasts;
        set_usages(&mut params, usages);
        Ok(params.signed_by(&key, &*self.authority).map_err(SignError::Request)?.pem())
    }
}

fn alternative_names(requested: &RequestedCertificate) -> Result<Vec<SanType>, rcgen::Error> {
    let mut names = Vec::new();
    for name in &requested.dns {
        names.push(SanType::DnsName(name.as_str().try_into()?));
    }
    for mail in &requested.mails {
        names.push(SanType::Rfc822Name(mail.as_str().try_into()?));
    }
    for uri in &requested.uris {
        names.push(SanType::URI(uri.as_str().try_into()?));
    }
    names.extend(requested.addresses.iter().copied().map(SanType::IpAddress));
    Ok(names)
}

/// A random positive serial number.
fn serial() -> Result<SerialNumber, SignError> {
    let mut bytes = [0; 16];
    SystemRandom::new().fill(&mut bytes).map_err(|_unspecified| SignError::Random)?;
    bytes[0] &= 0x7f;
    Ok(SerialNumber::from_slice(&bytes))
}

/// Sets the usages. `usages` contains only usages that the signers allow.
fn set_usages(params: &mut CertificateParams, usages: &[String]) {
    params.key_usages = Vec::new();
    params.extended_key_usages = Vec::new();
    for usage in usages {
        match usage.as_str() {
            "digital signature" => params.key_usages.push(KeyUsagePurpose::DigitalSignature),
            "key encipherment" => params.key_usages.push(KeyUsagePurpose::KeyEncipherment),
            "client auth" => params.extended_key_usages.push(ExtendedKeyUsagePurpose::ClientAuth),
            "server auth" => params.extended_key_usages.push(ExtendedKeyUsagePurpose::ServerAuth),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{BasicConstraints, DnType};
    use x509_parser::pem::parse_x509_pem;
    use x509_parser::prelude::{FromDer, X509Certificate};

    fn signer(seconds: u64) -> Signer {
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).unwrap();
        Signer::new(&certificate.pem(), &key.serialize_pem(), Duration::from_secs(seconds)).unwrap()
    }

    fn requested(params: &CertificateParams) -> RequestedCertificate {
        let pem = params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();
        RequestedCertificate::read(pem.as_bytes()).unwrap()
    }

    /// First and last second of a certificate, whether it is an authority, its subject and its names.
    fn signed(signer: &Signer, seconds: Option<i64>) -> (i64, i64, bool, String, usize) {
        let mut params = CertificateParams::default();
        // A request for a CA certificate with other usages gets an ordinary certificate.
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::Any, ExtendedKeyUsagePurpose::ServerAuth];
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, "system:nodes");
        params.distinguished_name.push(DnType::CommonName, "system:node:a");
        params.subject_alt_names = vec![SanType::DnsName("a".try_into().unwrap())];
        let usages = ["digital signature".to_owned(), "client auth".to_owned()];
        let certificate = signer.sign(&requested(&params), &usages, seconds, 1_000_000).unwrap();
        let (_, pem) = parse_x509_pem(certificate.as_bytes()).unwrap();
        let (_, found) = X509Certificate::from_der(&pem.contents).unwrap();
        let usage = found.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.client_auth && !usage.server_auth && !usage.any);
        let usage = found.key_usage().unwrap().unwrap().value;
        assert!(usage.digital_signature() && !usage.key_cert_sign());
        let names = found.subject_alternative_name().unwrap().unwrap().value.general_names.len();
        let validity = found.validity();
        let span = (validity.not_before.timestamp(), validity.not_after.timestamp());
        (span.0, span.1, found.is_ca(), found.subject().to_string(), names)
    }

    #[test]
    fn a_certificate_has_the_approved_content_and_the_allowed_validity() {
        let (from, until, is_ca, name, names) = signed(&signer(86400), None);
        assert_eq!((from, until, is_ca), (999_700, 1_086_400, false));
        assert_eq!((name.as_str(), names), ("O=system:nodes, CN=system:node:a", 1));
        assert_eq!(signed(&signer(86400), Some(3600)).1, 1_003_600);
        assert_eq!(signed(&signer(86400), Some(864_000)).1, 1_086_400);
        assert_eq!(signed(&signer(20), None).0, 999_990);
    }

    #[test]
    fn all_allowed_types_of_keys_and_names_are_signed() {
        let mut params = CertificateParams::new(vec!["a".to_owned(), "192.0.2.1".to_owned()]).unwrap();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, "ann");
        params.subject_alt_names.push(SanType::Rfc822Name("ann@example.com".try_into().unwrap()));
        params.subject_alt_names.push(SanType::URI("spiffe://example.com/ann".try_into().unwrap()));
        for kind in [&rcgen::PKCS_ECDSA_P256_SHA256, &rcgen::PKCS_ECDSA_P384_SHA384, &rcgen::PKCS_ED25519] {
            let key = KeyPair::generate_for(kind).unwrap();
            let pem = params.serialize_request(&key).unwrap().pem().unwrap();
            let requested = RequestedCertificate::read(pem.as_bytes()).unwrap();
            let certificate = signer(60).sign(&requested, &[], None, 1_000_000).unwrap();
            let (_, pem) = parse_x509_pem(certificate.as_bytes()).unwrap();
            let (_, found) = X509Certificate::from_der(&pem.contents).unwrap();
            assert_eq!(found.public_key().raw, requested.key);
            let names = found.subject_alternative_name().unwrap().unwrap().value.general_names.clone();
            assert_eq!(names.len(), 4);
        }
    }

    #[test]
    fn nonsense_is_not_signed() {
        assert!(signer(60).sign(&RequestedCertificate::default(), &[], None, 0).is_err());
    }
}
