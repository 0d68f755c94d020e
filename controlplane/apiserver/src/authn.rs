//! Authentication: a chain of authenticators (`authn/`). The first authenticator that recognizes the credential
//! determines the user. A request without credentials is anonymous.

mod bootstrap_token;
mod credential_file;
mod guess_limit;
pub(crate) mod legacy_use;
mod oidc;
mod password_file;
pub(crate) mod presented;
mod request_header;
pub(crate) mod service_account;
mod token_file;
pub(crate) mod token_keys;
mod token_webhook;
mod x509;

use std::{
    collections::BTreeMap,
    future::{Ready, ready},
    net::IpAddr,
    path::Path,
    sync::Arc,
    time::Instant,
};

use arc_swap::ArcSwap;
use futures::future::{BoxFuture, Either};
use http::HeaderMap;
use rustls_pki_types::CertificateDer;

use crate::{
    cache::Cache,
    error::{ApiError, Result},
};
use guess_limit::GuessLimit;
pub use oidc::config::OidcConfig;
pub(crate) use oidc::config::{AnonymousConfig, AuthenticationConfig, IssuerConfig};
use password_file::PasswordFile;
use presented::Presented;
pub use request_header::RequestHeaderConfig;
use request_header::{PeerVerifier, SignedBy};
use service_account::Tokens;
pub(crate) use token_file::TokenFile;
pub use token_webhook::TokenWebhookConfig;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use {oidc::fuzz_keys, token_webhook::fuzz as fuzz_review};

/// Extra value that identifies the credential of a request.
const CREDENTIAL: &str = "authentication.kubernetes.io/credential-id";

/// An authenticated user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// Name, for example `kubernetes-admin`.
    pub name: String,
    /// Unique id. Empty if the authenticator provides no id.
    pub uid: String,
    /// Groups.
    pub groups: Vec<String>,
    /// Additional values from the authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
    /// Whether this is a component of the control plane in this process. Credentials cannot set it.
    pub(crate) component: bool,
    /// The requested audiences for which the token of the user is intended. Empty: the audiences of this API server.
    pub(crate) audiences: Vec<String>,
    /// The service account token that authenticated the request, if its use is recorded.
    pub(crate) recorded_token: Option<RecordedToken>,
}

/// A service account token whose use is counted, and recorded in audit events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum RecordedToken {
    Legacy(LegacyToken),
    Extended(ExtendedToken),
}

/// A pod's token with an extended validity. The kubelet replaces the token long before the extended validity ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ExtendedToken {
    pub(crate) subject: String,
    /// Seconds since the end of the validity without the extension. Negative before that time.
    pub(crate) late: i64,
}

/// A token in a Secret.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LegacyToken {
    pub(crate) secret: String,
    /// Whether the service account lists the Secret. Kubernetes before 1.24 created such Secrets automatically.
    pub(crate) is_generated: bool,
}

/// The credentials of a request.
pub(crate) struct Credential<'a> {
    /// A client certificate that the cluster's certificate authority signed.
    pub(crate) certificate: Option<&'a CertificateDer<'a>>,
    /// A client certificate that the certificate authority of the authenticating proxy signed.
    pub(crate) proxy: Option<&'a CertificateDer<'a>>,
    /// The headers of the request. `None` for a TokenReview.
    pub(crate) headers: Option<&'a HeaderMap>,
    /// The bearer token.
    pub(crate) token: Option<&'a str>,
    /// `user:password` of basic authentication. `None` for a TokenReview.
    pub(crate) password: Option<&'a [u8]>,
    /// Audiences that the token may be intended for.
    pub(crate) audiences: &'a [String],
    /// Path of the request; empty for a review.
    pub(crate) path: &'a str,
    pub(crate) cache: &'a Cache,
}

/// A running authentication: the user, or `None` if the authenticator does not recognize the credential. A local
/// authenticator returns a ready result without an allocation.
pub(crate) type Authenticating<'a> = Either<Ready<Option<User>>, BoxFuture<'a, Option<User>>>;

/// A member of the chain.
pub(crate) trait Authenticator: Send + Sync {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a>;
}

/// The settings of the chain.
pub(crate) struct Sources<'a> {
    pub(crate) password_file: Option<&'a Path>,
    pub(crate) token_file: Option<&'a Path>,
    /// Upstream's `AuthenticationConfiguration`.
    pub(crate) config: AuthenticationConfig,
    pub(crate) token_webhook: Option<TokenWebhookConfig>,
    pub(crate) request_header: Option<RequestHeaderConfig>,
    /// The cluster's authority, in PEM form.
    pub(crate) authority: &'a str,
}

