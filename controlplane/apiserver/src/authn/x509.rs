//! Client certificates that the TLS layer verified: the common name is the user, organizations are the groups. A
//! certificate with several common names is refused.

use rustls_pki_types::CertificateDer;
use sha2::Digest as _;
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::{Authenticating, Authenticator, CREDENTIAL, Credential, User, known};

/// The users of client certificates.
pub(super) struct ClientCertificates;

impl Authenticator for ClientCertificates {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        known(credential.certificate.and_then(user))
    }
}

fn user(certificate: &CertificateDer<'_>) -> Option<User> {
    let id = format!("X509SHA256={}", hex::encode(sha2::Sha256::digest(certificate)));
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let subject = certificate.subject();
    let mut names = subject.iter_common_name();
    let (Some(name), None) = (names.next(), names.next()) else { return None };
    let name = name.as_str().ok()?;
    let groups: Vec<&str> = subject.iter_organization().filter_map(|group| group.as_str().ok()).collect();
    let mut user = User::new(name, &groups);
    user.extra.insert(CREDENTIAL.to_owned(), vec![id]);
    (!name.is_empty()).then_some(user)
}
