//! Client certificates that the TLS layer has verified: the common name is the user name, organizations are the groups.
//! A certificate with several common names or uids is refused.

use rustls_pki_types::CertificateDer;
use sha2::Digest as _;
use x509_parser::prelude::{FromDer as _, X509Certificate, X509Name};

use super::{Authenticating, Authenticator, CREDENTIAL, Credential, User, known};

/// The common name of the API server's client certificate for kubelets, as upstream. A client of the API server with
/// this name is refused. A node can report the API server's address as its own, and the request to its kubelet would
/// arrive here with all permissions.
const KUBELET_CLIENT: &str = "kube-apiserver-kubelet-client";

/// Object identifier of the subject attribute with the user's uid: 1.3.6.1.4.1.57683.2, in DER. Source:
/// `k8s.io/apimachinery/pkg/apis/asn1`.
const UID: [u8; 9] = [0x2b, 6, 1, 4, 1, 0x83, 0xc2, 0x53, 2];

/// Authenticates users by client certificate.
pub(super) struct ClientCertificates;

impl Authenticator for ClientCertificates {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        known(credential.certificate.and_then(user))
    }
}

/// The end of the validity of a certificate, in seconds since 1970.
pub(super) fn expiry(certificate: &CertificateDer<'_>) -> Option<i64> {
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    Some(certificate.validity().not_after.timestamp())
}

fn user(certificate: &CertificateDer<'_>) -> Option<User> {
    let id = format!("X509SHA256={}", hex::encode(sha2::Sha256::digest(certificate)));
    let (_, certificate) = X509Certificate::from_der(certificate).ok()?;
    let subject = certificate.subject();
    let mut names = subject.iter_common_name();
    let (Some(name), None) = (names.next(), names.next()) else { return None };
    let name = name.as_str().ok().filter(|name| *name != KUBELET_CLIENT)?;
    let groups: Vec<&str> = subject.iter_organization().filter_map(|group| group.as_str().ok()).collect();
    let mut user = User::new(name, &groups);
    user.uid = uid(subject)?;
    user.extra.insert(CREDENTIAL.to_owned(), vec![id]);
    (!name.is_empty()).then_some(user)
}

/// The uid of a subject, or an empty text if the subject has no uid. `None` if the subject has several uids, or an
/// empty or invalid uid.
fn uid(subject: &X509Name<'_>) -> Option<String> {
    let mut uids = subject.iter_attributes().filter(|one| one.attr_type().as_bytes() == UID);
    match (uids.next(), uids.next()) {
        (None, _) => Some(String::new()),
        (Some(one), None) => one.as_str().ok().filter(|uid| !uid.is_empty()).map(str::to_owned),
        (Some(_), Some(_)) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn certificate(name: &str) -> CertificateDer<'static> {
        with_uids(name, &[])
    }

    fn with_uids(name: &str, uids: &[&str]) -> CertificateDer<'static> {
        let mut params = rcgen::CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        for uid in uids {
            let kind = rcgen::DnType::CustomDnType(vec![1, 3, 6, 1, 4, 1, 57683, 2]);
            params.distinguished_name.push(kind, *uid);
        }
        params.distinguished_name.push(rcgen::DnType::OrganizationName, "system:masters");
        params.self_signed(&rcgen::KeyPair::generate().unwrap()).unwrap().der().clone()
    }

    #[test]
    fn the_client_certificate_for_kubelets_is_not_a_user_of_the_api_server() {
        assert!(user(&certificate("ann")).unwrap().is_in("system:masters"));
        assert!(user(&certificate(KUBELET_CLIENT)).is_none());
    }

    #[test]
    fn a_subject_may_have_a_uid() {
        assert_eq!(user(&certificate("ann")).unwrap().uid, "");
        assert_eq!(user(&with_uids("ann", &["7"])).unwrap().uid, "7");
        assert_eq!(user(&with_uids("ann", &[""])), None);
    }
}
