//! Functions that the fuzz targets of `integration/fuzz` call, and the test that replays their corpora with a stable
//! compiler.

use std::{sync::LazyLock, time::Duration};

use coracle_certificate_subject::Subject;
use rcgen::{BasicConstraints, CertificateParams, IsCa, KeyPair};
use x509_parser::{
    certificate::X509Certificate, certification_request::X509CertificationRequest, pem::parse_x509_pem,
    prelude::FromDer as _,
};

use crate::{
    certificate::{CLIENT, NODE_CLIENT, NODE_SERVING, RequestedCertificate},
    certificate_signer::Signer,
};

/// Checks the signers with one certificate request in DER. If a signer may sign the request, the certificate has the
/// checked subject. An invalid signature is ignored, because the fuzzer cannot sign the requests that it generates.
///
/// # Panics
/// The certificate has another subject, or its subject is in the administrators' group.
pub fn signer(data: &[u8]) {
    let Ok((_, request)) = X509CertificationRequest::from_der(data) else { return };
    let _is_signed = request.verify_signature();
    let Ok(requested) = RequestedCertificate::unverified(&request) else { return };
    for (signer, usages) in [
        (CLIENT, &["client auth"][..]),
        (NODE_CLIENT, &["digital signature", "client auth"][..]),
        (NODE_SERVING, &["digital signature", "server auth"][..]),
    ] {
        let usages: Vec<String> = usages.iter().map(|usage| (*usage).to_owned()).collect();
        if requested.refusal(signer, &usages).is_some() {
            continue;
        }
        // The signer does not support some types of keys and names.
        let Some(certificate) = signed(&requested, &usages) else { continue };
        let Some(subject) = subject(&certificate) else { panic!("not a certificate: {certificate}") };
        assert!(!subject.organizations.iter().any(|group| group == "system:masters"), "{subject:?}");
        assert_eq!(subject.common_name, requested.common_name);
        assert_eq!(subject.organizations, requested.organizations);
    }
}

/// A certificate of a new CA.
fn signed(requested: &RequestedCertificate, usages: &[String]) -> Option<String> {
    static SIGNER: LazyLock<Option<Signer>> = LazyLock::new(|| {
        let key = KeyPair::generate().ok()?;
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let certificate = params.self_signed(&key).ok()?;
        Signer::new(&certificate.pem(), &key.serialize_pem(), Duration::from_secs(60)).ok()
    });
    LazyLock::force(&SIGNER).as_ref()?.sign(requested, usages, None, 1_000_000).ok()
}

/// The subject of a certificate in PEM.
fn subject(certificate: &str) -> Option<Subject> {
    let (_, pem) = parse_x509_pem(certificate.as_bytes()).ok()?;
    let (_, certificate) = X509Certificate::from_der(&pem.contents).ok()?;
    Subject::read(certificate.subject()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_corpus_is_replayed() {
        coracle_testing::replay_corpus("signer", signer);
    }

    #[test]
    fn the_requests_of_the_corpus_are_signed() {
        for input in coracle_testing::corpus("signer") {
            let request = std::fs::read(&input).unwrap();
            let (_, request) = X509CertificationRequest::from_der(&request).unwrap();
            let requested = RequestedCertificate::unverified(&request).unwrap();
            assert!(signed(&requested, &[]).is_some(), "{}", input.display());
        }
    }
}
