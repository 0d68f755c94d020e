//! The cluster's authority, ready to sign what was approved.

use std::sync::Arc;
use std::time::Duration;

use rcgen::{
    CertificateParams, CertificateSigningRequestParams, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, SerialNumber, date_time_ymd,
};
use ring::rand::{SecureRandom, SystemRandom};

/// Certificates are valid from a little before, for clocks that differ.
const BACKDATE: Duration = Duration::from_secs(300);

/// Why a certificate cannot be made.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    /// Certificate or key of the authority cannot be used.
    #[error("the authority's certificate and key cannot be used")]
    Authority(#[source] rcgen::Error),
    /// The request cannot be read, or asks for extensions that are not signed here.
    #[error("the request cannot be signed")]
    Request(#[source] rcgen::Error),
    /// The kernel gives no random numbers.
    #[error("no random serial number")]
    Random,
}

/// Signs with the cluster's authority.
#[derive(Clone)]
pub struct Signer {
    authority: Arc<Issuer<'static, KeyPair>>,
    longest: Duration,
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The key is nobody's to print.
        f.debug_struct("Signer").field("longest", &self.longest).finish_non_exhaustive()
    }
}

impl Signer {
    /// From the authority's certificate and key, PEM; no certificate is valid for longer than `longest`.
    ///
    /// # Errors
    /// [`SignError::Authority`].
    pub fn new(certificate: &str, key: &str, longest: Duration) -> Result<Self, SignError> {
        let key = KeyPair::from_pem(key).map_err(SignError::Authority)?;
        let authority = Issuer::from_ca_cert_pem(certificate, key).map_err(SignError::Authority)?;
        Ok(Self { authority: Arc::new(authority), longest })
    }

    /// A certificate, PEM, for the subject, names and key of a request, for these uses, for at most as many seconds
    /// as were asked for. `now` in seconds since 1970.
    ///
    /// # Errors
    /// [`SignError::Request`].
    pub(crate) fn sign(
        &self,
        request: &[u8],
        usages: &[String],
        (asked, now): (Option<i64>, u64),
    ) -> Result<String, SignError> {
        let text = String::from_utf8_lossy(request);
        let mut request = CertificateSigningRequestParams::from_pem(&text).map_err(SignError::Request)?;
        let asked = asked.and_then(|seconds| u64::try_from(seconds).ok()).map(Duration::from_secs);
        let lasts = asked.map_or(self.longest, |asked| asked.min(self.longest));
        let params = &mut request.params;
        params.is_ca = IsCa::ExplicitNoCa;
        params.use_authority_key_identifier_extension = true;
        params.serial_number = Some(serial()?);
        params.not_before =
            date_time_ymd(1970, 1, 1) + Duration::from_secs(now).saturating_sub(BACKDATE.min(lasts / 2));
        params.not_after = date_time_ymd(1970, 1, 1) + Duration::from_secs(now) + lasts;
        set_usages(params, usages);
        Ok(request.signed_by(&self.authority).map_err(SignError::Request)?.pem())
    }
}

/// Positive, and never twice.
fn serial() -> Result<SerialNumber, SignError> {
    let mut bytes = [0; 16];
    SystemRandom::new().fill(&mut bytes).map_err(|_unspecified| SignError::Random)?;
    bytes[0] &= 0x7f;
    Ok(SerialNumber::from_slice(&bytes))
}

/// Only the uses that the signers allow can stand here.
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

    /// First and last second of a certificate, whether it is an authority, and its common name.
    fn signed(signer: &Signer, asked: Option<i64>) -> (i64, i64, bool, String) {
        let mut params = CertificateParams::default();
        // Whoever asks for an authority's certificate gets a plain one.
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, "system:node:a");
        let pem = params.serialize_request(&KeyPair::generate().unwrap()).unwrap().pem().unwrap();
        let usages = ["digital signature".to_owned(), "client auth".to_owned()];
        let certificate = signer.sign(pem.as_bytes(), &usages, (asked, 1_000_000)).unwrap();
        let (_, pem) = parse_x509_pem(certificate.as_bytes()).unwrap();
        let (_, found) = X509Certificate::from_der(&pem.contents).unwrap();
        let usage = found.extended_key_usage().unwrap().unwrap().value;
        assert!(usage.client_auth && !usage.server_auth && !usage.any);
        let name = found.subject().iter_common_name().next().unwrap().as_str().unwrap().to_owned();
        let validity = found.validity();
        (validity.not_before.timestamp(), validity.not_after.timestamp(), found.is_ca(), name)
    }

    #[test]
    fn a_certificate_says_what_was_approved_for_as_long_as_is_allowed() {
        let (from, until, is_ca, name) = signed(&signer(86400), None);
        assert_eq!((from, until, is_ca, name.as_str()), (999_700, 1_086_400, false, "system:node:a"));
        assert_eq!(signed(&signer(86400), Some(3600)).1, 1_003_600);
        assert_eq!(signed(&signer(86400), Some(864_000)).1, 1_086_400);
        assert_eq!(signed(&signer(20), None).0, 999_990);
    }

    #[test]
    fn nonsense_is_not_signed() {
        assert!(signer(60).sign(b"nonsense", &[], (None, 0)).is_err());
    }
}
