//! Who may use the API: the cluster's own parts and its administrators, by client certificate; others by what the API
//! server says of their certificate's name or of their token.

use http::{HeaderMap, StatusCode};
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::Refused;
use super::access::{Access, Needed, User, token};

/// Whoever opened the connection; the certificate was verified by the handshake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Caller {
    /// No certificate was shown.
    Anonymous,
    Certified {
        user: String,
        groups: Vec<String>,
    },
}

/// The API server's names for itself towards kubelets.
const USERS: [&str; 2] = ["kube-apiserver-kubelet-client", "system:kube-apiserver"];
const GROUP: &str = "system:masters";

impl Caller {
    /// The caller in the certificate of a handshake.
    pub(super) fn of(certificates: Option<&[CertificateDer<'_>]>) -> Caller {
        let Some(certificate) = certificates.and_then(<[_]>::first) else { return Caller::Anonymous };
        let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return Caller::Anonymous };
        let subject = certificate.subject();
        // With several names it is nobody's: others may have read another of them.
        let mut names = subject.iter_common_name();
        let name = names.next().filter(|_| names.next().is_none());
        let user = name.and_then(|name| name.as_str().ok()).unwrap_or_default();
        let groups = subject.iter_organization().filter_map(|name| name.as_str().ok());
        Caller::Certified { user: user.to_owned(), groups: groups.map(str::to_owned).collect() }
    }

    /// Nothing, or the refusal. A certificate wins over a token, as in the kubelet.
    pub(super) async fn may_use(
        &self,
        access: &Access,
        headers: &HeaderMap,
        needed: Needed,
    ) -> Result<(), Refused> {
        if self.is_trusted() {
            return Ok(());
        }
        let user = match self {
            Caller::Certified { user, groups } if !user.is_empty() => {
                // The API server would add the group to the user of this certificate.
                let authenticated = "system:authenticated".to_owned();
                let groups = groups.iter().cloned().chain([authenticated]).collect();
                User { name: user.clone(), groups, ..User::default() }
            }
            Caller::Certified { .. } | Caller::Anonymous => match token(headers) {
                Some(token) => access.authenticate(token).await?,
                None => return Err(Refused(StatusCode::UNAUTHORIZED, "Unauthorized".to_owned())),
            },
        };
        access.authorize(&user, needed).await
    }

    /// Whether the API server need not be asked.
    fn is_trusted(&self) -> bool {
        match self {
            Caller::Anonymous => false,
            Caller::Certified { user, groups } => {
                USERS.contains(&user.as_str()) || groups.iter().any(|group| group == GROUP)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_server_and_administrators_are_trusted_and_no_others() {
        let trusted = |user: &str, groups: &[&str]| {
            let groups = groups.iter().map(|group| (*group).to_owned()).collect();
            Caller::Certified { user: user.to_owned(), groups }.is_trusted()
        };
        assert!(trusted("kube-apiserver-kubelet-client", &[]));
        assert!(trusted("system:kube-apiserver", &[]));
        assert!(trusted("anybody", &["a", "system:masters"]));
        assert!(!trusted("system:node:other", &["system:nodes"]));
        assert!(!trusted("", &[]) && !Caller::Anonymous.is_trusted());
    }
}
