//! Users in the request headers of an authenticating proxy. The proxy authenticates with a client certificate of its
//! own certificate authority.
//!
//! Source: `k8s.io/apiserver/pkg/authentication/request/headerrequest`.

use std::{path::PathBuf, sync::Arc};

use http::HeaderMap;
use rustls::server::{WebPkiClientVerifier, danger::ClientCertVerifier};
use rustls_pki_types::{CertificateDer, UnixTime, pem::PemObject as _};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use super::{Authenticating, Authenticator, Credential, User, known};

/// Maximum number of groups, and of extra values, of one user.
const MAX_VALUES: usize = 1000;

/// The settings of the proxy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestHeaderConfig {
    /// File with the certificate authorities of the proxy.
    pub client_ca_file: PathBuf,
    /// Common names that the proxy's certificate may have. Empty allows all.
    pub allowed_names: Vec<String>,
    /// Headers with the user name. The first non-empty header is used.
    pub username_headers: Vec<String>,
    /// Headers with the uid. The first non-empty header is used.
    pub uid_headers: Vec<String>,
    /// Headers with groups.
    pub group_headers: Vec<String>,
    /// Prefixes of headers with extra values.
    pub extra_prefixes: Vec<String>,
}

/// Authenticates the users that the proxy names.
pub(super) struct RequestHeaders(pub(super) RequestHeaderConfig);

/// Determines whether the cluster or the proxy issued a certificate.
pub(crate) struct PeerVerifier {
    cluster: Arc<dyn ClientCertVerifier>,
    proxy: Arc<dyn ClientCertVerifier>,
}

/// The authorities that signed a certificate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SignedBy {
    /// Whether the authority of the cluster's clients signed the certificate.
    pub(super) cluster: bool,
    /// Whether the authority of the proxy signed the certificate.
    pub(super) proxy: bool,
}

// === impl PeerVerifier ===

impl PeerVerifier {
    /// Creates the verifiers of the cluster's and of the proxy's certificate authority, which are in PEM form.
    ///
    /// # Errors
    /// An authority is invalid. Or both authorities have a certificate in common while all names are allowed: every
    /// client of the cluster could then name any user.
    pub(super) fn new(cluster: &str, proxy: &str, allows_all: bool) -> Result<Self, String> {
        let certificates = |pem: &str| -> Vec<_> {
            CertificateDer::pem_slice_iter(pem.as_bytes()).filter_map(Result::ok).collect()
        };
        let of_cluster = certificates(cluster);
        if allows_all && certificates(proxy).iter().any(|one| of_cluster.contains(one)) {
            return Err(
                "it has the authority of the cluster's clients, so requestheader-allowed-names is required"
                    .to_owned(),
            );
        }
        Ok(Self { cluster: verifier(cluster)?, proxy: verifier(proxy)? })
    }

    /// Checks which authorities signed the chain.
    pub(super) fn verify(&self, chain: &[CertificateDer<'_>]) -> SignedBy {
        let Some((end, between)) = chain.split_first() else { return SignedBy::default() };
        let is_of = |verifier: &Arc<dyn ClientCertVerifier>| {
            verifier.verify_client_cert(end, between, UnixTime::now()).is_ok()
        };
        SignedBy { cluster: is_of(&self.cluster), proxy: is_of(&self.proxy) }
    }
}

fn verifier(authority: &str) -> Result<Arc<dyn ClientCertVerifier>, String> {
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(authority.as_bytes()) {
        let certificate = certificate.map_err(|error| error.to_string())?;
        roots.add(certificate).map_err(|error| error.to_string())?;
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
    verifier.build().map_err(|error| error.to_string())
}

// === impl RequestHeaders ===

impl Authenticator for RequestHeaders {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        let named = credential.proxy.filter(|certificate| self.allows(certificate)).zip(credential.headers);
        known(named.and_then(|(_, headers)| self.user(headers)))
    }
}

impl RequestHeaders {
    fn allows(&self, certificate: &CertificateDer<'_>) -> bool {
        let allowed = &self.0.allowed_names;
        let Ok((_, certificate)) = X509Certificate::from_der(certificate) else { return false };
        let mut names = certificate.subject().iter_common_name();
        let name = names.next().and_then(|name| name.as_str().ok()).unwrap_or_default();
        names.next().is_none() && (allowed.is_empty() || allowed.iter().any(|one| one == name))
    }