/// A client certificate that the TLS layer has verified, and the authorities that signed it.
#[derive(Clone)]
pub(crate) struct PeerCertificate {
    certificate: Arc<CertificateDer<'static>>,
    /// End of the validity in seconds since 1970.
    expires: Option<i64>,
    is_client: bool,
    is_proxy: bool,
}

/// The parts of a request from the network that authentication reads.
pub(crate) struct ReceivedRequest<'a> {
    pub(crate) headers: &'a HeaderMap,
    pub(crate) path: &'a str,
    /// The client's address.
    pub(crate) address: Option<IpAddr>,
}

/// The chain of authenticators.
pub(crate) struct Authenticators {
    chain: Vec<Box<dyn Authenticator>>,
    /// Limit on wrong passwords. `None` if basic authentication is disabled.
    guesses: Option<GuessLimit>,
    /// The issuers of the configuration file, which are also a member of the chain.
    issuers: Arc<ArcSwap<oidc::Issuers>>,
    anonymous: Arc<Anonymous>,
    /// Verifies client certificates if there is an authenticating proxy.
    peers: Option<PeerVerifier>,
    /// Issuer of service account tokens.
    pub(crate) tokens: Arc<Tokens>,
}

/// Authenticates requests without credentials as anonymous, if the configuration permits it for their path.
struct Anonymous(ArcSwap<AnonymousConfig>);

/// An authenticator that ignores the audiences of the request. Its tokens are valid only for this API server, not for
/// other servers that send a TokenReview. Source: `WrapAudienceAgnosticToken` of `k8s.io/apiserver`.
struct OwnAudience<A> {
    of: A,
    /// Audiences of this API server.
    audiences: Vec<String>,
}

impl<A: Authenticator> Authenticator for OwnAudience<A> {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        if credential.audiences.iter().any(|one| self.audiences.contains(one)) {
            return self.of.authenticate(credential);
        }
        known(None)
    }
}

impl<T: Authenticator> Authenticator for Arc<T> {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        (**self).authenticate(credential)
    }
}

// === impl User ===

impl User {
    /// A user with this name and these groups.
    #[must_use]
    pub fn new(name: &str, groups: &[&str]) -> Self {
        let mut groups: Vec<String> = groups.iter().map(|&group| group.to_owned()).collect();
        groups.push("system:authenticated".to_owned());
        Self { name: name.to_owned(), groups, ..Self::default() }
    }

    /// The user of the control plane's controllers, with upstream's name. It is only for callers in this process.
    #[must_use]
    pub fn controllers() -> Self {
        Self { component: true, ..Self::new("system:kube-controller-manager", &[]) }
    }

    pub(crate) fn is_component(&self) -> bool {
        self.component
    }

    fn anonymous() -> Self {
        let groups = vec!["system:unauthenticated".to_owned()];
        Self { name: "system:anonymous".to_owned(), groups, ..Self::default() }
    }

    pub(crate) fn is_anonymous(&self) -> bool {
        self.is_in("system:unauthenticated")
    }

    pub(crate) fn is_in(&self, group: &str) -> bool {
        self.groups.iter().any(|own| own == group)
    }

    /// The node name, if the user is a node.
    pub(crate) fn node(&self) -> Option<&str> {
        self.name.strip_prefix("system:node:").filter(|_| self.is_in("system:nodes"))
    }
}

// === impl PeerCertificate ===

impl PeerCertificate {
    /// Seconds until the certificate expires; negative after its expiry.
    pub(crate) fn remaining(&self) -> Option<i64> {
        Some(self.expires? - jiff::Timestamp::now().as_second())
    }
}

// === impl Credential ===

impl<'a> Credential<'a> {
    /// No credential.
    pub(crate) fn none(cache: &'a Cache) -> Self {
        Self {
            certificate: None,
            proxy: None,
            headers: None,
            token: None,
            password: None,
            audiences: &[],
            path: "",
            cache,
        }
    }
}

// === impl Authenticators ===

