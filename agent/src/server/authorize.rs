//! Who may use the API: the cluster's own parts and its administrators, by client certificate.

use http::StatusCode;
use rustls_pki_types::CertificateDer;
use x509_parser::prelude::{FromDer, X509Certificate};

use super::Refused;

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

    /// Nothing, or the refusal.
    pub(super) fn may_use(&self, method: &str) -> Result<(), Refused> {
        match self {
            Caller::Anonymous => Err(Refused(StatusCode::UNAUTHORIZED, "Unauthorized".to_owned())),
            Caller::Certified { user, groups }
                if USERS.contains(&user.as_str()) || groups.iter().any(|group| group == GROUP) =>
            {
                Ok(())
            }
            Caller::Certified { user, .. } => {
                let verb = if method == "GET" { "get" } else { "create" };
                let reason =
                    format!("Forbidden (user={user}, verb={verb}, resource=nodes, subresource=proxy)");
                Err(Refused(StatusCode::FORBIDDEN, reason))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_server_and_administrators_may_and_nobody_else() {
        let status = |user: &str, groups: &[&str]| {
            let caller = Caller::Certified {
                user: user.to_owned(),
                groups: groups.iter().map(|g| (*g).to_owned()).collect(),
            };
            caller.may_use("GET").map_err(|refused| refused.0)
        };
        assert_eq!(status("kube-apiserver-kubelet-client", &[]), Ok(()));
        assert_eq!(status("system:kube-apiserver", &[]), Ok(()));
        assert_eq!(status("anybody", &["a", "system:masters"]), Ok(()));
        assert_eq!(status("system:node:other", &["system:nodes"]), Err(StatusCode::FORBIDDEN));
        assert_eq!(
            Caller::Anonymous.may_use("GET").map_err(|refused| refused.0),
            Err(StatusCode::UNAUTHORIZED)
        );
    }
}
