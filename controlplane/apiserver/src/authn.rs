//! Authentication: a chain of authenticators, one a file. The first one that recognizes the credential decides. A request without
//! credentials is anonymous.

mod bootstrap_token;
pub(crate) mod legacy_use;
mod oidc;
pub(crate) mod service_account;
mod token_file;
mod x509;

use std::{
    collections::BTreeMap,
    future::{Ready, ready},
    path::Path,
    sync::Arc,
};

use futures::future::{BoxFuture, Either};
use http::HeaderMap;
use rustls_pki_types::CertificateDer;

use crate::{
    cache::Cache,
    error::{ApiError, Result},
};
use oidc::config::AnonymousConfig;
pub(crate) use oidc::config::AuthenticationConfig;
use service_account::Tokens;
pub(crate) use token_file::TokenFile;

/// Extra value that identifies the credential of a request.
const CREDENTIAL: &str = "authentication.kubernetes.io/credential-id";

/// An authenticated user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct User {
    /// Name: `kubernetes-admin`.
    pub name: String,
    /// Unique id, if the authenticator has one.
    pub uid: String,
    /// Groups.
    pub groups: Vec<String>,
    /// Additional values of the authenticator.
    pub extra: BTreeMap<String, Vec<String>>,
    /// Whether this is a part of the control plane in this process. No credential can claim it.
    pub(crate) component: bool,
}

/// What a request brings to prove its identity.
pub(crate) struct Credential<'a> {
    /// The client certificate, which the TLS layer verified.
    pub(crate) certificate: Option<&'a CertificateDer<'a>>,
    /// The bearer token.
    pub(crate) token: Option<&'a str>,
    /// Audiences for which the token may be.
    pub(crate) audiences: &'a [String],
    /// Path of the request; empty for a review.
    pub(crate) path: &'a str,
    pub(crate) cache: &'a Cache,
}

/// A running authentication: the user, or none if the authenticator does not know the credential. A local authenticator
/// answers at once, without an allocation.
pub(crate) type Authenticating<'a> = Either<Ready<Option<User>>, BoxFuture<'a, Option<User>>>;

/// A member of the chain.
pub(crate) trait Authenticator: Send + Sync {
    fn authenticate<'a>(&'a self, credential: &'a Credential<'a>) -> Authenticating<'a>;
}

/// The chain of authenticators.
pub(crate) struct Authenticators {
    chain: Vec<Box<dyn Authenticator>>,
    /// Issuer of service account tokens.
    pub(crate) tokens: Arc<Tokens>,
}

/// A request without credentials is anonymous, as far as the configuration allows it.
struct Anonymous(AnonymousConfig);

// === impl User ===

impl User {
    /// A user with this name and these groups.
    #[must_use]
    pub fn new(name: &str, groups: &[&str]) -> Self {
        let mut groups: Vec<String> = groups.iter().map(|&group| group.to_owned()).collect();
        groups.push("system:authenticated".to_owned());
        Self { name: name.to_owned(), groups, ..Self::default() }
    }

    /// The user of the control plane's controllers, with upstream's name. For callers in this process only.
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

// === impl Authenticators ===

impl Authenticators {
    /// # Errors
    /// The token file cannot be read, or an issuer of the configuration cannot be used.
    pub(crate) fn new(
        token_file: Option<&Path>,
        tokens: Tokens,
        config: AuthenticationConfig,
    ) -> std::io::Result<Self> {
        let tokens = Arc::new(tokens);
        let mut chain: Vec<Box<dyn Authenticator>> = vec![Box::new(x509::ClientCertificates)];
        if let Some(path) = token_file {
            chain.push(Box::new(TokenFile::read(path)?));
        }
        chain.push(Box::new(service_account::ServiceAccounts(tokens.clone())));
        chain.push(Box::new(bootstrap_token::BootstrapTokens { audiences: tokens.audiences.clone() }));
        if !config.issuers.is_empty() {
            let issuers = oidc::Issuers::new(config.issuers).map_err(std::io::Error::other)?;
            chain.push(Box::new(issuers));
        }
        chain.push(Box::new(Anonymous(config.anonymous)));
        Ok(Self { chain, tokens })
    }

    /// Authenticates a request from the network.
    pub(crate) async fn identify(
        &self,
        cache: &Cache,
        certificate: Option<&CertificateDer<'_>>,
        (headers, path): (&HeaderMap, &str),
    ) -> Result<User> {
        let token = headers.get(http::header::AUTHORIZATION).map(|header| {
            let (scheme, token) = header.to_str().ok()?.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
        });
        let token = match token {
            Some(Some("") | None) => return Err(ApiError::unauthorized()),
            token => token.flatten(),
        };
        let credential = Credential { certificate, token, audiences: &self.tokens.audiences, path, cache };
        self.user(&credential).await.ok_or_else(ApiError::unauthorized)
    }

    /// Authenticates a token for one of the audiences.
    pub(crate) async fn token_user(&self, cache: &Cache, token: &str, audiences: &[String]) -> Option<User> {
        self.user(&Credential { certificate: None, token: Some(token), audiences, path: "", cache }).await
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
        let is_allowed = match &self.0 {
            AnonymousConfig::Enabled => true,
            AnonymousConfig::Disabled => false,
            AnonymousConfig::Paths(paths) => paths.iter().any(|path| path == credential.path),
        };
        known((is_allowed && credential.token.is_none()).then(User::anonymous))
    }
}

/// A token from the network, as the authenticators of tokens read it.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn fuzz(token: &str) {
    oidc::fuzz(token);
    service_account::fuzz(token);
}

/// The answer of a local authenticator.
fn known<'a>(user: Option<User>) -> Authenticating<'a> {
    Either::Left(ready(user))
}