impl Authenticators {
    /// Builds the chain from its settings.
    ///
    /// # Errors
    /// A file cannot be read or is invalid.
    pub(crate) fn new(tokens: Tokens, sources: Sources<'_>) -> std::result::Result<Self, String> {
        let tokens = Arc::new(tokens);
        let mut chain: Vec<Box<dyn Authenticator>> = Vec::new();
        let mut peers = None;
        if let Some(config) = sources.request_header {
            let path = config.client_ca_file.display().to_string();
            let authority = std::fs::read_to_string(&config.client_ca_file);
            let authority = authority.map_err(|error| format!("{path}: {error}"))?;
            let verifier = PeerVerifier::new(sources.authority, &authority, config.allowed_names.is_empty());
            peers = Some(verifier.map_err(|reason| format!("{path}: {reason}"))?);
            chain.push(Box::new(request_header::RequestHeaders(config)));
        }
        chain.push(Box::new(x509::ClientCertificates));
        let guesses = sources.password_file.map(|_| GuessLimit::new());
        if let Some(path) = sources.password_file {
            let file = PasswordFile::read(path);
            chain.push(Box::new(file.map_err(|reason| format!("{}: {reason}", path.display()))?));
        }
        if let Some(path) = sources.token_file {
            let file = TokenFile::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
            chain.push(Box::new(OwnAudience { of: file, audiences: tokens.audiences.clone() }));
        }
        chain.push(Box::new(service_account::ServiceAccounts(tokens.clone())));
        chain.push(Box::new(bootstrap_token::BootstrapTokens { audiences: tokens.audiences.clone() }));
        let config = sources.config;
        let issuers = Arc::new(ArcSwap::from_pointee(foreign_issuers(&tokens, config.issuers)?));
        chain.push(Box::new(OwnAudience { of: issuers.clone(), audiences: tokens.audiences.clone() }));
        if let Some(webhook) = sources.token_webhook {
            let webhook = token_webhook::TokenWebhook::new(webhook, tokens.audiences.clone())?;
            chain.push(Box::new(webhook));
        }
        let anonymous = Arc::new(Anonymous(ArcSwap::from_pointee(config.anonymous)));
        chain.push(Box::new(anonymous.clone()));
        Ok(Self { chain, guesses, issuers, anonymous, peers, tokens })
    }

    /// Replaces the part of the chain that the configuration file determines. Running authentications use the former
    /// configuration.
    ///
    /// # Errors
    /// An issuer's authority or URL is invalid. The former configuration stays.
    pub(crate) fn replace(&self, config: AuthenticationConfig) -> std::result::Result<(), String> {
        let issuers = foreign_issuers(&self.tokens, config.issuers)?;
        self.issuers.store(Arc::new(issuers));
        self.anonymous.0.store(Arc::new(config.anonymous));
        Ok(())
    }

    /// The certificate of a connection.
    pub(crate) fn peer(&self, chain: &[CertificateDer<'_>]) -> Option<PeerCertificate> {
        let certificate = Arc::new(chain.first()?.clone().into_owned());
        // Without a proxy, every certificate belongs to a client of the cluster.
        let of_client = SignedBy { cluster: true, proxy: false };
        let signed_by = self.peers.as_ref().map_or(of_client, |peers| peers.verify(chain));
        Some(PeerCertificate {
            expires: x509::expiry(&certificate),
            certificate,
            is_client: signed_by.cluster,
            is_proxy: signed_by.proxy,
        })
    }

    /// Authenticates a request from the network.
    pub(crate) async fn identify(
        &self,
        cache: &Cache,
        peer: Option<&PeerCertificate>,
        received: &ReceivedRequest<'_>,
    ) -> Result<User> {
        let presented = presented::read(received.headers);
        let (token, password) = match &presented {
            Presented::Nothing => (None, None),
            Presented::Bearer(token) => (Some(&**token), None),
            Presented::Basic(password) => (None, Some(password.as_slice())),
            Presented::Invalid => return Err(ApiError::unauthorized()),
        };
        let guesses = match (password, &self.guesses) {
            (None, _) => None,
            (Some(_), None) => return Err(ApiError::unauthorized()),
            (Some(_), Some(guesses)) => Some(guesses),
        };
        if guesses.is_some_and(|guesses| !guesses.allows(received.address, Instant::now())) {
            return Err(ApiError::too_many_requests());
        }
        let credential = Credential {
            certificate: peer.filter(|peer| peer.is_client).map(|peer| &*peer.certificate),
            proxy: peer.filter(|peer| peer.is_proxy).map(|peer| &*peer.certificate),
            headers: Some(received.headers),
            token,
            password,
            audiences: &self.tokens.audiences,
            path: received.path,
            cache,
        };
        let user = self.user(&credential).await;
        if let Some(guesses) = guesses.filter(|_| user.is_none()) {
            guesses.failed(received.address, Instant::now());
        }
        user.ok_or_else(ApiError::unauthorized)
    }

    /// Whether basic authentication is enabled.
    pub(crate) fn has_passwords(&self) -> bool {
        self.guesses.is_some()
    }

    /// Authenticates a token for one of the audiences.
    pub(crate) async fn token_user(&self, cache: &Cache, token: &str, audiences: &[String]) -> Option<User> {
        self.user(&Credential { token: Some(token), audiences, ..Credential::none(cache) }).await
    }

    async fn user(&self, credential: &Credential<'_>) -> Option<User> {
        for member in &self.chain {
            if let Some(user) = member.authenticate(credential).await {
                return Some(user);
            }
        }
        None
    }
}

// === impl Anonymous ===

impl Authenticator for Anonymous {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a> {
        let is_allowed = match &**self.0.load() {
            AnonymousConfig::Enabled => true,
            AnonymousConfig::Disabled => false,
            AnonymousConfig::Paths(paths) => paths.iter().any(|path| path == credential.path),
        };
        let has_credential = credential.token.is_some() || credential.password.is_some();
        known((is_allowed && !has_credential).then(User::anonymous))
    }
}

/// Fuzz target: a bearer token.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(token: &str) {
    oidc::fuzz(token);
    service_account::fuzz(token);
}

