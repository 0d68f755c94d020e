//! Authentication: a chain of authenticators. The first one that recognizes the credential decides. A request without
//! credentials is anonymous.

mod bootstrap_token;
pub(crate) mod legacy_use;
pub(crate) mod service_account;
mod token_file;
mod x509;

use std::{collections::BTreeMap, path::Path};

use http::HeaderMap;
use rustls_pki_types::CertificateDer;

use crate::{
    cache::Cache,
    error::{ApiError, Result},
};
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

pub(crate) struct Authenticators {
    pub(crate) token_file: Option<TokenFile>,
    pub(crate) tokens: Tokens,
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
    pub(crate) fn new(token_file: Option<&Path>, tokens: Tokens) -> std::io::Result<Self> {
        Ok(Self { token_file: token_file.map(TokenFile::read).transpose()?, tokens })
    }

    /// Authenticates a request from the network.
    pub(crate) fn identify(
        &self,
        cache: &Cache,
        certificate: Option<&CertificateDer<'_>>,
        headers: &HeaderMap,
    ) -> Result<User> {
        if let Some(user) = certificate.and_then(x509::user) {
            return Ok(user);
        }
        let Some(header) = headers.get(http::header::AUTHORIZATION) else { return Ok(User::anonymous()) };
        let token = header.to_str().ok().and_then(|text| {
            let (scheme, token) = text.split_once(' ')?;
            scheme.eq_ignore_ascii_case("bearer").then_some(token.trim())
        });
        let token = token.ok_or_else(ApiError::unauthorized)?;
        self.token_user(cache, token, &self.tokens.audiences).ok_or_else(ApiError::unauthorized)
    }

    /// Authenticates a token for one of the audiences.
    pub(crate) fn token_user(&self, cache: &Cache, token: &str, audiences: &[String]) -> Option<User> {
        let known = self.token_file.as_ref().and_then(|file| file.user(token));
        // A bootstrap token is valid for this API server only.
        let for_us = || audiences.iter().any(|one| self.tokens.audiences.contains(one));
        known
            .or_else(|| self.tokens.user(cache, token, audiences))
            .or_else(|| bootstrap_token::user(cache, token).filter(|_| for_us()))
    }
}