    /// The user in the headers. `None` without a user name.
    fn user(&self, headers: &HeaderMap) -> Option<User> {
        let config = &self.0;
        let values = |name: &String| {
            let values = headers.get_all(name.as_str()).iter();
            values.filter_map(|value| Some(value.to_str().ok()?.to_owned())).filter(|value| !value.is_empty())
        };
        let first = |names: &[String]| names.iter().flat_map(values).next();
        let name = first(&config.username_headers)?;
        let groups: Vec<String> = config.group_headers.iter().flat_map(values).collect();
        let groups: Vec<&str> = groups.iter().map(String::as_str).collect();
        let mut user = User::new(&name, &groups);
        user.uid = first(&config.uid_headers).unwrap_or_default();
        let prefixes: Vec<String> = config.extra_prefixes.iter().map(|one| one.to_lowercase()).collect();
        let mut number = 0;
        for header in headers.keys() {
            let key = prefixes.iter().find_map(|prefix| header.as_str().strip_prefix(prefix.as_str()));
            let Some(key) = key.filter(|key| !key.is_empty()) else { continue };
            let decoded = percent_encoding::percent_decode_str(key).decode_utf8_lossy().to_lowercase();
            let found: Vec<String> = values(&header.as_str().to_owned()).collect();
            number += found.len();
            user.extra.entry(decoded).or_default().extend(found);
        }
        (user.groups.len() <= MAX_VALUES && number <= MAX_VALUES).then_some(user)
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

    use super::*;
    use crate::cache::Cache;

    struct Authority(CertificateParams, KeyPair);

    impl Authority {
        fn new() -> Self {
            let mut params = CertificateParams::default();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            Self(params, KeyPair::generate().unwrap())
        }

        fn pem(&self) -> String {
            self.0.self_signed(&self.1).unwrap().pem()
        }

        fn certificate(&self, name: &str) -> CertificateDer<'static> {
            let mut params = CertificateParams::default();
            params.distinguished_name.push(DnType::CommonName, name);
            params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
            let key = KeyPair::generate().unwrap();
            let issuer = Issuer::from_params(&self.0, &self.1);
            params.signed_by(&key, &issuer).unwrap().der().clone()
        }
    }

    fn headers() -> RequestHeaders {
        let list = |text: &str| vec![text.to_owned()];
        RequestHeaders(RequestHeaderConfig {
            client_ca_file: PathBuf::new(),
            allowed_names: list("proxy"),
            username_headers: list("X-Remote-User"),
            uid_headers: list("X-Remote-Uid"),
            group_headers: list("X-Remote-Group"),
            extra_prefixes: list("X-Remote-Extra-"),
        })
    }

    async fn user(certificate: Option<&CertificateDer<'_>>, name: &str) -> Option<User> {
        let mut all = HeaderMap::new();
        all.insert("x-remote-user", name.parse().unwrap());
        all.append("x-remote-group", "dev".parse().unwrap());
        all.append("x-remote-group", "ops".parse().unwrap());
        all.insert("x-remote-extra-a%2fb", "1".parse().unwrap());
        let cache = Cache::new(0);
        let credential = Credential { proxy: certificate, headers: Some(&all), ..Credential::none(&cache) };
        headers().authenticate(&credential).await
    }

    #[tokio::test]
    async fn the_proxy_names_the_user() {
        let authority = Authority::new();
        let proxy = authority.certificate("proxy");
        let ann = user(Some(&proxy), "ann").await.unwrap();
        assert_eq!(ann.groups, ["dev", "ops", "system:authenticated"]);
        assert_eq!(ann.extra["a/b"], ["1"]);
        assert_eq!(user(Some(&proxy), "").await, None);
        assert_eq!(user(Some(&authority.certificate("other")), "ann").await, None);
        assert_eq!(user(None, "ann").await, None);
    }

    #[test]
    fn a_user_with_very_many_groups_or_extra_values_is_refused() {
        let user = |name: &'static str, values: usize| {
            let mut all = HeaderMap::new();
            all.insert("x-remote-user", "ann".parse().unwrap());
            for _ in 0..values {
                all.append(name, "v".parse().unwrap());
            }
            headers().user(&all)
        };
        for name in ["x-remote-group", "x-remote-extra-a"] {
            assert!(user(name, MAX_VALUES - 1).is_some() && user(name, MAX_VALUES + 1).is_none(), "{name}");
        }
    }

    #[test]
    fn certificates_count_for_their_own_authority_only() {
        let (cluster, proxy) = (Authority::new(), Authority::new());
        let verifier = PeerVerifier::new(&cluster.pem(), &proxy.pem(), true).unwrap();
        assert_eq!(verifier.verify(&[cluster.certificate("a")]), SignedBy { cluster: true, proxy: false });
        assert_eq!(verifier.verify(&[proxy.certificate("proxy")]), SignedBy { cluster: false, proxy: true });
        assert_eq!(verifier.verify(&[Authority::new().certificate("a")]), SignedBy::default());
        assert_eq!(verifier.verify(&[]), SignedBy::default());
        let shared = cluster.pem();
        assert!(PeerVerifier::new(&shared, &shared, true).is_err());
        assert!(PeerVerifier::new(&shared, &shared, false).is_ok());
    }
}
