//! Authorization of callers: the cluster's components and administrators by client certificate, other callers by the
//! API server.

use http::{HeaderMap, StatusCode};
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::access::{Access, RequiredPermission, User, token};
use super::respond::Refused;

/// The caller of a connection. The handshake has verified the certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Caller {
    /// Without a certificate.
    Anonymous,
    Certified {
        user: String,
        groups: Vec<String>,
    },
}

/// User names of the API server's certificates for kubelets.
const USERS: [&str; 2] = ["kube-apiserver-kubelet-client", "system:kube-apiserver"];
const GROUP: &str = "system:masters";

impl Caller {
    /// The caller that a handshake's certificates identify.
    pub(super) fn of(certificates: Option<&[CertificateDer<'_>]>) -> Caller {
        let Some(certificate) = certificates.and_then(<[_]>::first) else { return Caller::Anonymous };
        let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return Caller::Anonymous };
        let subject = certificate.subject();
        // A subject with several common names is rejected, because another program may read another of the names.
        let mut names = subject.iter_common_name();
        let name = names.next().filter(|_| names.next().is_none());
        let user = name.and_then(|name| name.as_str().ok()).unwrap_or_default();
        let groups = subject.iter_organization().filter_map(|name| name.as_str().ok());
        Caller::Certified { user: user.to_owned(), groups: groups.map(str::to_owned).collect() }
    }

    /// Fails if the request is not allowed. A certificate takes precedence over a token, as in the kubelet.
    pub(super) async fn may_use(
        &self,
        access: &Access,
        headers: &HeaderMap,
        needed: RequiredPermission,
    ) -> Result<(), Refused> {
        if self.is_trusted() {
            return Ok(());
        }
        let user = match self {
            Caller::Certified { user, groups } if !user.is_empty() => {
                // The API server adds this group to every authenticated user.
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

    /// Whether the caller is authorized without a review.
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