/// The issuers of the configuration. As upstream, they must differ from the issuers of service account tokens.
fn foreign_issuers(
    tokens: &Tokens,
    configs: Vec<IssuerConfig>,
) -> std::result::Result<oidc::Issuers, String> {
    if let Some(own) = configs.iter().find(|config| tokens.is_issuer(&config.url)) {
        return Err(format!("issuer.url: {:?} is the issuer of service account tokens", own.url));
    }
    oidc::Issuers::new(configs)
}

/// The result of a local authenticator.
fn known<'a>(user: Option<User>) -> Authenticating<'a> {
    Either::Left(ready(user))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_correct_password_is_refused_after_many_wrong_ones_from_its_address() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("passwords");
        std::fs::write(&path, "pw,ann,7\n").unwrap();
        let key = rcgen::KeyPair::generate().unwrap().serialize_der();
        let key = token_keys::TokenKeys::own(&key).unwrap();
        let tokens = Tokens::new(key, vec!["https://a".to_owned()], Vec::new(), legacy_use::queue().0);
        let sources = Sources {
            password_file: Some(&path),
            token_file: None,
            config: AuthenticationConfig::default(),
            token_webhook: None,
            request_header: None,
            authority: "",
        };
        let authenticators = Authenticators::new(tokens, sources).unwrap();
        let mut headers = HeaderMap::new();
        headers.insert("authorization", "Basic YW5uOnB3".parse().unwrap());
        let (cache, received) =
            (Cache::new(0), ReceivedRequest { headers: &headers, path: "/api", address: None });
        let user = async || authenticators.identify(&cache, None, &received).await;
        assert_eq!(user().await.unwrap().name, "ann");
        let guesses = authenticators.guesses.as_ref().unwrap();
        (0..1000).for_each(|_| guesses.failed(None, Instant::now()));
        assert_eq!(user().await.unwrap_err().code, 429);
    }

    #[test]
    fn an_issuer_of_the_configuration_differs_from_those_of_service_accounts() {
        let key = rcgen::KeyPair::generate().unwrap().serialize_der();
        let own = vec!["https://a".to_owned(), "https://b".to_owned()];
        let key = token_keys::TokenKeys::own(&key).unwrap();
        let tokens = Tokens::new(key, own, Vec::new(), legacy_use::queue().0);
        let issuers = |url: &str| {
            let config = OidcConfig {
                issuer_url: url.to_owned(),
                client_id: "app".to_owned(),
                username_claim: "sub".to_owned(),
                ..OidcConfig::default()
            };
            foreign_issuers(&tokens, vec![config.issuer().unwrap()])
        };
        assert!(issuers("https://c").is_ok());
        assert!(issuers("https://b").is_err_and(|reason| reason.contains("service account")));
    }

    #[tokio::test]
    async fn a_token_without_audiences_is_for_this_server_only() {
        struct Any;
        impl Authenticator for Any {
            fn authenticate<'a>(&'a self, _credential: &'a Credential<'a>) -> Authenticating<'a> {
                known(Some(User::new("ann", &[])))
            }
        }
        let authenticator = OwnAudience { of: Any, audiences: vec!["api".to_owned()] };
        let cache = Cache::new(0);
        for (asked, expect) in [(&["api", "vault"][..], true), (&["vault"], false), (&[], false)] {
            let audiences: Vec<String> = asked.iter().map(|&one| one.to_owned()).collect();
            let credential =
                Credential { token: Some("t"), audiences: &audiences, ..Credential::none(&cache) };
            assert_eq!(authenticator.authenticate(&credential).await.is_some(), expect, "{asked:?}");
        }
    }
}
